"""A server whose enrolment authority is another process: it copies the registry and passes on.

The server cannot enrol anyone: it has the authority's certificate and its own, and learns from the
authority who has joined and who is revoked. It passes on requests for renewal, and the enrolments
that the authority signed. While the authority is offline the copy stays in use, so participants
continue until their certificates end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
from cryptography import x509
from google.protobuf.message import Message

from isthmus.errors import (
    AdmissionDelayed,
    AdmissionRefused,
    CertificateExpired,
    DamagedError,
    UserError,
)
from isthmus.grpc_errors import short_message
from isthmus.identity import tls
from isthmus.identity.membership import Membership
from isthmus.identity.obstacles import is_clear, obstacle, with_remedy
from isthmus.identity.proxies import Road
from isthmus.job.promises import Deployment
from isthmus.system.clocks import BY_SERVERS_CLOCK, utc
from isthmus.system.sealed_files import (
    read_sealed,
    read_sealed_bytes,
    write_sealed,
    write_sealed_bytes,
)
from isthmus.wire import authority_pb2 as pb
from isthmus_privacy.secagg.identity import Enrolment
from isthmus_server.fleet.members import Members
from isthmus_server.fleet.registry import RegistryEntry
from isthmus_server.transport.enrolment import Enrolments

_SERVICE = "/isthmus.authority.v1.Authority/"
_COPY = "registry.copy"
_HEAD = "registry.head"
_NUMBER_BYTES = 8
_POLL_SECONDS = 0.5
"""Interval in which the registry is compared: a revocation takes effect this much later."""
_OFFLINE_SECONDS = 5.0
_TIMEOUT = 20.0
MAX_MEMBERS = 1 << 20
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))

log = logging.getLogger(__name__)


class RegistryCopy:
    """The authority's registry as this server last copied it, also in a file.

    The file has a seal and the number of the copy; a second file has the number of the newest one.

    Guarantees:
      * a copy is complete: the parts of two versions are never mixed;
      * a file that is damaged, lost or older than the newest copy is not used: it could lack a
        revocation.
    """

    def __init__(self, directory: Path, *, now: Callable[[], float] = time.time) -> None:
        """Read the last copy, if there is one. `now` returns Unix seconds.

        Raises:
            UserError: a file cannot be read.
        """
        self._path = directory / _COPY
        self._head = directory / _HEAD
        self._now = now
        self.version = 0
        """A number that changes with every replacement."""
        self.damage: DamagedError | None = None
        """Why the last copy is not used."""
        self._number = 0
        self._written = True
        """Whether the copy in memory is in the file."""
        self._take(pb.RegistryPart())
        try:
            self._read()
        except DamagedError as error:
            self.damage = DamagedError(
                f"{error}; the server uses no copy until it has copied the registry from the "
                "authority again, which it does when it starts"
            )
        except OSError as error:
            raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None

    def close(self) -> None:
        """Nothing is open."""

    def is_revoked(self, name: str) -> bool:
        """Whether a participant is known, and revoked."""
        member = self._members.get(name)
        return member is not None and member.HasField("revoked")

    @property
    def copied(self) -> str:
        """The authority's name of this version; empty if none is in the file yet."""
        return self._part.version if self._written else ""

    def replace(self, part: pb.RegistryPart) -> None:
        """Take a new copy, and write it to the file.

        Raises:
            OSError: it cannot be written; it is used, and `copied` is empty.
        """
        self._written = False
        self._take(part)
        number = self._number + 1
        data = number.to_bytes(_NUMBER_BYTES, "little") + part.SerializeToString()
        write_sealed_bytes(self._path, data)
        write_sealed(self._head, {"copies": number})  # afterwards: a crash leaves a newer copy
        self._number = number
        self.damage = None
        self._written = True

    def _read(self) -> None:
        """Read the files, the head first, because a server may write them now.

        Raises:
            DamagedError: the copy is not the newest one that was written.
            OSError: a file cannot be read.
        """
        with contextlib.suppress(FileNotFoundError):
            self._number = int(read_sealed(self._head)["copies"])
        try:
            data = read_sealed_bytes(self._path)
        except FileNotFoundError:
            if self._number:
                raise DamagedError(f"{self._path} is missing") from None
            return
        newest = self._number
        number = int.from_bytes(data[:_NUMBER_BYTES], "little")
        self._number = max(newest, number)
        if number not in (newest, newest + 1):
            raise DamagedError(
                f"{self._path} is copy {number} of the registry, and not the newest one, copy "
                f"{newest}"
                if newest
                else f"{self._head} is missing, which has the number of the newest copy"
            )
        self._take(pb.RegistryPart.FromString(data[_NUMBER_BYTES:]))

    def _take(self, part: pb.RegistryPart) -> None:
        self._part = part
        self._members = {member.name: member for member in part.members}
        self.version += 1

    def check(self, subject: tls.Subject) -> None:
        """Check that the holder of a certificate is a participant now; as `Registry.check`.

        Raises:
            AdmissionRefused: it is revoked, expired or unknown, with the reason.
        """
        member = self._members.get(subject.name)
        if member is None:
            raise AdmissionRefused(f"{subject.name!r} is not a participant of this server")
        if member.HasField("revoked"):
            raise AdmissionRefused(f"{subject.name!r} has been revoked")
        serials = {issued.serial for issued in member.certificates}
        own = (member.kind, member.identity)
        if subject.serial not in serials or own != (subject.kind, subject.identity):
            raise AdmissionRefused(f"this certificate of {subject.name!r} is not valid any more")
        if (now := self._now()) > subject.not_after:
            raise CertificateExpired(
                f"the certificate of {subject.name!r} ended at {utc(subject.not_after)} "
                f"{BY_SERVERS_CLOCK} {utc(now)}; if that clock is right, join again with a new "
                "token"
            )

    def participants(self) -> list[RegistryEntry]:
        """Return all participants, by name."""
        return [
            RegistryEntry(
                member.name,
                member.kind,
                member.identity,
                member.joined,
                member.revoked if member.HasField("revoked") else None,
                max((issued.not_after for issued in member.certificates), default=None),
                member.rollout,
            )
            for _, member in sorted(self._members.items())
        ]

    def revoked_identities(self) -> set[bytes]:
        """Return Ed25519 public keys that are no longer accepted."""
        return set(self._part.revoked)

    def revoked_names(self) -> set[str]:
        """Return the names of participants that are revoked, and have not joined again."""
        return {name for name in self._members if self.is_revoked(name)}

    def clients(self) -> Iterator[str]:
        """Yield the names of edge devices that are not revoked."""
        for name, member in self._members.items():
            if member.kind == "client" and not member.HasField("revoked"):
                yield name

    def devices(self) -> int:
        """Number of edge devices, at least 1."""
        return max(1, sum(m.kind == "client" for m in self._members.values()))

    def enrolment(self, name: str) -> bytes:
        """The signed enrolment of a participant; empty if it has none."""
        member = self._members.get(name)
        return b"" if member is None else member.enrolment


