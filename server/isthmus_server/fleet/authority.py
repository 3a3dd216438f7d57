"""The server's certificate authority: issues certificates, and signs participants' identities.

Its keys are in the server's state directory. Any user who can read them can create participants, so
the directory has mode 0700 and the keys have mode 0600.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import ipaddress
import shutil
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isthmus.errors import AdmissionRefused, DamagedError, UserError
from isthmus.identity import tls
from isthmus.identity.balancers import Balancer, is_behind_balancer
from isthmus.identity.membership import has_begun_to_join
from isthmus.system.private_files import check_private, make_private_directory, write_private_file
from isthmus.system.sealed_files import read_sealed, write_sealed
from isthmus_privacy.secagg.identity import Authority as Enroller

AUTHORITY_LIFE = datetime.timedelta(days=3650)
SERVER_LIFE = datetime.timedelta(days=30)
"""Validity of the server's own certificate, which is renewed when a third of it is left."""
PARTICIPANT_LIFE = datetime.timedelta(days=7)

_AUTHORITY = "authority.pem"
_SERVER = "server.pem"
_ENROLLER = "enroller.key"
_SERVES = "serves"

_RESTORE = "restore the file from a backup; nothing else can replace it"
_BEGUN = (
    "holds the keys of a join that was interrupted; run the same command again, for a server "
    "isthmus server init with --authority"
)


def initialise(directory: Path, hosts: Iterable[str], serves: str | None = None) -> None:
    """Create a new authority and a first server certificate in `directory`.

    Args:
        directory: the state directory; it must not exist, or be empty.
        hosts: names and addresses that participants will connect to.
        serves: HOST:PORT of the server, or its address with `wss://` behind a balancer, if the
            authority is to be a process of its own.

    Raises:
        UserError: the directory is not empty or cannot be written, or a host is neither a name
            nor an address.
    """
    if directory.resolve() == Path.cwd():  # it is renamed into place
        raise UserError(f"{directory} is the current directory; give a new one below it")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        if has_begun_to_join(directory):
            raise UserError(f"{directory} {_BEGUN}")
        raise UserError(
            f"{directory} is not empty; nothing was changed. Give a new directory: with "
            "a new authority, all participants would have to join again"
        )
    names = [_host(text) for text in hosts]
    if serves is not None:
        _host(_host_of(serves))
    try:
        _make(directory, names, serves)
    except OSError as error:
        raise UserError(f"{directory} cannot be created: {error}") from None


