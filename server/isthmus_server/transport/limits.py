"""Limits on what participants and unknown callers may send, open and occupy."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import resource
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import grpc
import grpc.aio

from isthmus.errors import AdmissionDelayed, AdmissionRefused, UserError
from isthmus.transport.blobs import Piece
from isthmus.transport.stream import to_the_end
from isthmus.transport.uplink import CHANNEL_OPTIONS, OLDEST_VERSION, VERSION
from isthmus.wire import link_pb2

Services = Mapping[str, Mapping[str, grpc.RpcMethodHandler]]
"""gRPC services: method handlers by the name of the service and of the method."""

MAX_MESSAGE_BYTES = 4 << 20
"""gRPC refuses a larger message before it is read: a chunk, or one protocol message."""
MAX_STREAMS_PER_CERTIFICATE = 4
"""Open streams of one certificate: one in use, one that replaces it, and two by mistake."""
SHA256_BYTES = 32
"""Bytes of the name of a blob."""
MAX_TRANSFERS_PER_PARTICIPANT = 4
"""Blobs that are sent to one participant at the same time."""
HANDSHAKE_SECONDS = 10
"""Time for a caller to complete the TLS handshake."""
MAX_REQUEST_ID = 64
"""Characters of a request's id, which a server creates and participants repeat."""

HELLO_SECONDS = 30.0
"""Time for a participant to identify itself, and for the server's answer to be read."""
IDLE_SECONDS = 60.0
"""A connection without a call is closed after this time, so that it does not take up a slot."""
ABORT_SECONDS = 1.0
"""Time for a participant to read why its stream is ended."""

_MAX_RECEIVE = "grpc.max_receive_message_length"
_TLS_FRAME_BYTES = 4096
"""gRPC keeps a TLS frame, 16 KB by default, for each connection, also an idle one. Smaller frames
made no measurable difference in time down to this size."""
CALLER_CONNECTIONS = 128
"""Open connections of callers that may be anybody, at a port that is for them. Each has three open
files, see `isthmus_server.transport.fair_port`. At one port for everything as many more wait there
for their first message, see `isthmus_server.transport.one_port`."""
RESERVED_FILES = 256 + 4 * CALLER_CONNECTIONS
"""Open files of the process that connections never use up."""

REPLY_KINDS = {
    "open": {"opened"},
    "prepare": {"prepared"},
    "train_local": {"trained"},
    "secure_step": {"secure_stepped"},
    "train_steps": {"trained"},
    "score": {"scored", "trained"},
    "evaluate": {"counted", "trained"},
    "mean_gradient": {"trained"},
    "app": {"app_replied"},
    "agree": {"trained"},
    "export": {"exported"},
    "close": {"closed"},
    "open_sum": {"added"},
    "add_vector": {"added"},
    "hand_over": {"summed"},
}
"""Permitted replies to each kind of request, in addition to a failure."""

PARTICIPANT_MESSAGES = {"ping", "pull", "chunk", "reply", "progress", "renew", "leave"}
"""Messages that a participant may send after its hello."""
MESSAGES_OF = {
    link_pb2.CLIENT: PARTICIPANT_MESSAGES | {"stored"},
    link_pb2.DATACENTER: PARTICIPANT_MESSAGES,
    link_pb2.AGGREGATOR: PARTICIPANT_MESSAGES | {"caller", "through", "hang_up", "passed"},
}
"""Messages that each role may send after its hello."""


class StreamContext(Protocol):
    """What a stream of a participant says of its caller: gRPC's context, or one like it."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """The caller's certificate, under `x509_pem_cert`."""
        ...

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """End the stream with a status; always raises."""
        ...


