"""Reading the output of processes that ended."""

from __future__ import annotations

import os
from pathlib import Path

_TAIL_BYTES = 1 << 14
_LONGEST = 300
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
