"""The membership of a machine in a fleet: its keys, its certificate and the trusted authority.

`isthmus client join` or `isthmus datacenter join` saves it in a directory that only the owner can
access; `start` reads it. The private keys are generated on this machine and never leave it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.errors import AdmissionRefused, CertificateExpired, DamagedError, UserError
from isthmus.identity import tls
from isthmus.identity.balancers import host_and_port, is_behind_balancer
from isthmus.identity.proxies import ProxyChoice, Road, road_to
from isthmus.system.clocks import utc
from isthmus.system.file_lock import file_lock, is_locked
from isthmus.system.private_files import check_private, make_private_directory, write_private_file
from isthmus.system.sealed_files import read_sealed, write_sealed

RENEW_AT = 5 / 6
"""Share of a certificate's validity after which it is renewed. The first half is before it was
issued, because clocks may be behind: two thirds of the time for which it was issued."""

_MEMBER = "member.json"
_AUTHORITY = "authority.pem"
_CREDENTIALS = "credentials.pem"
_IDENTITY = "identity.key"


class Membership:
    """One participant's membership, stored in a directory.

    Guarantees:
      * only the owner can read the secrets in it;
      * key and certificate change together: after a crash either the old or the new pair is there.
    """

    key: tls.Key
    certificate: x509.Certificate
    has_history: bool
    """Whether an edge device has begun its history, so that a missing one is lost."""
    proxy: ProxyChoice
    """What its owner said about proxies when it joined."""

    def __init__(self, directory: Path) -> None:
        """Read the membership that `join` saved in the directory.

        Raises:
            UserError: this machine has not joined, or the directory cannot be used.
        """
        self.directory = directory
        path = directory / _MEMBER
        try:
            self._about = about = read_sealed(path)
            self.name = str(about["name"])
            self.kind = str(about["kind"])
            self.server = str(about["server"])
            self.enroller = bytes.fromhex(about["enroller"])
            self.has_history = bool(about["history"])
            # Only there if the owner has named a proxy.
            saved = about.get("proxy")
            self.proxy = ProxyChoice() if saved is None else ProxyChoice.remembered(saved)
            check_private(directory / _IDENTITY)
            self.identity = _read_identity(directory)
            self.authority = tls.read_certificate((directory / _AUTHORITY).read_bytes())
            check_private(directory / _CREDENTIALS)
            data = (directory / _CREDENTIALS).read_bytes()
            self.key, self.certificate = tls.read_pair(data)
            self._check_intact()
        except FileNotFoundError as error:
            raise UserError(
                f"{directory} holds no membership ({Path(str(error.filename)).name} is missing); "
                "join a server first, by isthmus client (or datacenter, operator, server "
                "aggregator) join"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AdmissionRefused) as error:
            if isinstance(error, UserError) and not isinstance(error, DamagedError):
                raise
            raise DamagedError(
                f"the membership in {directory} cannot be used: {error}; restore the directory "
                "from a backup, or have the operator revoke it and join again"
            ) from None
        self._next_key: tls.Key | None = None

    @classmethod
    def save(
        cls,
        directory: Path,
        *,
        server: str,
        authority: x509.Certificate,
        enroller: bytes,
        key: tls.Key,
        certificate: x509.Certificate,
        proxy: ProxyChoice | None = None,
    ) -> Membership:
        """Save the result of a join; `prepare` has already saved the identity.

        `proxy`: what was said about proxies, which is remembered.

        Raises:
            UserError: the directory cannot be written.
        """
        subject = tls.subject_of(certificate)
        about = {
            "version": 1,
            "name": subject.name,
            "kind": subject.kind,
            "server": server,
            "enroller": enroller.hex(),
            "history": False,
            **({"proxy": proxy.saved()} if proxy else {}),
        }
        with _writing(directory):
            write_private_file(directory / _AUTHORITY, tls.pem(authority))
            write_private_file(directory / _CREDENTIALS, tls.key_pem(key) + tls.pem(certificate))
            write_sealed(directory / _MEMBER, about)
            (directory / _JOINING).unlink(missing_ok=True)
        return cls(directory)

    @property
    def identity_public(self) -> bytes:
        """The Ed25519 public key (32 bytes) in this participant's certificate."""
        return self.identity.public_key().public_bytes_raw()

    @property
    def history(self) -> Path:
        """File of an edge device's past sums, kept as long as its identity."""
        return self.directory / "history.log"

    def road(self, proxy: ProxyChoice | None = None, address: str = "") -> Road:
        """The road to the server, or to another address of it.

        `proxy` is what the owner says now; what it leaves open is as it was with the join.

        Raises:
            UserError: the proxy or the file with its login cannot be used.
        """
        road = road_to(address or self.server, (proxy or ProxyChoice()).over(self.proxy))
        road.check_used(proxy)
        return road

    def note_history(self) -> None:
        """Note durably that the history was begun.

        Raises:
            UserError: the directory cannot be written.
        """
        with _writing(self.directory):
            write_sealed(self.directory / _MEMBER, {**self._about, "history": True})
        self.has_history = True

    @property
    def tasks(self) -> Path:
        """Default directory of the tasks that this machine loads."""
        return self.directory / "tasks"

    @property
    def renew_at(self) -> float:
        """Time at which to request the next certificate, in unix seconds."""
        return self.certificate.not_valid_before_utc.timestamp() + RENEW_AT * self.life

    @property
    def life(self) -> float:
        """Length of the certificate's validity in seconds."""
        begin = self.certificate.not_valid_before_utc
        end = self.certificate.not_valid_after_utc
        return (end - begin).total_seconds()

    def check_valid(self) -> None:
        """Check the certificate by this machine's clock.

        Raises:
            CertificateExpired: it is over.
        """
        end = self.certificate.not_valid_after_utc.timestamp()
        now = time.time()
        if now > end:
            raise CertificateExpired(
                f"the certificate of {self.name!r} ended at {utc(end)} by this machine's clock, "
                f"which is at {utc(now)}; if that clock is right, join again with a new token"
            )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials with this certificate that trust only the fleet's authority.

        An expired one can be used: the clock of this machine may be wrong, and the server decides.
        """
        return grpc.ssl_channel_credentials(
            root_certificates=tls.pem(self.authority),
            private_key=tls.key_pem(self.key),
            certificate_chain=tls.pem(self.certificate),
        )

    def next_request(self) -> bytes:
        """A signing request (DER) for the next certificate, with a new key."""
        self._next_key = tls.new_key()
        return tls.signing_request(self._next_key)

    def proof_of(self, request: bytes, nonce: bytes) -> bytes:
        """The signature of nonce and signing request by the key of the present certificate.

        Raises:
            AdmissionRefused: the nonce does not have the length of one.
        """
        return tls.prove(self.key, nonce, request)

    def renewed(self, data: bytes) -> None:
        """Save the certificate (PEM) that was issued for the last `next_request`.

        Raises:
            AdmissionRefused: it is for another key or participant, by another authority, or ends
                before the present one, which is kept.
        """
        certificate = tls.read_certificate(data)
        key = self._next_key
        if key is None or certificate.public_key() != key.public_key():
            raise AdmissionRefused("the server renewed a certificate for another key")
        check_issued(certificate, self.authority, self.kind, self.identity_public)
        if tls.subject_of(certificate).name != self.name:
            raise AdmissionRefused("the renewed certificate belongs to another participant")
        end = certificate.not_valid_after_utc
        present = self.certificate.not_valid_after_utc
        if end < present:
            raise AdmissionRefused(
                f"the new certificate ends at {utc(end.timestamp())}, before the present one at "
                f"{utc(present.timestamp())}: the server's clock is or was wrong"
            )
        path = self.directory / _CREDENTIALS
        write_private_file(path, tls.key_pem(key) + tls.pem(certificate))
        self.key = key
        self.certificate = certificate
        self._next_key = None

    def _check_intact(self) -> None:
        """Compare the files with each other.

        Raises:
            ValueError: one of them was changed.
        """
        if not tls.issued_by(self.authority, self.authority):
            raise ValueError(f"{_AUTHORITY} is damaged")
        if not tls.issued_by(self.certificate, self.authority):
            raise ValueError(f"{_AUTHORITY} did not sign the certificate in {_CREDENTIALS}")
        if tls.subject_of(self.certificate).identity != self.identity_public:
            raise ValueError(f"{_IDENTITY} is not the identity in {_CREDENTIALS}")

    @property
    def is_in_use(self) -> bool:
        """Whether a process holds the lock of this membership, or may hold it."""
        return is_locked(self.directory / "lock")

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold the exclusive lock of this membership inside the block.

        Raises:
            UserError: another process uses the membership.
        """
        taken = f"another process runs as {self.name!r} from {self.directory}"
        return file_lock(self.directory / "lock", taken)


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror}") from None


