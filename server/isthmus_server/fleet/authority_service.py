"""The authority's services: joining for everyone, and the registry and renewals for its server.

Who may join is decided here, by tokens that the authority's operator creates. The server can only
read the registry, and pass on requests for renewal: it cannot enrol anyone.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import tls
from isthmus.system.file_lock import file_lock
from isthmus.wire import authority_pb2 as pb
from isthmus_privacy.secagg.identity import Enrolment
from isthmus_server.fleet.authority import CertificateAuthority
from isthmus_server.fleet.joining import JoinService
from isthmus_server.fleet.members import Members
from isthmus_server.fleet.registry import Registry
from isthmus_server.transport.fair_port import FairPort
from isthmus_server.transport.limits import CALLER_CONNECTIONS, certificate_of

SERVICE = "isthmus.authority.v1.Authority"

_MAX_REQUEST = 16 << 10
_PART = 500
"""Members in one message."""
_IDLE_SECONDS = 10.0
"""A connection without a call is closed after this time."""
_GROWN = 1.25
"""An enrolment is signed anew once the fleet has grown by this factor."""
_COUNTED_SECONDS = 90.0 * 86_400
"""Time for which a device without a valid certificate still counts as one of the fleet: renewals
pass through the server, which could make the fleet small by passing on those it likes."""


class AuthorityService:
    """Runs an authority: joins, the registry for its server, and renewals.

    Guarantees:
      * only the certificate of its server can read the registry or request a renewal;
      * a renewal is for the name, role and identity that joined, whatever the server requests.
    """

    def __init__(self, directory: Path) -> None:
        """Use the state directory that `isthmus authority init` created.

        Raises:
            UserError: it contains no authority of its own.
        """
        authority = CertificateAuthority(directory)
        if authority.serves is None:
            raise UserError(
                f"{directory} is the state directory of a server, which is its own authority; "
                f"start it with: isthmus server start {directory}"
            )
        self.members = Members(directory, authority)
        self.joining = JoinService(self.members)
        self.port = 0
        self.join_port = 0
        self._authority = authority
        self._instance = uuid.uuid4().hex[:12]
        self._enrolments: dict[str, tuple[object, Enrolment]] = {}
        """By name, with what it depends on."""

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[None]:
        """Listen: for the server at `port`, joining at the next one (0: any free ports).

        Raises:
            UserError: a port is in use.
        """
        directory = self.members.directory
        with file_lock(directory / "lock", f"another authority runs from {directory}"):
            methods = {
                "Registry": grpc.unary_stream_rpc_method_handler(self._registry),
                "Renew": grpc.unary_stream_rpc_method_handler(self._renew),
            }
            # Without a certificate nobody gets an answer, and anybody can open connections.
            registry_port = FairPort(CALLER_CONNECTIONS)
            self.port = await registry_port.start(
                {SERVICE: methods},
                host,
                port,
                self._credentials(known=True),
                message_bytes=_MAX_REQUEST,
                idle_seconds=_IDLE_SECONDS,
            )
            try:
                self.join_port = await self.joining.start(
                    host,
                    port + 1 if port else 0,
                    self._credentials(known=False),
                    link_port=self.port,
                )
                yield
            finally:
                await self.joining.stop()
                await registry_port.stop()
                self.members.close()

    def _credentials(self, *, known: bool) -> grpc.ServerCredentials:
        """TLS with the current certificate at each handshake; `known` callers must present one."""
        roots = tls.pem(self._authority.certificate) if known else None
        presented = self._authority.server_pair()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal presented
            pair = self._authority.server_pair()
            if pair == presented:
                return None  # unchanged
            presented = pair
            return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

        first = grpc.ssl_server_certificate_configuration([presented], root_certificates=roots)
        return grpc.dynamic_ssl_server_credentials(
            first, fetch, require_client_authentication=known
        )

    async def _registry(
        self, data: bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        await self._authenticate(context)
        try:
            request = pb.RegistryRequest.FromString(data)
        except DecodeError:
            await _refuse(context, "this is not a request for the registry")
        for part in self.parts(request.version):
            yield part.SerializeToString()

    def parts(self, copied: str) -> Iterator[pb.RegistryPart]:
        """The registry, or that the version of a copy is current."""
        registry = self.members.registry
        now = datetime.datetime.fromtimestamp(self.members.now(), datetime.UTC)
        week = now.strftime("%G-W%V")
        version = f"{self._instance}-{registry.version}-{week}"
        if version == copied:
            yield pb.RegistryPart(version=version, unchanged=True)
            return
        assert isinstance(registry, Registry)
        certificates = registry.certificates()
        population = registry.devices(_COUNTED_SECONDS)
        part = pb.RegistryPart(version=version, revoked=sorted(registry.revoked_identities()))
        for entry in registry.participants():
            issued = certificates.get(entry.name, [])
            member = part.members.add(
                name=entry.name,
                kind=entry.kind,
                identity=entry.identity,
                joined=entry.joined,
                rollout=entry.rollout,
                certificates=[
                    pb.IssuedCertificate(serial=serial, not_after=end) for serial, end in issued
                ],
            )
            if entry.revoked is not None:
                member.revoked = entry.revoked
            # Of devices alone: a sum counts each enrolment as a device, and a datacenter is the
            # operator's.
            elif entry.kind == "client" and entry.not_after is not None:
                enrolment = self._enrolment(
                    entry.name, entry.identity, int(entry.not_after), population, week
                )
                member.enrolment = enrolment.to_bytes()
            if len(part.members) == _PART:
                yield part
                part = pb.RegistryPart(version=version)
        yield part

    def _enrolment(
        self, name: str, identity: bytes, not_after: int, population: int, week: str
    ) -> Enrolment:
        """A participant's enrolment; the same one while nothing has changed that it states."""
        depends_on = identity, not_after, week
        if (known := self._enrolments.get(name)) is not None:
            signed_for, enrolment = known
            if signed_for == depends_on and population <= _GROWN * enrolment.population:
                return enrolment
        enrolment = self._authority.enroller.enrol(
            name, identity, not_after=not_after, population=population, now=self.members.now()
        )
        self._enrolments[name] = depends_on, enrolment
        return enrolment

    async def _renew(self, data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        server = await self._authenticate(context)
        try:
            certificate = await self.renew(pb.RenewRequest.FromString(data), server)
        except DecodeError:
            await _refuse(context, "this is not a request for a renewal")
        except AdmissionRefused as error:
            await _refuse(context, str(error))
        yield pb.RenewReply(certificate=certificate).SerializeToString()

    async def renew(self, request: pb.RenewRequest, server: tls.Subject) -> bytes:
        """Issue the next certificate (PEM) of a participant, or of the server itself.

        Raises:
            AdmissionRefused: it is not a participant any more.
        """

        def write(registry: Registry) -> bytes:
            entry = next((e for e in registry.participants() if e.name == request.name), None)
            if entry is None or (entry.kind == tls.SERVER and entry.name != server.name):
                raise AdmissionRefused(f"{request.name!r} is not a participant of this server")
            old = tls.Subject(
                kind=entry.kind,
                name=entry.name,
                identity=entry.identity,
                serial=request.serial,
                not_after=entry.not_after or 0.0,
            )
            return registry.renew(
                old,
                lambda name: self._authority.issue(
                    request.signing_request, kind=old.kind, name=name, identity=old.identity
                ),
            )

        return await self.members.write(write)

    async def _authenticate(self, context: grpc.aio.ServicerContext) -> tls.Subject:
        certificate = certificate_of(context)
        try:
            if certificate is None:
                raise AdmissionRefused("this authority requires a certificate")
            subject = tls.subject_of(tls.read_certificate(certificate))
            if subject.kind != tls.SERVER:
                raise AdmissionRefused(f"{subject.name!r} is a {subject.kind}, not the server")
            await self.members.check(subject)
        except AdmissionRefused as error:
            await _refuse(context, str(error))
        return subject


async def _refuse(context: grpc.aio.ServicerContext, reason: str) -> NoReturn:
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
    raise AssertionError("abort raises")
