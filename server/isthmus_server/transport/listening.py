"""Sockets that listen at all addresses of a host, at one port."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator

from isthmus_server.transport.limits import cannot_listen

WAITING = 4096
"""Most connections that wait in the kernel to be accepted; it drops further ones."""

_ALL = "::"
_ALL_OF_IPV4 = "0.0.0.0"  # noqa: S104 - where the operator wants it
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


async def listening_sockets(host: str, port: int) -> tuple[list[socket.socket], int]:
    """Listen at a host's addresses; returns the sockets, which do not block, and the port.

    Args:
        host: a name or an address; a wildcard is for both IPv4 and IPv6, as in gRPC.
        port: 0 for any, which is then the same for all addresses.

    Raises:
        UserError: the port is in use, or the host is not an address of this machine.
    """
    sockets: list[socket.socket] = []
    try:
        for family, address in await _addresses(host):
            if sockets and address == _ALL_OF_IPV4:
                continue  # the one of IPv6 is for both
            with _unless_absent():
                sockets.append(_listening(family, address, port))
                port = int(sockets[-1].getsockname()[1])  # the same for all of them
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, host)
    except OSError:
        for each in sockets:
            each.close()
        raise cannot_listen(f"{host}:{port}") from None
    for each in sockets:
        each.setblocking(False)
    return sockets, port


async def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """The families and addresses of a host to listen on, without repetitions.

    Raises:
        OSError: there are none.
    """
    name = host.strip("[]")
    if name in (_ALL_OF_IPV4, _ALL, ""):
        both = [(socket.AF_INET6, _ALL)] if socket.has_dualstack_ipv6() else []
        return [*both, (socket.AF_INET, _ALL_OF_IPV4)]
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, str(where[0])) for family, _, _, _, where in found))


def _listening(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        OSError: the port is in use, or the address is not of this machine.
    """
    return socket.create_server(
        (address, port), family=family, backlog=WAITING, dualstack_ipv6=address == _ALL
    )


@contextlib.contextmanager
def _unless_absent() -> Iterator[None]:
    """Pass over an address of a host that this machine does not have."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