_JOINING = "joining.key"


def prepare(directory: Path) -> tuple[tls.Key, Ed25519PrivateKey]:
    """The keys for joining, generated once, so that an interrupted join can be repeated.

    Raises:
        UserError: the directory already holds a membership, or cannot be written.
    """
    if (directory / _MEMBER).exists():
        raise UserError(
            f"{directory} holds a membership already; give another --state, or remove that one"
        )
    make_private_directory(directory)
    with _writing(directory):
        if not (directory / _IDENTITY).exists():
            write_private_file(directory / _IDENTITY, tls.new_seed_file())
        if not (directory / _JOINING).exists():
            write_private_file(directory / _JOINING, tls.key_pem(tls.new_key()))
    try:
        return tls.read_key((directory / _JOINING).read_bytes()), _read_identity(directory)
    except ValueError as error:
        raise UserError(f"the keys in {directory} cannot be used: {error}") from None


def has_begun_to_join(directory: Path) -> bool:
    """Whether joining was begun in a directory and has not ended."""
    return (directory / _JOINING).exists() and not (directory / _MEMBER).exists()


def check_issued(
    certificate: x509.Certificate, authority: x509.Certificate, kind: str, identity: bytes
) -> None:
    """Check a certificate that a server issued to this participant.

    Raises:
        AdmissionRefused: another authority signed it, or it has another role or identity.
    """
    if not tls.issued_by(certificate, authority):
        raise AdmissionRefused("the server's authority did not sign the certificate it sent")
    subject = tls.subject_of(certificate)
    if (subject.kind, subject.identity) != (kind, identity):
        raise AdmissionRefused(f"the server issued a certificate that is not for this {kind}")