def _make(directory: Path, names: Iterable[x509.GeneralName], serves: str | None) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = directory.with_name(f".{directory.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    make_private_directory(draft)
    key = tls.new_key()
    seed_file = tls.new_seed_file()
    enroller = Ed25519PrivateKey.from_private_bytes(tls.read_seed_file(seed_file)).public_key()
    stated = tls.enroller_name(enroller.public_bytes_raw())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, tls.AUTHORITY_NAME)])
    certificate = (
        _builder(AUTHORITY_LIFE, time.time())
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .add_extension(x509.SubjectAlternativeName([stated]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(_subject_key(key.public_key()), critical=False)
        .add_extension(_authority_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_private_file(draft / _AUTHORITY, tls.key_pem(key) + tls.pem(certificate))
    write_private_file(draft / _ENROLLER, seed_file)
    if serves is not None:
        write_sealed(draft / _SERVES, {"server": serves})
    CertificateAuthority(draft).renew_server(names)
    if directory.exists():
        directory.rmdir()
    draft.rename(directory)


def is_separate(directory: Path) -> bool:
    """Whether a state directory is that of a server with another process as its authority."""
    return (directory / "member.json").exists()


def default_hosts() -> list[str]:
    """Return the names and addresses of this machine."""
    name = socket.gethostname()
    hosts = ["localhost", "127.0.0.1", "::1"]
    with contextlib.suppress(UserError):
        _host(name)
        hosts.insert(0, name)
    return list(dict.fromkeys(hosts))


class CertificateAuthority:
    """Signs certificates and enrolments with the keys in a state directory."""

    def __init__(
        self,
        directory: Path,
        participant_life: datetime.timedelta = PARTICIPANT_LIFE,
        server_life: datetime.timedelta = SERVER_LIFE,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Read the keys. `now` returns the time in Unix seconds.

        Raises:
            UserError: there is no authority, or others can read its keys.
        """
        self.directory = directory
        self.participant_life = participant_life
        self.server_life = server_life
        self.now = now
        try:
            for name in (_AUTHORITY, _ENROLLER):
                check_private(directory / name)
            data = (directory / _AUTHORITY).read_bytes()
            self._key, self.certificate = tls.read_pair(data)
            if not tls.issued_by(self.certificate, self.certificate):
                raise ValueError(f"{_AUTHORITY} is damaged")
            self._seed = tls.read_seed_file((directory / _ENROLLER).read_bytes())
            self.serves = _read_serves(directory)
            """The server's address, if this authority is a process of its own."""
        except FileNotFoundError as error:
            if (directory / _SERVER).exists():
                raise DamagedError(f"{error.filename} is missing; {_RESTORE}") from None
            if has_begun_to_join(directory):
                raise UserError(f"{directory} {_BEGUN}") from None
            raise UserError(
                f"{directory} contains no server; create one: isthmus server init {directory}"
            ) from None
        except (OSError, ValueError, AdmissionRefused) as error:
            if isinstance(error, UserError):
                raise
            raise DamagedError(
                f"the keys in {directory} cannot be used: {error}; {_RESTORE}"
            ) from None

    @functools.cached_property
    def enroller(self) -> Enroller:
        """Signs the participants' identities."""
        return Enroller(self._seed)

    def issue(
        self, request: bytes, *, kind: str, name: str, identity: bytes
    ) -> tuple[bytes, tls.Subject]:
        """Issue a participant's certificate (PEM) for the key in a signing request (DER).

        The subject in the request is ignored.

        Raises:
            AdmissionRefused: the request is invalid, or not signed with its key.
        """
        try:
            signing_request = x509.load_der_x509_csr(request)
            if not signing_request.is_signature_valid:
                raise ValueError("it is not signed with its key")
            key = signing_request.public_key()
        except (ValueError, TypeError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
            raise AdmissionRefused(f"the signing request cannot be used: {error}") from None
        if not isinstance(key, tls.PublicKey) or key.curve.name != "secp256r1":
            raise AdmissionRefused(
                "the signing request cannot be used: its key is not ECDSA on P-256"
            )
        names: list[x509.GeneralName] = []
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if kind == tls.SERVER and self.serves is not None:
            names = [_host(_host_of(self.serves))]
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        if kind == tls.AGGREGATOR:
            # Of the operator's choice, as the token's name is: an aggregator cannot pass for
            # another one, nor for the server on another machine.
            names = [_host(tls.aggregator_host(name))]
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        # Name and kind are the token's, whatever the request contains.
        subject = tls.Subject(kind=kind, name=name, identity=identity, serial="", not_after=0.0)
        certificate = (
            _builder(self.participant_life, self.now())
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self.certificate.subject)
            .public_key(key)
            .add_extension(x509.SubjectAlternativeName([*subject.names, *names]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(_authority_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return tls.pem(certificate), tls.subject_of(certificate)

    def read_server_pair(self) -> tuple[bytes, x509.Certificate]:
        """Read the server's key and certificate: both as PEM, and the certificate.

        Raises:
            UserError: they are damaged, or others can read them.
        """
        path = self.directory / _SERVER
        try:
            check_private(path)
            data = path.read_bytes()
            _, certificate = tls.read_pair(data)
            if not tls.issued_by(certificate, self.certificate):
                raise ValueError(f"{_AUTHORITY} did not sign its certificate")
        except (OSError, ValueError, AdmissionRefused) as error:
            if isinstance(error, UserError):
                raise
            raise DamagedError(f"{path} cannot be used: {error}; {_RESTORE}") from None
        return data, certificate

    def server_pair(self) -> tuple[bytes, bytes]:
        """Return the server's key and certificate (PEM).

        It is renewed if a third of its life is left, or if it was issued when the clock was so far
        ahead that it is not valid yet.

        Raises:
            UserError: they are damaged, or others can read them.
        """
        data, certificate = self.read_server_pair()
        now = datetime.datetime.fromtimestamp(self.now(), datetime.UTC)
        left = certificate.not_valid_after_utc - now
        if left < self.server_life / 3 or now < certificate.not_valid_before_utc:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            self.renew_server(names.value)
            data, _ = self.read_server_pair()
        start = data.index(b"-----BEGIN CERTIFICATE")
        return data[:start], data[start:]

    def renew_server(self, names: Iterable[x509.GeneralName]) -> None:
        """Create the server's next key and certificate, for the host names of the server."""
        key = tls.new_key()
        certificate = (
            _builder(self.server_life, self.now())
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Isthmus server")]))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(_authority_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        write_private_file(self.directory / _SERVER, tls.key_pem(key) + tls.pem(certificate))


def _read_serves(directory: Path) -> str | None:
    try:
        return str(read_sealed(directory / _SERVES)["server"])
    except FileNotFoundError:
        return None
    except DamagedError as error:
        raise DamagedError(
            f"{error}; restore it from a backup, or copy the one that `isthmus authority init` "
            "with the same --server writes in a new directory"
        ) from None


def _builder(life: datetime.timedelta, now: float) -> x509.CertificateBuilder:
    """A certificate that ends after `life`.

    It begins as long before it is issued, so that it is valid on machines whose clock is behind,
    and also after this machine's clock was ahead and has been set right.
    """
    issued = datetime.datetime.fromtimestamp(now, datetime.UTC)
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(issued - abs(life))
        .not_valid_after(issued + life)
    )


def _subject_key(key: ec.EllipticCurvePublicKey) -> x509.SubjectKeyIdentifier:
    """Which RFC 5280 requires of an authority, and Python 3.13 and newer check."""
    return x509.SubjectKeyIdentifier.from_public_key(key)


def _authority_key(key: ec.EllipticCurvePublicKey) -> x509.AuthorityKeyIdentifier:
    """The issuer's key, which RFC 5280 requires of what it issues."""
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _host_of(serves: str) -> str:
    """The host of the server's address, for which its certificate is.

    Raises:
        UserError: the address has another form.
    """
    if is_behind_balancer(serves):
        return Balancer.at(serves).host
    return tls.split_address(serves, "--server")[0]


def check_host(text: str) -> None:
    """Check that certificates can be for a host.

    Raises:
        UserError: it is neither a host name nor an IP address.
    """
    _host(text)


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        pass
    labels = text.split(".")
    if len(text) > 253 or not all(
        label and len(label) < 64 and label.replace("-", "").isalnum() and label.isascii()
        for label in labels
    ):
        raise UserError(f"--host {text!r} is neither a host name nor an IP address")
    return x509.DNSName(text)
