"""A gRPC channel for joining, whose TLS says that it is for joining.

A server may have one port for everything: it requires a certificate of everybody but of those that
join, so it has to know in the first message of TLS who wants to join. They offer the protocol
`isthmus-join` next to HTTP/2 (ALPN, RFC 7301). gRPC's own TLS offers HTTP/2 alone; here Python's
makes the connection, and gRPC reaches it over a socket that only this user can open.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
from cryptography import x509

from isthmus.identity import tls
from isthmus.identity.obstacles import certificate_at, opened
from isthmus.identity.proxies import Road, RoadBlocked
from isthmus.system.private_socket import private_socket

JOIN_PROTOCOL = "isthmus-join"
"""What those that join offer in TLS; the server chooses HTTP/2, which they offer as well."""
JOIN_PROTOCOLS = (JOIN_PROTOCOL, "h2")

_PART = 16 << 10
"""Bytes that are passed on at a time."""


def trusting(authority: x509.Certificate | None) -> ssl.SSLContext:
    """TLS for joining that accepts servers with a certificate of this authority; None: all."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authority is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=tls.pem(authority).decode())
    context.set_alpn_protocols(list(JOIN_PROTOCOLS))
    return context


def _accept_all(_: x509.Certificate) -> None:
    """Check nothing beyond what TLS has checked."""


@contextlib.asynccontextmanager
async def join_channel(
    road: Road,
    context: ssl.SSLContext,
    options: tuple[tuple[str, int], ...],
    seconds: float,
    check: Callable[[x509.Certificate], None] = _accept_all,
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the end of a road during the block.

    Args:
        road: to the server.
        context: see `trusting`.
        options: of the channel.
        seconds: time for the connection and its TLS handshake.
        check: is given the certificate that the server has presented, before anything is sent, and
            may raise.

    Raises:
        RoadBlocked: no connection comes about, the certificate is not accepted, or what answers
            does not choose HTTP/2.
        OSError: the server ended the handshake; see `isthmus.identity.obstacles.ENDED`.
        UserError: there can be no socket in the temporary folder.
    """
    async with opened(road, context, seconds) as (reader, writer):
        passing: list[asyncio.Task[None]] = []

        def take(near: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
            if passing:  # gRPC tries again after the server has ended the connection
                near_writer.transport.abort()
                return
            passing.append(asyncio.create_task(_copy(near, writer)))
            passing.append(asyncio.create_task(_copy(reader, near_writer)))

        try:
            check(certificate_at(road, writer))
            if writer.get_extra_info("ssl_object").selected_alpn_protocol() != "h2":
                raise RoadBlocked(
                    f"what answers at {road.address}{road.detour} is not where a server is joined",
                    "check the port; a balancer between has to pass TLS on, or to forward a "
                    "WebSocket at an address with wss://",
                )
            with private_socket() as address:
                listener = await asyncio.start_unix_server(take, address.removeprefix("unix:"))
                try:
                    async with grpc.aio.insecure_channel(address, options) as channel:
                        yield channel
                finally:
                    listener.close()
        finally:
            writer.transport.abort()
            for task in passing:
                task.cancel()
            await asyncio.gather(*passing, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Pass on what comes, until there is no more; then end the other side as well."""
    try:
        while data := await source.read(_PART):
            target.write(data)
            await target.drain()
    except OSError:
        pass  # the other side learns of it by the end of its own connection
    finally:
        # Early releases of Python 3.11 cannot abort a TLS transport closed after it was lost.
        if not target.is_closing():
            target.close()
