"""X.509 keys and certificates of both ends of the link.

A participant's certificate contains its role, its name (`isthmus:client:phone-0`) and the Ed25519
key that identifies it in secure aggregation (`isthmus-identity:<hex>`), as URIs of the subject
alternative names. The operator's authority signs them together, so that the peer of a TLS
connection and the party of the protocol are the same.

Keys are ECDSA on P-256, which gRPC's TLS library supports on all platforms.

>>> key = new_key()
>>> request = x509.load_der_x509_csr(signing_request(key))
>>> request.is_signature_valid
True
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.errors import AdmissionRefused, UserError
from isthmus.names import is_name

AGGREGATOR = "aggregator"
"""The role of a process that holds streams of devices for the server."""

KINDS = ("client", "datacenter", "operator", AGGREGATOR)
"""The roles that a certificate can be issued for."""

SERVER = "server"
"""The role of a server whose authority is another process."""

AUTHORITY_NAME = "Isthmus authority"
"""The common name of every authority; what identifies one is its key."""

NONCE_BYTES = 32
"""Length of the nonce that is signed to have a certificate renewed."""

_RENEWAL_DOMAIN = b"isthmus/renewal/1/"
_ROLE_URI = "isthmus:"
_ENROLLER_URI = "isthmus-enroller:"
_IDENTITY_URI = "isthmus-identity:"

Key = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


def new_key() -> Key:
    """A new private key."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key) -> bytes:
    """A private key as unencrypted PKCS #8 PEM; the mode of its file protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def pem(certificate: x509.Certificate) -> bytes:
    """A certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def signing_request(key: Key) -> bytes:
    """A PKCS #10 signing request (DER) without a subject, as proof of possession of the key."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def prove(key: Key, nonce: bytes, request: bytes) -> bytes:
    """Sign a server's nonce and a signing request with the key of the present certificate.

    Raises:
        AdmissionRefused: the nonce does not have the length of one.
    """
    return key.sign(_renewal(nonce, request), ec.ECDSA(hashes.SHA256()))


def check_proof(certificate: bytes, nonce: bytes, request: bytes, proof: bytes) -> None:
    """Check that the holder of a certificate (PEM) has signed a nonce and a signing request.

    Raises:
        AdmissionRefused: it did not.
    """
    key = read_certificate(certificate).public_key()
    try:
        if not isinstance(key, PublicKey):
            raise AdmissionRefused("the key of this certificate signs nothing")
        key.verify(proof, _renewal(nonce, request), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise AdmissionRefused("the key of the present certificate did not sign this") from None


def _renewal(nonce: bytes, request: bytes) -> bytes:
    """What is signed to have a certificate renewed.

    An aggregator may choose the nonce. So it has one length, and what is signed begins as nothing
    else does that this key signs: it cannot be taken for a handshake of TLS.
    """
    if len(nonce) != NONCE_BYTES:
        raise AdmissionRefused(
            f"a nonce for the renewal of a certificate has {len(nonce)} bytes, not {NONCE_BYTES}"
        )
    return _RENEWAL_DOMAIN + nonce + request


def fingerprint(certificate: x509.Certificate) -> bytes:
    """The SHA-256 (32 bytes) of a certificate."""
    return certificate.fingerprint(hashes.SHA256())


@dataclasses.dataclass(frozen=True)
class Subject:
    """The participant that a certificate was issued to."""

    kind: str
    name: str
    identity: bytes
    """Ed25519 public key, 32 bytes."""
    serial: str
    """The certificate's serial number in hexadecimal."""
    not_after: float
    """Unix seconds."""

    @property
    def names(self) -> x509.SubjectAlternativeName:
        """The subject alternative names of the certificate."""
        return x509.SubjectAlternativeName(
            [
                x509.UniformResourceIdentifier(f"{_ROLE_URI}{self.kind}:{self.name}"),
                x509.UniformResourceIdentifier(f"{_IDENTITY_URI}{self.identity.hex()}"),
            ]
        )


