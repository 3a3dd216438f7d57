"""The join service: exchanges a token for a certificate; the only service for unknown callers.

It has its own gRPC server, and its own port unless the server has one port for everything, so that
its load cannot take resources from the link. All callers together may have `MAX_CALLERS`
connections, each for a few seconds, which are shared out among their addresses; messages are at
most a few kilobytes, and failed attempts are limited per address.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Callable

import grpc
import grpc.aio
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError

from isthmus.errors import AdmissionRefused
from isthmus.identity import tls
from isthmus.identity.joining import MAX_JOIN_BYTES, SECRET_BYTES, VERSION, Token, statement
from isthmus.wire import join_pb2
from isthmus_server.fleet.members import Members
from isthmus_server.fleet.registry import Registry
from isthmus_server.transport.fair_port import FairPort
from isthmus_server.transport.limits import CALLER_CONNECTIONS, Services
from isthmus_server.transport.places import is_balancer

log = logging.getLogger(__name__)

MAX_CALLERS = CALLER_CONNECTIONS
"""Concurrent connections; further callers of one address are refused and retry."""

MANY = 20
"""How many more attempts a balancer has than one address, because it stands for many."""

_CALLER_SECONDS = 15
"""Maximum duration of a connection."""
_IDLE_SECONDS = _CALLER_SECONDS / 3
"""A connection without a call is closed after this time."""


class TokenBucket:
    """Limits attempts per address to a burst and a rate, for a bounded number of addresses.

    >>> bucket = TokenBucket(burst=2, per_second=1.0)
    >>> [bucket.take("a", now) for now in (0.0, 0.0, 0.0, 1.0)]
    [True, True, False, True]
    >>> bucket.give_back("a")
    >>> bucket.take("a", 1.0)
    True
    """

    def __init__(
        self, burst: float = MAX_CALLERS, per_second: float = 5.0, addresses: int = 4096
    ) -> None:
        self.burst = burst
        self.per_second = per_second
        self.addresses = addresses
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, address: str, now: float) -> bool:
        """Count an attempt from an address at `now` (seconds); returns whether it is allowed."""
        left, since = self._left.pop(address, (self.burst, now))
        left = min(self.burst, left + (now - since) * self.per_second)
        allowed = left >= 1
        self._left[address] = (left - allowed, now)
        if len(self._left) > self.addresses:
            self._left.popitem(last=False)
        return allowed

    def give_back(self, address: str) -> None:
        """Have an attempt that was counted not count."""
        if address in self._left:
            left, since = self._left[address]
            self._left[address] = (min(self.burst, left + 1), since)


class JoinService:
    """Exchanges tokens for certificates.

    Guarantees:
      * the resources used for callers do not grow with their number;
      * callers of one address, whatever they hold open, do not keep those of another one out;
      * any number of devices of one address can join: only attempts that fail are counted;
      * a token's secret is neither stored nor logged.
    """

    def __init__(self, members: Members, bucket: TokenBucket | None = None) -> None:
        self.members = members
        self._link_port = 0
        self._bucket = bucket or TokenBucket()
        self._balancers = TokenBucket(MANY * MAX_CALLERS, MANY * 5.0)
        """For balancers that do not say who their callers are."""
        self._port = FairPort(MAX_CALLERS, _CALLER_SECONDS)
        self._authority = join_pb2.AuthorityReply(
            certificate=tls.pem(members.certificate_authority.certificate)
        ).SerializeToString()

    async def start(
        self, host: str, port: int, credentials: grpc.ServerCredentials, *, link_port: int
    ) -> int:
        """Listen; returns the port. `link_port` is sent to participants as the port of the link.

        Raises:
            UserError: it cannot listen there, see `FairPort.start`.
        """
        self._link_port = link_port
        return await self._port.start(
            self._services(),
            host,
            port,
            credentials,
            message_bytes=MAX_JOIN_BYTES,
            idle_seconds=_IDLE_SECONDS,
        )

    async def start_behind(
        self, credentials: grpc.ServerCredentials
    ) -> Callable[[socket.socket, str], None]:
        """Serve connections that a port of this process accepts; returns what takes one over.

        The link is at the address at which participants join.

        Raises:
            UserError: there can be no socket in the temporary folder.
        """
        self._link_port = 0
        await self._port.open(
            self._services(),
            credentials,
            message_bytes=MAX_JOIN_BYTES,
            idle_seconds=_IDLE_SECONDS,
        )
        return self._port.take

    def _services(self) -> Services:
        methods = {
            "Authority": grpc.unary_unary_rpc_method_handler(self._show_authority),
            "Join": grpc.unary_unary_rpc_method_handler(self._join),
        }
        return {"isthmus.join.v1.Join": methods}

    async def stop(self) -> None:
        """Stop listening."""
        await self._port.stop()

    async def _show_authority(self, _: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return self._authority

    async def _join(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        address = self._port.address_of(context.peer())
        bucket = self._balancers if is_balancer(address) else self._bucket
        if not bucket.take(address, time.monotonic()):
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "too many attempts; try again later"
            )
        try:
            reply = await self.admit(join_pb2.JoinRequest.FromString(data))
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is not a join request")
        except AdmissionRefused as error:
            log.info("a join from %s was refused: %s", address, error)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        bucket.give_back(address)
        return reply.SerializeToString()

    async def admit(self, request: join_pb2.JoinRequest) -> join_pb2.JoinReply:
        """Exchange a token for a certificate.

        Raises:
            AdmissionRefused: with the reason; nothing was changed.
        """
        if request.version != VERSION:
            raise AdmissionRefused(
                f"version {request.version} of joining is not supported, only {VERSION}; "
                "upgrade the older side"
            )
        authority = self.members.certificate_authority
        kinds = tls.KINDS if authority.serves is None else (*tls.KINDS, tls.SERVER)
        if request.kind not in kinds or len(request.secret) != SECRET_BYTES:
            raise AdmissionRefused("this join request is invalid")
        fingerprint = tls.fingerprint(authority.certificate)
        signed = statement(fingerprint, request.kind, request.secret, request.signing_request)
        try:
            Ed25519PublicKey.from_public_bytes(request.identity).verify(request.proof, signed)
        except (InvalidSignature, ValueError):
            raise AdmissionRefused("this join request is not signed by its identity key") from None

        digest = Token(request.secret, fingerprint).digest

        def redeem(registry: Registry) -> tuple[str, bytes]:
            return registry.redeem(
                digest,
                request.kind,
                request.identity,
                lambda name: authority.issue(
                    request.signing_request, kind=request.kind, name=name, identity=request.identity
                ),
            )

        name, certificate = await self.members.write(redeem)
        log.info("%s %s has joined", request.kind, name)
        return join_pb2.JoinReply(
            name=name,
            certificate=certificate,
            link_port=self._link_port,
            server="" if request.kind == tls.SERVER else authority.serves,
        )
