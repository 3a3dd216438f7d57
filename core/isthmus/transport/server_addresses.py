"""Addresses of mirrors and stores that a server names, as far as a participant's owner allows them.

A server that could name any address could have a participant ask hosts inside its owner's network.
"""

from __future__ import annotations

import logging
import re
import ssl
import threading
import urllib.parse
from collections.abc import Sequence

from isthmus.errors import UserError
from isthmus.printable import in_a_line
from isthmus.transport.allowed_addresses import HTTPS, is_allowed, is_ipv6
from isthmus.transport.blob_sources import Rest
from isthmus.transport.encrypted_blobs import KEY_BYTES
from isthmus.wire import link_pb2

_LONGEST_ADDRESS = 4096
"""Signed addresses have a thousand characters and more."""
_NAME = re.compile(r"[0-9a-f]{64}")
_HOST = re.compile(r"[a-z0-9][a-z0-9_.-]*|(?:[a-z0-9_*?-]+\.)+[a-z0-9_-]+\.[a-z][a-z0-9-]*")
"""What a pattern may have as its host: one, or wildcards in front of a domain of two parts."""

log = logging.getLogger(__name__)


def check_patterns(patterns: Sequence[str], named: str) -> None:
    """Refuse patterns of addresses that would let a server name any host, or no file.

    Args:
        patterns: of the owner.
        named: where they are, for the sentence.

    Raises:
        UserError: one of them names no host, or only a folder.
    """
    for pattern in patterns:
        host, slash, path = pattern.removeprefix(HTTPS).partition("/")
        if not pattern.startswith(HTTPS) or not _names_a_host(host):
            raise UserError(
                f"{named}: {pattern!r} has to name a host, as in https://HOST/*, or a domain, as "
                "in https://*.example.org/*: a server could have this device ask any host inside "
                "your network"
            )
        if slash and "*" not in path:
            # The name of a file is that of its encrypted bytes, which nobody knows before.
            raise UserError(
                f"{named}: {pattern!r} is for no file: for all files of a folder, end it in /*"
            )


def _names_a_host(host: str) -> bool:
    """Whether what a pattern has as its host, with a port, is of one host or of one domain's."""
    name = re.sub(r":[0-9*?]*$", "", host.lower())
    return is_ipv6(host) or _HOST.fullmatch(name) is not None


class ServerAddresses:
    """Addresses for one purpose of a server, as far as the owner of a participant allows them.

    Guarantees:
      * nothing is asked of a host, or under a path, that no pattern of the owner is for;
      * an address is asked only about a file with a name of 64 hexadecimal digits;
      * all of them together are left alone for a while after one hung, lied or broke off.
    """

    def __init__(self, patterns: Sequence[str], named: str, otherwise: str) -> None:
        """Ask nothing yet.

        Args:
            patterns: of the addresses that the server may name; see `is_allowed`.
            named: where they are, for sentences.
            otherwise: how a sentence begins about an address that is not asked.

        Raises:
            UserError: one of them names no host, or only a folder.
        """
        check_patterns(patterns, named)
        self._patterns = tuple(patterns)
        self._named = named
        self._otherwise = otherwise
        self._rest = Rest()
        self._has_told = False
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None

    def may_ask(self, blob: link_pb2.Blob) -> bool:
        """Whether the address of a blob may be asked; the first one that may not be is logged."""
        why = ""
        if len(blob.address) > _LONGEST_ADDRESS or len(blob.key) != KEY_BYTES:
            why = "is none that can be used"
        elif not self.allows(blob.address):
            why = f"is not allowed by {self._named}"
        elif not is_of_a_blob(blob.address):
            why = "is of no blob"
        if why and not self._has_told:
            self._has_told = True
            shown = in_a_line(folder_of(blob.address[:_LONGEST_ADDRESS]))[:200]
            log.warning("%s %s %s", self._otherwise, shown, why)
        return not why

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


def is_of_a_blob(address: str) -> bool:
    """Whether an address is of a file with the name of a blob."""
    return _NAME.fullmatch(name_in(address)) is not None


def name_in(address: str) -> str:
    """The last part of an address's path; empty if it is none that can be used."""
    try:
        return urllib.parse.urlsplit(address).path.rpartition("/")[2]
    except ValueError:  # of a host in brackets that is no address
        return ""


def without_query(address: str) -> str:
    """An address without its signature, which is secret."""
    return address.partition("?")[0]


def host_of(address: str) -> str:
    """The host of an address with its port, for sentences."""
    return address.removeprefix(HTTPS).partition("/")[0]


def folder_of(address: str) -> str:
    """The folder of an address, for sentences."""
    folder, slash, _ = without_query(address).rpartition("/")
    return folder + slash
