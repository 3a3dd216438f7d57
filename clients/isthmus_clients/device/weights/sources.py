"""Where a device fetches the files of a model from, in the order in which it asks.

All are an `isthmus.transport.blob_sources.BlobSource`: folders and web servers, which the owner or
the job names, what packages provide, and the link to the server.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import io
import os
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from isthmus.errors import UpdateError, UserError
from isthmus.job import Job
from isthmus.start.manifest import StartManifest
from isthmus.transport.allowed_addresses import ANY, HTTPS, is_allowed
from isthmus.transport.blob_sources import BlobSource, NamedSource
from isthmus.transport.https_source import HttpsSource
from isthmus_clients.device.owner_limits import WeightLimits

PULL_BYTES = 1 << 20
"""Bytes that are asked for at a time on the link, besides which a round's model passes."""
_ANSWER_SECONDS = 300.0
_OF_THE_OWNER = "its owner's sources"
"""What the server reads of all of them together: neither what they are, nor how many."""
Pull = Callable[[bytes, int, int], Awaitable[bytearray]]
"""A piece of a blob on the link, see `isthmus.transport.uplink.Uplink.piece`."""


@dataclasses.dataclass(frozen=True)
class WeightSource:
    """A source of a model's files."""

    source: BlobSource
    named: str
    """For the device's log."""
    public: str = _OF_THE_OWNER
    """For the server, which does not learn what the owner has named."""
    is_network: bool = True
    """Whether its bytes count as received."""
    is_link: bool = False

    def told(self, why: str) -> str:
        """What the server reads of why it did not give a file.

        Of the owner's sources that is always the same: a reason may have a path or an address in
        it, and says whether a file of some name or size is there.
        """
        return "see this device's log" if self.public == _OF_THE_OWNER else why


def sources_of(
    limits: WeightLimits,
    job: Job,
    manifest: StartManifest,
    blobs: Sequence[NamedSource],
    link: LinkSource | None,
    skipped: Callable[[int], None] | None = None,
) -> Iterator[WeightSource]:
    """The sources for a job's model.

    Args:
        limits: of the owner, with the owner's sources.
        job: with its own.
        manifest: the model's files.
        blobs: sources of blobs that the owner has named for this process.
        link: the server; None without a connection.
        skipped: see `HttpsSource`.

    Raises:
        UserError: an address cannot be used.
    """
    names = {file.sha256: file.name for file in manifest.files}
    for named in limits.sources:
        if named.startswith("file:"):
            folder = NamedFiles(Path(named.removeprefix("file:")), names)
            yield WeightSource(folder, named, is_network=False)
        else:
            web = HttpsSource(named.removeprefix("https:"), names, skipped)
            yield WeightSource(web, web.named)
    for blob in blobs:
        if not blob.rests:
            is_network = not blob.named.startswith("file:")
            yield WeightSource(blob, f"--blobs {blob.named}", is_network=is_network)
    for address in job.model.sources:
        if is_allowed(address, limits.job_sources):
            web = HttpsSource(address.removeprefix("https:"), names, skipped)
            yield WeightSource(web, web.named, web.named)
    if link is not None and limits.link:
        yield WeightSource(link, "the server", "this server", is_link=True)


class NamedFiles:
    """`file:PATH`: a folder with files named as the model's, or by their SHA-256; or one file."""

    def __init__(self, path: Path, names: Mapping[str, str]) -> None:
        """`names` are the files' names by SHA-256."""
        self._path = path
        self._names = names

    def open(self, sha256: str, size: int, offset: int) -> IO[bytes] | None:
        """See `BlobSource.open`; a file of another size is not the blob."""
        name = self._names.get(sha256)
        if name is None:
            return None
        for path in (self._path / sha256, self._path / name, self._path):
            try:
                # Without waiting for the other end if it is a pipe.
                handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                continue
            found = os.fstat(handle)
            if stat.S_ISREG(found.st_mode) and found.st_size == size:
                file = os.fdopen(handle, "rb", buffering=0)
                file.seek(offset)
                return file
            os.close(handle)
        return None


class LinkSource:
    """The server: its link, besides what else passes there."""

    def __init__(self, pull: Pull, loop: asyncio.AbstractEventLoop) -> None:
        """`pull` runs on the loop of the link."""
        self._pull = pull
        self._loop = loop

    def open(self, sha256: str, size: int, offset: int) -> IO[bytes] | None:
        """See `BlobSource.open`."""
        stream: IO[bytes] = _LinkStream(self, bytes.fromhex(sha256), size, offset)
        return stream

    def piece(self, sha256: bytes, offset: int, length: int) -> bytearray:
        """Wait for a piece.

        Raises:
            OSError: the link broke, or the server does not send it.
        """

        async def pulled() -> bytearray:
            return await self._pull(sha256, offset, length)

        future = asyncio.run_coroutine_threadsafe(pulled(), self._loop)
        try:
            return future.result(_ANSWER_SECONDS)
        except (TimeoutError, concurrent.futures.CancelledError) as error:
            future.cancel()
            raise ConnectionError("the server does not answer") from error
        except UpdateError as error:
            raise OSError(str(error)) from None


class _LinkStream(io.BytesIO):
    """A blob on the link from a position on, of which one piece is in memory at a time."""

    def __init__(self, link: LinkSource, sha256: bytes, size: int, offset: int) -> None:
        super().__init__()
        self._link = link
        self._sha256 = sha256
        self._size = size
        self._at = offset

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes: fewer than `size` at the end of a piece."""
        return self.read1(size)

    def read1(self, size: int | None = -1, /) -> bytes:
        """See `read`."""
        if not (data := super().read1(size)):
            length = min(PULL_BYTES, self._size - self._at)
            if length:
                piece = self._link.piece(self._sha256, self._at, length)
                self._at += length
                super().__init__(piece)
                data = super().read1(size)
        return data


def check_sources(limits: WeightLimits) -> None:
    """Refuse sources of an owner that cannot be used, when the device starts.

    Raises:
        UserError: one is of another kind.
    """
    for named in limits.sources:
        if named.startswith("https:"):
            HttpsSource(named.removeprefix("https:"), {})
        elif not named.startswith("file:/"):
            raise UserError(
                f"sources, in [weights] of policy.toml: {named!r} is neither https://HOST/FOLDER/ "
                "nor file:/FOLDER"
            )
    for pattern in limits.job_sources:
        if pattern != ANY and not pattern.startswith(HTTPS):
            raise UserError(
                f"job_sources, in [weights] of policy.toml: {pattern!r} has to begin with "
                "https://, as in https://HOST/*, or be *"
            )
