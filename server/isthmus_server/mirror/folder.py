"""A folder that a web server serves."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from isthmus.errors import UserError, cause_of
from isthmus_server.mirror.place import MARKER, NAME

_PART = ".part"
"""How the name of a file ends that is being written."""
_PIECE_BYTES = 1 << 20
_READABLE = 0o644
"""A web server is another user, and what it reads is encrypted."""


class MirrorFolder:
    """`file:FOLDER`, see `isthmus_server.mirror.place.MirrorPlace`."""

    def __init__(self, target: str, url: str) -> None:
        """Name the folder, and the address at which it is served.

        Raises:
            UserError: it is no whole path.
        """
        self._folder = Path(target)
        self._url = url
        if not self._folder.is_absolute():
            raise UserError(f"--mirror file:{target} has to name a folder from / on")

    def claim(self, owner: str) -> None:
        """See `MirrorPlace.claim`."""
        marker = self._folder / MARKER
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not marker.exists():
                if any(path.name != MARKER for path in self._folder.iterdir()):
                    raise UserError(
                        f"--mirror file:{self._folder} has other files; name a folder that is "
                        "empty, or does not exist"
                    )
                # Two servers may claim it at the same time: one of them makes the file.
                with contextlib.suppress(FileExistsError):
                    _write_new(marker, f"{owner}\n")
            found = marker.read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            raise UserError(
                f"--mirror file:{self._folder} cannot be used: {error.strerror or error}"
            ) from None
        if not found:
            raise UserError(
                f"{marker} is empty, as after a crash; remove it if no other server starts with "
                "this mirror"
            )
        if found != owner:
            raise UserError(
                f"--mirror file:{self._folder} is the mirror of another server; name another folder"
            )

    def names(self) -> Iterable[str]:
        """See `MirrorPlace.names`."""
        found = (entry.name.removesuffix(_PART) for entry in os.scandir(self._folder))
        return [name for name in found if NAME.fullmatch(name)]

    def put(self, name: str, stream: IO[bytes], size: int) -> None:
        """See `MirrorPlace.put`."""
        part = self._folder / f"{name}{_PART}"
        try:
            with part.open("wb") as file:
                os.fchmod(file.fileno(), _READABLE)
                shutil.copyfileobj(stream, file, _PIECE_BYTES)
                if file.tell() != size:
                    raise OSError(f"{file.tell()} of {size} bytes were written")
            part.replace(self._folder / name)
        except BaseException as error:
            with contextlib.suppress(OSError):
                part.unlink()
            if isinstance(error, FileNotFoundError):
                raise OSError(f"there is no folder {self._folder} any more") from None
            if isinstance(error, OSError):
                raise OSError(f"{self._folder}: {cause_of(error)}") from None
            raise

    def remove(self, name: str) -> None:
        """See `MirrorPlace.remove`."""
        for file in (name, f"{name}{_PART}"):
            (self._folder / file).unlink(missing_ok=True)

    def address(self, name: str) -> str:
        """See `MirrorPlace.address`."""
        return f"{self._url}{name}"


def _write_new(path: Path, text: str) -> None:
    """Write a file that only this process makes; there is none if it cannot be written.

    Raises:
        FileExistsError: another process has made it.
        OSError: it cannot be written.
    """
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
