"""The address of a server behind a balancer that ends TLS.

Such a balancer (nginx, Envoy, a cloud's) does not show the server who calls it. The connection to
the server, with its own mutual TLS, is therefore within a WebSocket that the balancer forwards. The
outer TLS, to the balancer, is only a road: what it protects is protected once more within.

>>> balancer = Balancer.at("wss://fleet.example.org/isthmus")
>>> balancer.place, balancer.path
('fleet.example.org:443', '/isthmus')
>>> Balancer.at("wss://[fd00::5]:8443").url
'wss://[fd00::5]:8443/'
"""

from __future__ import annotations

import dataclasses
import re
import ssl
from pathlib import Path

from isthmus.errors import UserError, cause_of
from isthmus.identity import tls

SCHEME = "wss://"
"""How the address of a server behind a balancer begins."""
PROTOCOL = "isthmus-tls"
"""The protocol within the WebSocket, by which both ends know each other."""

_PORT = 443
_LONGEST_PATH = 1024
"""Characters of a path."""
_URL = re.compile(
    r"wss://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_.])?)"
    r"(?::([0-9]{1,5}))?(/[!-\"$-~]*)?"
)
_OTHER = re.compile(r"(ws|https?)://", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Balancer:
    """Where a balancer forwards WebSockets to a server."""

    host: str
    """A name or an address, IPv6 in brackets. The server's certificate is for it, too."""
    port: int
    path: str
    """Path of the address, with a query if there is one."""
    ca: Path | None = None
    """Certificates (PEM) of the authorities that the balancer's may be of; None: this machine's."""

    @classmethod
    def at(cls, url: str, ca: Path | None = None) -> Balancer:
        """Read an address that begins with `SCHEME`.

        Raises:
            UserError: it is not of that form.
        """
        if is_behind_balancer(url):
            url = SCHEME + url[len(SCHEME) :]  # which may be in capitals
        if "@" in url.removeprefix(SCHEME).partition("/")[0]:
            raise UserError(  # which has no password, as others would
                "the server's address has a user name or a password before its host, and needs "
                f"none: give {SCHEME}HOST/PATH"
            )
        match = _URL.fullmatch(url)
        port = int(match[2]) if match is not None and match[2] else _PORT
        if match is None or not 0 < port <= 65535 or len(match[3] or "") > _LONGEST_PATH:
            raise UserError(
                f"the server's address {url!r} is not of the form {SCHEME}HOST/PATH or "
                f"{SCHEME}HOST:PORT/PATH"
            )
        return cls(match[1], port, match[3] or "/", ca)

    def __str__(self) -> str:
        return f"the balancer {self.place}"

    @property
    def place(self) -> str:
        """Where it listens, HOST:PORT."""
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The address in its usual form."""
        port = "" if self.port == _PORT else f":{self.port}"
        return f"{SCHEME}{self.host}{port}{self.path}"

    def context(self) -> ssl.SSLContext:
        """The outer TLS: the balancer's certificate has to be for its name.

        Raises:
            UserError: the file of authorities cannot be used.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:  # of TLS, too
            cause = "no certificate is in it" if isinstance(error, ssl.SSLError) else ""
            raise UserError(
                f"--balancer-ca {self.ca} cannot be used: {cause or cause_of(error)}"
            ) from None
        context.set_alpn_protocols(["http/1.1"])  # WebSockets are not opened in HTTP/2 here
        return context


def is_behind_balancer(address: str) -> bool:
    """Whether a server's address is that of a balancer before it."""
    return address.lower().startswith(SCHEME)


def host_and_port(address: str) -> tuple[str, int]:
    """Host and port at which a server, or the balancer before it, is dialled.

    Raises:
        UserError: the address has another form.
    """
    if is_behind_balancer(address):
        balancer = Balancer.at(address)
        return balancer.host, balancer.port
    if other := _OTHER.match(address):
        raise UserError(
            f"the server's address {address!r} begins with {other[0]}: give HOST:PORT, or "
            f"{SCHEME}HOST/PATH for a server behind a balancer that ends TLS"
        )
    if "/" in address:
        raise UserError(
            f"the server's address {address!r} is not of the form HOST:PORT, or "
            f"{SCHEME}HOST/PATH for a server behind a balancer that ends TLS"
        )
    return tls.split_address(address, "the server's address")