def subject_of(certificate: x509.Certificate) -> Subject:
    """Read a participant's certificate without verifying it; TLS or `issued_by` does that.

    Raises:
        AdmissionRefused: it is not a participant's certificate.
    """
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        uris = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
        (role,) = [uri for uri in uris if uri.startswith(_ROLE_URI)]
        (identity,) = [uri for uri in uris if uri.startswith(_IDENTITY_URI)]
        kind, _, name = role.removeprefix(_ROLE_URI).partition(":")
        key = bytes.fromhex(identity.removeprefix(_IDENTITY_URI))
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        raise AdmissionRefused("this is not a participant's certificate") from None
    if kind not in (*KINDS, SERVER) or not is_name(name) or len(key) != 32:
        raise AdmissionRefused("this is not a participant's certificate")
    return Subject(
        kind=kind,
        name=name,
        identity=key,
        serial=f"{certificate.serial_number:x}",
        not_after=certificate.not_valid_after_utc.timestamp(),
    )


def enroller_name(public: bytes) -> x509.UniformResourceIdentifier:
    """The name in an authority's certificate that states its enrolment key (Ed25519)."""
    return x509.UniformResourceIdentifier(f"{_ENROLLER_URI}{public.hex()}")


def enroller_of(authority: x509.Certificate) -> bytes:
    """The key (32 bytes) that signs enrolments, from the certificate of their authority.

    A token has the hash of this certificate, so no server can replace the key.

    Raises:
        AdmissionRefused: the certificate states none.
    """
    try:
        names = authority.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        (uri,) = [uri for uri in uris if uri.startswith(_ENROLLER_URI)]
        key = bytes.fromhex(uri.removeprefix(_ENROLLER_URI))
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        key = b""
    if len(key) != 32:
        raise AdmissionRefused("this authority's certificate does not state its enrolment key")
    return key


def issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the authority signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def read_certificate(data: bytes) -> x509.Certificate:
    """A certificate from PEM.

    Raises:
        AdmissionRefused: the bytes are not a certificate.
    """
    try:
        certificate = x509.load_pem_x509_certificate(data)
        certificate.public_key()  # raises as well if it cannot be read
        return certificate
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion):
        raise AdmissionRefused("this is not a certificate") from None


def read_pair(data: bytes) -> tuple[Key, x509.Certificate]:
    """A private key and its certificate, from PEM.

    Raises:
        ValueError: the key cannot be read, or does not belong to the certificate.
        AdmissionRefused: the certificate cannot be read.
    """
    key = read_key(data)
    certificate = read_certificate(data)
    if key.public_key() != certificate.public_key():
        raise ValueError("the key and the certificate do not belong to each other")
    return key, certificate


def read_key(data: bytes) -> Key:
    """A private key from PEM.

    Raises:
        ValueError: the bytes are not a key of the kind that `new_key` makes.
    """
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"the private key cannot be read ({_first_line(error)})") from None
    if not isinstance(key, Key):
        raise ValueError("the key is not an ECDSA key")
    return key


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def new_seed_file() -> bytes:
    """The contents of a file with a new Ed25519 private key: its seed, and a digest of it."""
    seed = Ed25519PrivateKey.generate().private_bytes_raw()
    return f"{seed.hex()} {hashlib.sha256(seed).hexdigest()}\n".encode()


def read_seed_file(data: bytes) -> bytes:
    """The seed (32 bytes) in the contents that `new_seed_file` returned.

    Raises:
        ValueError: they were changed.
    """
    seed_text, _, digest = data.decode().removesuffix("\n").partition(" ")
    seed = bytes.fromhex(seed_text)
    if len(seed) != 32 or hashlib.sha256(seed).hexdigest() != digest:
        raise ValueError("the key is not the one that was written")
    return seed


def aggregator_host(name: str) -> str:
    """The host at which devices reach the aggregator of a name.

    >>> aggregator_host("sums.example.org"), aggregator_host("sums.example.org_2")
    ('sums.example.org', 'sums.example.org')
    """
    return name.partition("_")[0]


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address or `localhost`, without a name lookup."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_socket(address: str) -> bool:
    """Whether an address is a Unix socket, `unix:PATH`, as used by embedded runs."""
    return address.startswith("unix:")


def split_address(text: str, what: str) -> tuple[str, int]:
    """Split `HOST:PORT` (an IPv6 host in brackets) into host and port.

    Raises:
        UserError: the text does not have that form; `what` names it in the message.
    """
    host, separator, port = text.rpartition(":")
    digits = port.isascii() and port.isdigit()
    if not separator or not host or not digits or int(port) > 65535:
        raise UserError(f"{what} {text!r} is not of the form HOST:PORT")
    return host, int(port)