def check_dialling(address: str, kind: str, name: str, membership: Membership | None) -> None:
    """Refuse connections to other machines without this participant's own certificate.

    Raises:
        UserError: there is no membership, or it is for another role or name.
    """
    is_local = tls.is_socket(address)
    host = "" if is_local else host_and_port(address)[0]
    if membership is None:
        if is_behind_balancer(address):
            raise UserError(
                f"a server behind a balancer requires a certificate; join it first: isthmus {kind} "
                f"join {address} TOKEN"
            )
        if not is_local and not tls.is_loopback(host):
            raise UserError(
                f"{host} is another machine, and this one has not joined its fleet; join first: "
                f"isthmus {kind} join HOST:PORT TOKEN"
            )
    elif is_local:
        raise UserError(f"{address} requires no certificate; also give --name to connect to it")
    elif (membership.kind, membership.name) != (kind, name):
        raise UserError(
            f"{membership.directory} is the membership of the {membership.kind} "
            f"{membership.name!r}, not of a {kind} named {name!r}"
        )


def _read_identity(directory: Path) -> Ed25519PrivateKey:
    seed = tls.read_seed_file((directory / _IDENTITY).read_bytes())
    return Ed25519PrivateKey.from_private_bytes(seed)


def default_state(role: str) -> Path:
    """Default membership directory of a role, below `XDG_STATE_HOME`."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "isthmus" / role
