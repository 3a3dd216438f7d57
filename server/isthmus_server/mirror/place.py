"""Where a server puts blobs for a web server to serve, and which addresses it tells devices.

`--mirror file:FOLDER` is a folder of any static web server, or one that a content delivery network
has as its origin; `--mirror s3:BUCKET/PREFIX` is in a store that speaks the protocol of S3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import IO, Protocol

NAME = re.compile(r"[0-9a-f]{64}")
"""Names of blobs at a mirror."""
MARKER = "isthmus-mirror"
"""A file that says whose mirror this is: what is there besides is not deleted."""
UPLOADS_MARKER = "isthmus-uploads"
"""A file that says whose place for updates this is."""


class OwnedPlace(Protocol):
    """Has files of one server.

    Calls come from several threads, and raise `OSError` for what may pass.
    """

    def claim(self, owner: str) -> None:
        """Make it the place of a server, whose fingerprint is `owner`.

        Raises:
            UserError: it is another server's, has files of others, or cannot be used.
        """
        ...

    def names(self) -> Iterable[str]:
        """Names of the blobs that are there, whole or not."""
        ...

    def remove(self, name: str) -> None:
        """Have no such file there."""
        ...


class MirrorPlace(OwnedPlace, Protocol):
    """Has blobs for devices to fetch."""

    def put(self, name: str, stream: IO[bytes], size: int) -> None:
        """Have a file there, which has all of its bytes or is not there."""
        ...

    def address(self, name: str) -> str:
        """Where devices get a file, `https://` and all; valid for hours."""
        ...


class UploadStore(OwnedPlace, Protocol):
    """Has updates of devices."""

    def upload_address(self, name: str, size: int) -> str:
        """Where a device puts a file of so many bytes by one PUT, `https://` and all.

        It is valid for an hour.
        """
        ...

    def open(self, name: str) -> tuple[IO[bytes], int]:
        """A file from its beginning, and its size.

        Raises:
            FileNotFoundError: there is none of this name.
        """
        ...