def check(directory: Path) -> None:
    """Check the membership of a server with a separate authority, and its copy of the registry.

    Raises:
        DamagedError: one of them is damaged, or the copy is missing or not the newest.
        UserError: it cannot be read for another reason.
    """
    if (damage := RemoteMembers(directory).copy.damage) is not None:
        raise damage


class RemoteMembers(Members):
    """Admission by a copy of the authority's registry.

    Guarantees:
      * nobody is admitted or enrolled who is not in the authority's registry;
      * an unreachable authority disconnects nobody.
    """

    deployment: Deployment = "separate"

    def __init__(self, directory: Path, *, now: Callable[[], float] = time.time) -> None:
        """Use the membership that `isthmus server init --authority` saved.

        Raises:
            UserError: there is none, or it is not a server's.
        """
        self.membership = Membership(directory)
        if self.membership.kind != tls.SERVER:
            raise UserError(f"{directory} is the membership of a {self.membership.kind}")
        Enrolments.__init__(self, now=now)
        self.directory = directory
        self.registry = self.copy = RegistryCopy(directory, now=now)
        self._note_revoked()
        self._checked_version = self.copy.version
        self._syncing = asyncio.Lock()
        self._synced_at = 0.0
        self._channel: grpc.aio.Channel | None = None
        self._road: Road | None = None
        """How the channel gets to the authority."""

    @property
    def authority(self) -> bytes:
        """The authority's Ed25519 public key."""
        return self.membership.enroller

    @property
    def authority_certificate(self) -> x509.Certificate:
        """The certificate that signed those of all participants."""
        return self.membership.authority

    def close(self) -> None:
        """Nothing is open: `follow` closes the channel."""

    def server_pair(self) -> tuple[bytes, bytes]:
        """The key and certificate (PEM) that the authority issued for this server."""
        return tls.key_pem(self.membership.key), tls.pem(self.membership.certificate)

    def enrol(self, name: str, identity: bytes, not_after: float | None = None) -> bytes:
        """The enrolment that the authority signed; empty if there is none."""
        statement = self.copy.enrolment(name)
        if statement:
            self.current[name] = Enrolment.from_bytes(statement)
        return statement

    async def check(self, subject: tls.Subject) -> None:
        """Check as `Members.check`; for one who has joined just now the authority is asked first.

        Raises:
            AdmissionDelayed: it cannot be asked.
            AdmissionRefused: see `Members.check`.
        """
        asked_at = time.monotonic()
        try:
            self.copy.check(subject)
        except CertificateExpired:
            raise
        except AdmissionRefused as refused:
            try:
                await self._sync(not_before=asked_at)
            except AdmissionRefused as error:
                log.warning("%s", error)
                if self.copy.is_revoked(subject.name):
                    raise refused from None
                raise AdmissionDelayed(
                    f"{refused}, as far as it knows: it cannot ask the authority now who has "
                    "joined since, and may later"
                ) from None
            self.copy.check(subject)

    async def renew(self, subject: tls.Subject, request: bytes) -> tuple[bytes, tls.Subject]:
        """Pass a request for the next certificate on; see `Enrolments.renew`."""
        await self.check(subject)
        ask = pb.RenewRequest(name=subject.name, serial=subject.serial, signing_request=request)
        (data,) = [part async for part in self._call("Renew", ask)]
        certificate = pb.RenewReply.FromString(data).certificate
        renewed = tls.subject_of(tls.read_certificate(certificate))
        await self._sync(not_before=time.monotonic())
        return certificate, renewed

    async def follow(self) -> None:
        """Keep the copy and this server's own certificate current until cancelled.

        Raises:
            UserError: nothing was copied yet, and the authority cannot be reached.
        """
        reachable = True
        try:
            while True:
                pause = _POLL_SECONDS
                try:
                    await self._sync(not_before=time.monotonic())
                    await self._renew_own()
                    if not reachable:
                        log.info("the authority can be reached again")
                    reachable = True
                except AdmissionRefused as error:
                    if reachable:
                        log.warning("%s; participants that have joined continue", error)
                    reachable = False
                    pause = _OFFLINE_SECONDS
                except Exception:  # the copying goes on, whatever was wrong once
                    log.exception("the registry could not be copied; it is tried again")
                    pause = _OFFLINE_SECONDS
                await asyncio.sleep(pause)
        finally:
            await self._hang_up()

    async def first_copy(self) -> None:
        """Copy the registry before anyone connects, unless there is an intact copy.

        Raises:
            UserError: there is none, and the authority cannot be reached.
        """
        if self.copy.damage is not None:
            log.warning("%s", self.copy.damage)
        try:
            await self._sync(not_before=time.monotonic())
        except AdmissionRefused as error:
            if (damage := self.copy.damage) is not None:
                raise UserError(f"{damage}; but {error}") from None
            if not self.copy.copied:
                raise UserError(f"{error}; a new server needs it once to start") from None
            log.warning("%s; this server uses its last copy of the registry", error)

    async def _sync(self, *, not_before: float) -> None:
        """Copy the registry if it has changed, unless that was done after `not_before`."""
        async with self._syncing:
            if self._synced_at > not_before:
                return
            began = time.monotonic()
            whole = pb.RegistryPart()
            async for data in self._call("Registry", pb.RegistryRequest(version=self.copy.copied)):
                part = pb.RegistryPart.FromString(data)
                if whole.version not in ("", part.version):
                    raise AdmissionRefused("the authority sent parts of two registries")
                whole.MergeFrom(part)
                if len(whole.members) > MAX_MEMBERS:
                    raise AdmissionRefused(f"the authority has more than {MAX_MEMBERS} members")
            if not whole.version:
                raise AdmissionRefused("the authority sent no registry")
            if not whole.unchanged:
                try:
                    self.copy.replace(whole)
                except OSError as error:
                    raise AdmissionRefused(
                        f"the copy of the registry in {self.directory} cannot be written: "
                        f"{error.strerror}"
                    ) from None
            self._synced_at = began

    async def _renew_own(self) -> None:
        """Request this server's next certificate when two thirds of its validity are over."""
        member = self.membership
        if self.now() < member.renew_at:
            return
        serial = tls.subject_of(member.certificate).serial
        ask = pb.RenewRequest(
            name=member.name, serial=serial, signing_request=member.next_request()
        )
        (data,) = [part async for part in self._call("Renew", ask)]
        member.renewed(pb.RenewReply.FromString(data).certificate)
        await self._hang_up()

    async def _call(self, method: str, request: Message) -> AsyncIterator[bytes]:
        """The replies of the authority.

        Raises:
            AdmissionRefused: it refuses, or cannot be reached.
        """
        where = f"the authority at {self.membership.server}"
        if self._channel is None:
            self._channel = self._dial()
        call = self._channel.unary_stream(_SERVICE + method)
        try:
            async for data in call(request.SerializeToString(), timeout=_TIMEOUT):
                yield data
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                raise AdmissionRefused(details) from None
            reason = await self._reason(details)
            raise AdmissionRefused(f"{where} cannot be reached: {reason}") from None

    def _dial(self) -> grpc.aio.Channel:
        """A channel on the road that was chosen with the join, or by the variables.

        Raises:
            AdmissionRefused: its proxy cannot be used.
        """
        try:
            self._road = road = self.membership.road()
            options = (*_OPTIONS, *road.options())
        except UserError as error:
            raise AdmissionRefused(str(error)) from None
        if road.announcement:
            log.info("%s", road.announcement)
        credentials = self.membership.channel_credentials()
        return grpc.aio.secure_channel(road.target, credentials, options)

    async def _reason(self, details: str) -> str:
        """Why the authority cannot be reached, by what is in the way if that is found."""
        reason = short_message(details)
        road = self._road
        if road is None:
            return reason
        if is_clear(road, reason):
            return with_remedy(road, reason)
        blocked = await obstacle(road, self.membership.authority)
        return reason if blocked is None else str(blocked)

    async def _hang_up(self) -> None:
        channel = self._channel
        self._channel = None
        if channel is not None:
            await channel.close()
