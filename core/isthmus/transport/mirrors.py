"""Mirrors: web servers where the server has put blobs, which participants fetch there.

The server names one, so a participant asks only where its owner lets the server send it. What is
there is encrypted with a key that is in the request alone: who has the mirror, or passes its bytes
on, learns no model. A participant decrypts it, and verifies the SHA-256 as of any source.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from http.client import HTTPResponse
from typing import IO, cast

from isthmus.errors import UserError
from isthmus.transport.blob_sources import REST_SECONDS, RestingSource
from isthmus.transport.encrypted_blobs import keystream
from isthmus.transport.https_source import HttpsSource
from isthmus.transport.kept_connections import KeptConnection
from isthmus.transport.server_addresses import (
    ServerAddresses,
    host_of,
    is_of_a_blob,
    name_in,
)
from isthmus.wire import link_pb2

log = logging.getLogger(__name__)


class MirrorSources(ServerAddresses):
    """The mirrors of a server, as far as the owner of a participant allows them.

    Guarantees, besides those of `ServerAddresses`:
      * redirections are followed only to addresses that may be asked as well.
    """

    def __init__(self, patterns: Sequence[str], named: str) -> None:
        """Ask nothing yet.

        Args:
            patterns: of the addresses that the server may name; see `is_allowed`.
            named: where they are, for sentences.

        Raises:
            UserError: one of them names no host.
        """
        super().__init__(patterns, named, "models come on the link: the server's mirror")
        self.kept = KeptConnection()
        """The connection to the mirror, for the next model."""

    def of(self, blob: link_pb2.Blob) -> RestingSource | None:
        """Where a blob is besides the link; None if it is nowhere, or may not be asked for there.

        The first one that may not be is said in the log.
        """
        if not blob.address or not self.may_ask(blob):
            return None
        return _MirrorSource(blob.address, bytes(blob.key), self)


class _MirrorSource(RestingSource):
    """One blob at a mirror."""

    then = (
        "; models come from the server, and the mirror is left alone for "
        f"{REST_SECONDS / 60:g} minutes"
    )

    def __init__(self, address: str, key: bytes, sources: MirrorSources) -> None:
        super().__init__(f"the mirror {host_of(address)}", sources.rest)
        self._address = address
        self._key = key
        self._sources = sources

    def about(self, blob: str) -> str:
        """See `RestingSource.about`: which blob it is says nothing to an owner."""
        return self.named

    def open(self, sha256: str, size: int, offset: int) -> IO[bytes] | None:
        """See `BlobSource.open`.

        Raises:
            OSError: the mirror cannot be reached, or answers with an error.
        """
        try:
            web = HttpsSource(
                self._address.removeprefix("https:"),
                {sha256: name_in(self._address)},
                allowed=lambda address: self._sources.allows(address) and is_of_a_blob(address),
                context=self._sources.context(),
                kept=self._sources.kept,
            )
        except UserError as error:
            raise OSError(str(error)) from None
        try:
            stream = web.open(sha256, size, offset)
        except OSError as error:
            # The address begins the sentence already.
            raise OSError(str(error).replace(f"{web.named} ", "it ", 1)) from None
        if stream is None:
            log.warning("%s does not have a model; it comes from the server", self.named)
            return None
        return cast(IO[bytes], _Decrypted(cast(HTTPResponse, stream), self._key, offset))

    def failed(self) -> None:
        """See `RestingSource.failed`: it is not to cost each round a model."""
        self.rest()


class _Decrypted(io.BufferedIOBase):
    """What a mirror sends, decrypted."""

    def __init__(self, stream: HTTPResponse, key: bytes, offset: int) -> None:
        super().__init__()
        self._stream = stream
        self._keystream = keystream(key, offset)

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes, as soon as there are some: fewer than `size`, and none at the end."""
        return self._keystream.update(self._stream.read1(-1 if size is None else size))

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()
        super().close()
