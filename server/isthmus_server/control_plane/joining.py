"""The one place where callers that nobody knows are heard: they bring a token, or go.

A port of its own, with a gRPC server of its own, so that whatever happens here cannot take what
the link needs. Every caller together may hold `MAX_CALLERS` connections, each for a few seconds,
each message is a few kilobytes, and a caller's address pays for its tries.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict

import grpc
import grpc.aio
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError

from isthmus.errors import AdmissionRefused
from isthmus.identity import tls
from isthmus.identity.joining import MAX_JOIN_BYTES, SECRET_BYTES, VERSION, Token, statement
from isthmus.wire import join_pb2
from isthmus_server.control_plane.members import Members
from isthmus_server.control_plane.registry import Registry
from isthmus_server.transport.limits import listen, server_options

log = logging.getLogger(__name__)

MAX_CALLERS = 64
"""Connections at a time; beyond them a caller is turned away, and comes back."""

_CALLER_SECONDS = 15
"""Longest life of a connection."""


class TokenBucket:
    """Tries per address: a burst, and then a few a second; remembers a bounded number of addresses.

    >>> purse = TokenBucket(burst=2, per_second=1.0)
    >>> [purse.take("a", now) for now in (0.0, 0.0, 0.0, 1.0)]
    [True, True, False, True]
    """

    def __init__(self, burst: float = 50, per_second: float = 5.0, addresses: int = 4096) -> None:
        self.burst = burst
        self.per_second = per_second
        self.addresses = addresses
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, address: str, now: float) -> bool:
        """Whether an address may try once more at `now` (seconds)."""
        left, since = self._left.pop(address, (self.burst, now))
        left = min(self.burst, left + (now - since) * self.per_second)
        allowed = left >= 1
        self._left[address] = (left - allowed, now)
        if len(self._left) > self.addresses:
            self._left.popitem(last=False)
        return allowed


class JoinService:
    """Gives a certificate for a token.

    Guarantees:
      * what it spends on callers does not grow with their number;
      * a token's secret is neither kept nor logged.
    """

    def __init__(self, members: Members, purse: TokenBucket | None = None) -> None:
        self.members = members
        self.link_port = 0
        """Where participants are told to dial."""
        self._purse = purse or TokenBucket()
        self._server: grpc.aio.Server | None = None
        self._authority = join_pb2.AuthorityReply(
            certificate=tls.pem(members.certifier.certificate)
        ).SerializeToString()

    async def start(self, host: str, port: int, credentials: grpc.ServerCredentials) -> int:
        """Listen; returns the port.

        Raises:
            UserError: the port is in use.
        """
        options = (
            *server_options(MAX_CALLERS, MAX_JOIN_BYTES, _CALLER_SECONDS / 3),
            ("grpc.max_connection_age_ms", 1000 * _CALLER_SECONDS),
            ("grpc.max_connection_age_grace_ms", 1000),
        )
        methods = {
            "Authority": grpc.unary_unary_rpc_method_handler(self._show_authority),
            "Join": grpc.unary_unary_rpc_method_handler(self._join),
        }
        self._server, bound = await listen(
            {"isthmus.join.v1.Join": methods}, f"{host}:{port}", credentials, options, MAX_CALLERS
        )
        return bound

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            await self._server.stop(grace=0.2)

    async def _show_authority(self, _: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return self._authority

    async def _join(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        if not self._purse.take(_address(context.peer()), time.monotonic()):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many tries; wait a while")
        try:
            reply = await self.admit(join_pb2.JoinRequest.FromString(data))
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no request to join")
        except AdmissionRefused as error:
            log.info("a join from %s was refused: %s", _address(context.peer()), error)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        return reply.SerializeToString()

    async def admit(self, asked: join_pb2.JoinRequest) -> join_pb2.JoinReply:
        """Exchange a token for a certificate.

        Raises:
            AdmissionRefused: with the reason; nothing has changed then.
        """
        if asked.version != VERSION:
            raise AdmissionRefused(
                f"version {asked.version} of joining is spoken there and {VERSION} here; "
                "upgrade the older side"
            )
        if asked.kind not in tls.KINDS or len(asked.secret) != SECRET_BYTES:
            raise AdmissionRefused("this request to join makes no sense")
        certifier = self.members.certifier
        fingerprint = tls.fingerprint(certifier.certificate)
        said = statement(fingerprint, asked.kind, asked.secret, asked.signing_request)
        try:
            Ed25519PublicKey.from_public_bytes(asked.identity).verify(asked.proof, said)
        except (InvalidSignature, ValueError):
            raise AdmissionRefused(
                "this request to join is not signed by its identity key"
            ) from None

        def redeem(registry: Registry) -> tuple[str, bytes]:
            return registry.redeem(
                Token(asked.secret, fingerprint).digest,
                asked.kind,
                asked.identity,
                lambda name: certifier.issue(
                    asked.signing_request, kind=asked.kind, name=name, identity=asked.identity
                ),
            )

        name, certificate = await self.members.write(redeem)
        log.info("%s %s has joined", asked.kind, name)
        return join_pb2.JoinReply(
            name=name,
            certificate=certificate,
            link_port=self.link_port,
            enroller=self.members.authority,
        )


def _address(peer: str) -> str:
    """The address in gRPC's `ipv4:1.2.3.4:567`; an IPv6 caller is its /64."""
    kind, _, rest = peer.partition(":")
    host = rest.rpartition(":")[0].removeprefix("%5B").removeprefix("[")
    if kind != "ipv6":
        return host
    return ":".join(host.split(":")[:4])
