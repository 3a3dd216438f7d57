"""The output of processes that ended: reading it, and letting go of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_TAIL_BYTES = 1 << 14
_LONGEST = 300
_GENERATIONS = 10
"""Whose output is kept: every start of a service, or of ranks that died too often, is a new one."""
_NOISE = ("[W", "[E", "[I", "[rank", "^", "~", "frame #")


def last_words(log: Path) -> str:
    r"""The last line of a log that tells a person something, or nothing.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
    ...     print("ValueError: no such split\n\n[W1121 noise", file=file, flush=True)
    ...     last_words(Path(file.name))
    'ValueError: no such split'
    """
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines()]
    useful = [line for line in lines if line and not line.startswith(_NOISE)]
    return useful[-1][:_LONGEST] if useful else ""


def keep_latest(logs: Path, beside: int) -> None:
    """Delete what agents and ranks have said, but for ten generations `beside` one that begins.

    An agent writes into ``agent-<generation>.log``, its ranks into ``generation-<generation>_*``.
    """
    of: dict[int, list[Path]] = {}
    for path in (*logs.glob("agent-*.log"), *logs.glob("generation-*_*")):
        named = path.name.partition("-")[2].partition(".")[0].partition("_")[0]
        if named.isdecimal():
            of.setdefault(int(named), []).append(path)
    of.pop(beside, None)  # on another node it may have begun
    for generation in sorted(of)[:-_GENERATIONS]:
        for path in of[generation]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
