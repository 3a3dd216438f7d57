"""Read and delete the logs of agents and ranks that have ended."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_TAIL_BYTES = 1 << 14
_ABORT_TAIL_BYTES = 1 << 18
"""Bytes at the end of a log that are read after an abort, which is followed by the stacks of all
threads."""
_MAX_LINE_CHARACTERS = 300
_KEPT_GENERATIONS = 10
"""Every start of a service, or of ranks that died too often, is a new generation."""
_SAID = "what():"
"""What C++ writes before the text of an exception that nothing caught."""
_OTHER_SIZE = "op.preamble.length <= op.nbytes"
"""What gloo requires of a message that arrives."""
_NOISE_PREFIXES = ("[W", "[E", "[I", "[rank", "^", "~", "frame #")


def last_line(log: Path) -> str:
    r"""The last line of a log that is useful to a person; empty if there is none.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
    ...     print("ValueError: no such split\n\n[W1121 noise", file=file, flush=True)
    ...     last_line(Path(file.name))
    'ValueError: no such split'
    """
    lines = [line.strip() for line in _tail(log, _TAIL_BYTES)]
    useful = [line for line in lines if line and not line.startswith(_NOISE_PREFIXES)]
    return useful[-1][:_MAX_LINE_CHARACTERS] if useful else ""


def abort_reason(log: Path) -> str:
    r"""What native code said before it ended a process; empty if the log has no such line.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
    ...     print("terminate called\n  what():  no memory\nFatal error", file=file, flush=True)
    ...     abort_reason(Path(file.name))
    'no memory'
    """
    lines = [line.strip() for line in _tail(log, _ABORT_TAIL_BYTES)]
    said = [line.removeprefix(_SAID).strip() for line in lines if line.startswith(_SAID)]
    if not said:
        return ""
    reason = said[-1][:_MAX_LINE_CHARACTERS].rstrip(". ")
    if _OTHER_SIZE in reason:
        reason += " (gloo: another rank sent more than this one expects; have all ranks call the"
        reason += " same collectives, with tensors of the same size)"
    return reason


def delete_old_logs(logs: Path, starting_generation: int) -> None:
    """Delete the logs of all generations but the last ten and the one that is being started.

    An agent writes to ``agent-<generation>.log``, its ranks to ``generation-<generation>_*``.
    """
    paths_by_generation: dict[int, list[Path]] = {}
    for path in (*logs.glob("agent-*.log"), *logs.glob("generation-*_*")):
        digits = path.name.partition("-")[2].partition(".")[0].partition("_")[0]
        if digits.isdecimal():
            paths_by_generation.setdefault(int(digits), []).append(path)
    paths_by_generation.pop(starting_generation, None)  # another node may already write to them
    for generation in sorted(paths_by_generation)[:-_KEPT_GENERATIONS]:
        for path in paths_by_generation[generation]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _tail(log: Path, count: int) -> list[str]:
    """The lines in the last bytes of a file; none if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - count))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
