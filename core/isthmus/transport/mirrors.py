"""Mirrors: web servers where the server has put blobs, which participants fetch there.

The server names one, so a participant asks only where its owner lets the server send it. What is
there is encrypted with a key that is in the request alone: who has the mirror, or passes its bytes
on, learns no model. A participant decrypts it, and verifies the SHA-256 as of any source.
"""

from __future__ import annotations

import io
import logging
import re
import ssl
import threading
import urllib.parse
from collections.abc import Sequence
from http.client import HTTPResponse
from typing import IO, Protocol, cast

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from isthmus.errors import UserError
from isthmus.printable import in_a_line
from isthmus.transport.allowed_addresses import HTTPS, is_allowed, is_ipv6
from isthmus.transport.blob_sources import Rest, RestingSource
from isthmus.transport.https_source import HttpsSource
from isthmus.wire import link_pb2

KEY_BYTES = 32
_BLOCK_BYTES = 16
_LONGEST_ADDRESS = 4096
"""Signed addresses have a thousand characters and more."""
_NAME = re.compile(r"[0-9a-f]{64}")
_HOST = re.compile(r"[a-z0-9][a-z0-9_.-]*|(?:[a-z0-9_*?-]+\.)+[a-z0-9_-]+\.[a-z][a-z0-9-]*")
"""What a pattern may have as its host: one, or wildcards in front of a domain of two parts."""

log = logging.getLogger(__name__)


class Keystream(Protocol):
    """Encrypts, or decrypts, bytes in their order."""

    def update(self, data: bytes) -> bytes:
        """The next bytes."""
        ...


def keystream(key: bytes, offset: int) -> Keystream:
    """AES-256 in counter mode for a blob, from one of its bytes on.

    It says nothing of whether the bytes are the right ones: that is what the SHA-256 is for.

    Args:
        key: of `KEY_BYTES`, which is used for one blob only.
        offset: of the first byte.

    >>> whole = keystream(bytes(32), 0).update(bytes(50))
    >>> keystream(bytes(32), 37).update(bytes(13)) == whole[37:]
    True
    """
    counter = (offset // _BLOCK_BYTES).to_bytes(_BLOCK_BYTES, "big")
    encryptor = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
    encryptor.update(bytes(offset % _BLOCK_BYTES))
    return encryptor


def check_patterns(patterns: Sequence[str], named: str) -> None:
    """Refuse patterns of addresses that would let a server name any host.

    Args:
        patterns: of the owner.
        named: where they are, for the sentence.

    Raises:
        UserError: one of them names no host.
    """
    for pattern in patterns:
        host = pattern.removeprefix(HTTPS).partition("/")[0]
        if not pattern.startswith(HTTPS) or not _names_a_host(host):
            raise UserError(
                f"{named}: {pattern!r} has to name a host, as in https://HOST/*, or a domain, as "
                "in https://*.example.org/*: a server could have this device ask any host inside "
                "your network"
            )


def _names_a_host(host: str) -> bool:
    """Whether what a pattern has as its host, with a port, is of one host or of one domain's."""
    name = re.sub(r":[0-9*?]*$", "", host.lower())
    return is_ipv6(host) or _HOST.fullmatch(name) is not None


class MirrorSources:
    """The mirrors of a server, as far as the owner of a participant allows them.

    Guarantees:
      * nothing is asked of a host, or under a path, that no pattern of the owner is for, also when
        a mirror redirects;
      * an address, also one of a redirection, is asked only for a file with a name of 64
        hexadecimal digits;
      * all mirrors together are left alone for a while after one hung, lied or broke off.
    """

    def __init__(self, patterns: Sequence[str], named: str) -> None:
        """Ask nothing yet.

        Args:
            patterns: of the addresses that the server may name; see `is_allowed`.
            named: where they are, for sentences.

        Raises:
            UserError: one of them names no host.
        """
        check_patterns(patterns, named)
        self._patterns = tuple(patterns)
        self._named = named
        self._rest = Rest()
        self._has_told = False
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None

    def of(self, blob: link_pb2.Blob) -> RestingSource | None:
        """Where a blob is besides the link; None if it is nowhere, or may not be asked for there.

        The first one that may not be is said in the log.
        """
        if not blob.address:
            return None
        why = ""
        if len(blob.address) > _LONGEST_ADDRESS or len(blob.key) != KEY_BYTES:
            why = "is none that can be used"
        elif not self.allows(blob.address):
            why = f"is not allowed by {self._named}"
        elif not _is_of_a_blob(blob.address):
            why = "is of no blob"
        if not why:
            return _MirrorSource(blob.address, bytes(blob.key), self)
        if not self._has_told:
            self._has_told = True
            shown = in_a_line(_without_query(blob.address[:_LONGEST_ADDRESS]))[:200]
            log.warning("models come on the link: the server's mirror %s %s", shown, why)
        return None

    def allows(self, address: str) -> bool:
        """Whether the owner lets the server name an address."""
        return is_allowed(address, self._patterns)

    @property
    def rest(self) -> Rest:
        """The rest of all of them."""
        return self._rest

    def context(self) -> ssl.SSLContext:
        """The authorities that this machine trusts, which are read once; called from threads."""
        with self._lock:
            if self._context is None:
                self._context = ssl.create_default_context()
            return self._context


class _MirrorSource(RestingSource):
    """One blob at a mirror."""

    def __init__(self, address: str, key: bytes, sources: MirrorSources) -> None:
        super().__init__(f"the mirror {_without_query(address)}", sources.rest)
        self._address = address
        self._key = key
        self._sources = sources

    def open(self, sha256: str, size: int, offset: int) -> IO[bytes] | None:
        """See `BlobSource.open`.

        Raises:
            OSError: the mirror cannot be reached, or answers with an error.
        """
        try:
            web = HttpsSource(
                self._address.removeprefix("https:"),
                {sha256: _name_in(self._address)},
                allowed=lambda address: self._sources.allows(address) and _is_of_a_blob(address),
                context=self._sources.context(),
            )
        except UserError as error:
            raise OSError(str(error)) from None
        stream = web.open(sha256, size, offset)
        if stream is None:
            log.warning("%s does not have it; it comes on the link", self.named)
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


def _is_of_a_blob(address: str) -> bool:
    """Whether an address is of a file with the name of a blob."""
    return _NAME.fullmatch(_name_in(address)) is not None


def _name_in(address: str) -> str:
    """The last part of an address's path; empty if it is none that can be used."""
    try:
        return urllib.parse.urlsplit(address).path.rpartition("/")[2]
    except ValueError:  # of a host in brackets that is no address
        return ""


def _without_query(address: str) -> str:
    """An address without its signature, which is secret."""
    return address.partition("?")[0]
