"""The directories of a participant's machine, of which a server reads no path.

The name of its owner may be in it, and where a task or its files are is not the server's business.

>>> places = OwnPlaces({"--tasks": Path("/home/ann/tasks")})
>>> places.hidden("task.source: there is no file /home/ann/tasks/learn/task.py")
'task.source: there is no file --tasks/learn/task.py'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


class OwnPlaces:
    """Directories, and what stands for each in a sentence for others."""

    def __init__(self, places: Mapping[str, Path | None]) -> None:
        """Know these directories, and the home directory of this process's user as `~`."""
        named: dict[str, str] = {}
        for name, path in {**places, "~": _home()}.items():
            if path is None:
                continue
            for each in (path.absolute(), path.resolve()):
                if each != each.parent:  # all paths are in the root
                    named.setdefault(str(each), name)
        # The longest first: one of them may contain another.
        longest = sorted(named, key=len, reverse=True)
        self._named = named
        self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest))})(?!\w)")

    def hidden(self, text: str) -> str:
        """A text with the names of the directories in place of their paths."""
        if not self._named:  # as of a user of a container whose home is the root
            return text
        return self._pattern.sub(lambda found: self._named[found[0]], text)


def _home() -> Path | None:
    """The home directory of this process's user; None for a user without one."""
    try:
        return Path.home()
    except RuntimeError:
        return None