def server_options(
    connections: int, message_bytes: int, idle_seconds: float
) -> tuple[tuple[str, int], ...]:
    """Return gRPC options that bound connections, handshakes, idle time and message sizes.

    Args:
        connections: open connections of all callers; fewer if the process may open fewer files.
        message_bytes: the largest message that is read.
        idle_seconds: a connection without a call is closed after this time.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    inherited = [option for option in CHANNEL_OPTIONS if option[0] != _MAX_RECEIVE]
    return (
        *inherited,
        (_MAX_RECEIVE, message_bytes),
        (
            "grpc.max_allowed_incoming_connections",
            max(64, min(connections, files - RESERVED_FILES)),
        ),
        ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_SECONDS),
        ("grpc.max_connection_idle_ms", int(1000 * idle_seconds)),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CERTIFICATE),
        ("grpc.tsi.max_frame_size", _TLS_FRAME_BYTES),
        ("grpc.so_reuseport", 0),
    )


async def listen(
    services: Services,
    address: str,
    credentials: grpc.ServerCredentials | None,
    options: tuple[tuple[str, int], ...],
    calls: int,
) -> tuple[grpc.aio.Server, int]:
    """Serve gRPC services at HOST:PORT (0: any) or on a socket; returns server and port.

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
        raise cannot_listen(address) from None
    try:
        await to_the_end(server.start())
    except asyncio.CancelledError:
        await server.stop(grace=None)  # gRPC otherwise stops it after the event loop
        raise
    return server, int(bound)


def cannot_listen(address: str) -> UserError:
    """The error for an address where this process cannot listen."""
    return UserError(
        f"cannot listen on {address}; the port may be in use, or the host not an address of this "
        "machine; choose another, or port 0 for any free one"
    )


def certificate_of(context: StreamContext) -> bytes | None:
    """Return the certificate (PEM) of a caller, if TLS requested one."""
    return next(iter(context.auth_context().get("x509_pem_cert", ())), None)


def certificate_digest(context: StreamContext) -> bytes:
    """Return the SHA-256 of a caller's certificate; empty without TLS."""
    certificate = certificate_of(context)
    return b"" if certificate is None else hashlib.sha256(certificate).digest()


DENIED = grpc.StatusCode.PERMISSION_DENIED


class Refusal(NamedTuple):
    """Why a participant is not admitted (any more)."""

    reason: str
    status: grpc.StatusCode = DENIED
    """Participants connect again after ABORTED and UNAVAILABLE, and end after PERMISSION_DENIED."""

    @classmethod
    def of(cls, error: AdmissionRefused) -> Refusal:
        """The participant tries again if the error says that this may help."""
        again = isinstance(error, AdmissionDelayed)
        return cls(str(error), grpc.StatusCode.ABORTED if again else DENIED)


async def abort_stream(context: StreamContext, refusal: Refusal | None) -> None:
    """End a stream with a reason, which may not be read; None: a newer stream replaces it."""
    reason, code = refusal or Refusal(
        "this process has opened another stream", grpc.StatusCode.ABORTED
    )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ABORT_SECONDS):
            await context.abort(code, reason)


def _versions(oldest: int, newest: int) -> str:
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"


def negotiate(first: link_pb2.Envelope | Piece | None) -> tuple[int, str]:
    """Return the link version for a hello, or 0 and why there is none."""
    if not isinstance(first, link_pb2.Envelope) or not first.HasField("hello"):
        return 0, "the first message must be a hello"
    hello = first.hello
    texts = (hello.name, hello.instance)
    if not all(0 < len(text) <= 128 and text.isprintable() for text in texts):
        return 0, "a hello needs a name and an instance of 1 to 128 printable characters each"
    if hello.role not in MESSAGES_OF:
        return 0, f"role={hello.role} is not one this server knows"
    version = min(hello.version_max, VERSION)
    if version < max(hello.version_min, OLDEST_VERSION):
        return 0, (
            f"it supports link {_versions(hello.version_min, hello.version_max)} and this server "
            f"supports {_versions(OLDEST_VERSION, VERSION)}; upgrade the older side"
        )
    return version, ""
