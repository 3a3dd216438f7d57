"""Connections of somebody who wants no answer, and only to keep others out."""

import asyncio
import contextlib
import ssl

from tests.server.waiting import wait_until

from isthmus_server.transport.limits import CALLER_CONNECTIONS

ADDRESS = "127.0.0.2"
"""Where they come from; the others of a test come from 127.0.0.1."""

_HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01"


def anyones_tls(protocols=("h2",)):
    """TLS of a caller that has no certificate and trusts every server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(list(protocols))
    return context


def first_message(protocols=("h2",)):
    """The first message of TLS that offers these protocols."""
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        anyones_tls(protocols).wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


@contextlib.asynccontextmanager
async def idle_callers(port, kind, count=200, protocols=("h2",)):
    """Hold connections during the block, and open each again soon after it is closed.

    They send "nothing", "half a handshake", "a first message" of TLS and nothing more, or finish
    the handshake of "TLS".
    """
    opened = []

    async def hold():
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1",
                    port,
                    local_addr=(ADDRESS, 0),
                    ssl=anyones_tls(protocols) if kind == "TLS" else None,
                )
                opened.append(kind)
                try:
                    if kind == "half a handshake":
                        writer.write(_HALF_A_HELLO)
                    elif kind == "a first message":
                        writer.write(first_message(protocols))
                    while await reader.read(1 << 16):
                        pass
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0.1)  # a caller that waits for less is one that floods

    callers = [asyncio.create_task(hold()) for _ in range(count)]
    try:
        await wait_until(lambda: len(opened) >= min(count, CALLER_CONNECTIONS))
        yield
    finally:
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
