"""What the link bears from those who dial in: how much, for how long, and which messages."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import resource
from collections.abc import Mapping

import grpc
import grpc.aio

from isthmus.errors import UserError
from isthmus.transport.blobs import Piece
from isthmus.transport.uplink import CHANNEL_OPTIONS, OLDEST_VERSION, VERSION
from isthmus.wire import link_pb2

MAX_FROM_PARTICIPANT = 4 << 20
"""gRPC refuses a larger message before it is read: a chunk, or one's part in a protocol."""
STREAMS_EACH = 4
"""Open streams of one certificate: one at work, one that takes over, and two by mistake."""
PUMPS_EACH = 4
"""Contents on their way to one participant at a time."""
HANDSHAKE_SECONDS = 10
"""For a caller to show its certificate."""
LONGEST_ID = 64
"""Characters of a request's id, which a server makes, and participants repeat."""

HELLO_SECONDS = 30.0
"""To say who one is, and to be told that one is welcome."""
IDLE_SECONDS = 60.0
"""For a connection without a call: one that only takes up room is closed, whoever's it is."""
CUT_SECONDS = 1.0
"""For a participant whose stream is ended to read why; nobody waits for it any longer."""

_MAX_RECEIVE = "grpc.max_receive_message_length"
_TLS_FRAME_BYTES = 4096
"""gRPC keeps a frame of TLS, 16 KB by itself, for each caller that is there, idle or not; smaller
ones cost no time that could be measured down to here."""
_SPARE_FILES = 256
"""Open files that are never used up by callers."""

ANSWERS = {
    "open": {"opened"},
    "train_local": {"trained"},
    "secure_step": {"secure_stepped"},
    "train_steps": {"trained"},
    "score": {"scored", "trained"},
    "mean_gradient": {"trained"},
    "flower": {"flower_replied"},
    "agree": {"trained"},
    "export": {"exported"},
    "close": {"closed"},
}
"""What may come back for each kind of work, beside a failure."""

SPOKEN = {"ping", "pull", "chunk", "reply", "progress", "renew"}
"""What a participant may say after its hello."""


def listening_options(
    connections: int, message_bytes: int, idle_seconds: float
) -> tuple[tuple[str, int], ...]:
    """What gRPC is told of callers it does not know: few connections, little time, small messages.

    All callers together get at most `connections`, and never the last open files of the process.
    One without a call is closed after `idle_seconds`.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    rest = [option for option in CHANNEL_OPTIONS if option[0] != _MAX_RECEIVE]
    return (
        *rest,
        (_MAX_RECEIVE, message_bytes),
        ("grpc.max_allowed_incoming_connections", max(64, min(connections, files - _SPARE_FILES))),
        ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_SECONDS),
        ("grpc.max_connection_idle_ms", int(1000 * idle_seconds)),
        ("grpc.max_concurrent_streams", STREAMS_EACH),
        ("grpc.tsi.max_frame_size", _TLS_FRAME_BYTES),
        ("grpc.so_reuseport", 0),
    )


async def listen(
    services: Mapping[str, Mapping[str, grpc.RpcMethodHandler]],
    address: str,
    credentials: grpc.ServerCredentials | None,
    options: tuple[tuple[str, int], ...],
    calls: int,
) -> tuple[grpc.aio.Server, int]:
    """Serve gRPC services at HOST:PORT (0: any) or on a socket; returns the server and its port.

    Raises:
        UserError: the port is in use.
    """
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=calls)
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(*service) for service in services.items())
    )
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError:
        raise UserError(
            f"cannot listen on {address}; is the port in use, or the host no address of this "
            "machine? Give another, or port 0 for any"
        ) from None
    await server.start()
    return server, int(bound)


def certificate_of(context: grpc.aio.ServicerContext) -> bytes | None:
    """The certificate (PEM) that a caller has shown, if TLS asked for one."""
    return next(iter(context.auth_context().get("x509_pem_cert", ())), None)


def caller_of(context: grpc.aio.ServicerContext) -> bytes:
    """Who a caller is, in a few bytes: the SHA-256 of its certificate; empty without TLS."""
    certificate = certificate_of(context)
    return b"" if certificate is None else hashlib.sha256(certificate).digest()


async def end(context: grpc.aio.ServicerContext, refused: str | None) -> None:
    """End a stream with the reason, which may never be read; None: another took its place."""
    code, why = grpc.StatusCode.ABORTED, "this process has opened another stream"
    if refused is not None:
        code, why = grpc.StatusCode.PERMISSION_DENIED, refused
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CUT_SECONDS):
            await context.abort(code, why)


def _versions(oldest: int, newest: int) -> str:
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"


def greet(first: link_pb2.Envelope | Piece | None) -> tuple[int, str]:
    """The version to speak, or why there is none."""
    if not isinstance(first, link_pb2.Envelope) or not first.HasField("hello"):
        return 0, "the first message must be a hello"
    hello = first.hello
    if not (0 < len(hello.name) <= 128 and 0 < len(hello.instance) <= 128):
        return 0, "a hello needs a name and an instance of 1 to 128 characters each"
    if hello.role not in (link_pb2.CLIENT, link_pb2.DATACENTER):
        return 0, f"role={hello.role} is not one this server knows"
    version = min(hello.version_max, VERSION)
    if version < max(hello.version_min, OLDEST_VERSION):
        return 0, (
            f"it supports link {_versions(hello.version_min, hello.version_max)} and this server "
            f"supports {_versions(OLDEST_VERSION, VERSION)}; upgrade the older side"
        )
    return version, ""
