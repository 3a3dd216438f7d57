"""Join a fleet: exchange a token for a certificate.

The token contains the fingerprint of the operator's authority. The first, untrusted connection
only fetches the authority's certificate, which must match the fingerprint. The second connection
trusts only that authority; the token's secret and the signing request are sent on it. Private keys
are generated on this machine and never leave it.

>>> token = Token(bytes(16), bytes(32))
>>> Token.parse(str(token)) == token
True
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import hashlib
import ipaddress
import logging
import random
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
from cryptography import x509
from google.protobuf.message import DecodeError

from isthmus.errors import AdmissionRefused, UserError, cause_of
from isthmus.grpc_errors import details_of, short_message
from isthmus.identity import tls
from isthmus.identity.join_channel import join_channel, trusting
from isthmus.identity.membership import Membership, check_issued, prepare
from isthmus.identity.obstacles import ENDED, check_no_inspection
from isthmus.identity.proxies import ProxyChoice, Road, road_to
from isthmus.wire import join_pb2

VERSION = 1
AUTHORITY = "/isthmus.join.v1.Join/Authority"
JOIN = "/isthmus.join.v1.Join/Join"

MAX_JOIN_BYTES = 16 << 10
"""Size limit of a message in both directions."""

SECRET_BYTES = 16

_PREFIX = "isthmus-"
_MAX_TOKEN_FILE = 4096
"""Characters that are read of a file with a token."""
_TRIES = 6
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 8.0
"""Seconds between tries, while a server is busy with others that join."""
_TIMEOUT = 20.0
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_JOIN_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
)

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Token:
    """A join token: a secret for one use, and the authority that it may be sent to."""

    secret: bytes
    fingerprint: bytes
    """SHA-256 of the authority's certificate."""

    def __str__(self) -> str:
        data = base64.urlsafe_b64encode(self.secret + self.fingerprint)
        return _PREFIX + data.decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Token:
        """Read a token.

        Raises:
            UserError: the text is not a complete token.
        """
        body = text.strip().removeprefix(_PREFIX)
        try:
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            data = b""
        if len(data) != SECRET_BYTES + 32 or not text.strip().startswith(_PREFIX):
            raise UserError(
                "this join token is incomplete; copy everything that `isthmus server token create` "
                "printed"
            )
        return cls(data[:SECRET_BYTES], data[SECRET_BYTES:])

    @classmethod
    def given(cls, text: str | None, file: str | None) -> Token:
        """Read a token from the command line, or from a file (`-`: standard input).

        The arguments of a command are visible to all users of the machine; a file is not.

        Raises:
            UserError: there is not exactly one of them, or the file cannot be read.
        """
        if (text is None) == (file is None):
            raise UserError("give the token either as TOKEN or with --token-file, and not both")
        if text is not None:
            return cls.parse(text)
        assert file is not None
        try:
            if file == "-":
                return cls.parse(sys.stdin.read(_MAX_TOKEN_FILE))
            with Path(file).open(encoding="ascii") as stream:
                return cls.parse(stream.read(_MAX_TOKEN_FILE))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--token-file {file} cannot be read: {cause_of(error)}") from None

    @property
    def digest(self) -> bytes:
        """The hash of the secret, which the server stores."""
        return hashlib.sha256(b"isthmus/token/" + self.secret).digest()


def statement(fingerprint: bytes, kind: str, secret: bytes, request: bytes) -> bytes:
    """The bytes that the identity key signs as proof of possession."""
    parts = (fingerprint, kind.encode(), hashlib.sha256(secret).digest(), request)
    return b"isthmus/join/1" + b"".join(len(part).to_bytes(4, "big") + part for part in parts)


async def join(
    url: str, token: Token, directory: Path, kind: str, proxy: ProxyChoice | None = None
) -> Membership:
    """Get a certificate for this machine and save it in `directory`, with the owner's proxy.

    Raises:
        UserError: the address, the proxy or the directory cannot be used.
        AdmissionRefused: the server refused, or is not the server of the token.
    """
    road = road_to(_dialled(url), proxy)
    road.check_used(proxy)
    host = road.host
    # All that is behind a balancer is at its address.
    reached = road.address if road.balancer is not None else ""
    if road.announcement:
        log.info("%s", road.announcement)
    key, identity = await asyncio.to_thread(prepare, directory)
    authority = await _fetch_authority(road, host, token)
    request = tls.signing_request(key)
    public = identity.public_key().public_bytes_raw()
    message = join_pb2.JoinRequest(
        version=VERSION,
        kind=kind,
        secret=token.secret,
        signing_request=request,
        identity=public,
        proof=identity.sign(statement(token.fingerprint, kind, token.secret, request)),
    )
    answer = await _call(road, trusting(authority), JOIN, message.SerializeToString())
    try:
        reply = join_pb2.JoinReply.FromString(answer)
    except DecodeError:
        raise AdmissionRefused("the server's reply to the join is invalid") from None
    certificate = tls.read_certificate(reply.certificate)
    check_issued(certificate, authority, kind, public)
    if certificate.public_key() != key.public_key():
        raise AdmissionRefused("the server issued a certificate for another key")
    return await asyncio.to_thread(
        lambda: Membership.save(
            directory,
            server=reply.server or reached or f"{host}:{reply.link_port or road.port}",
            authority=authority,
            enroller=tls.enroller_of(authority),
            key=key,
            certificate=certificate,
            proxy=proxy,
        )
    )


def _dialled(url: str) -> str:
    """A server's address as it is dialled: HOST:PORT may be written as that of a web page.

    >>> _dialled("https://fleet.example.org:9401/"), _dialled("https://fleet.example.org/isthmus")
    ('fleet.example.org:9401', 'https://fleet.example.org/isthmus')
    """
    bare = url.removeprefix("https://").rstrip("/")
    try:
        tls.split_address(bare, "the server's address")
    except UserError:
        return url  # which says more about what it should be, and is what was typed
    return bare


async def _fetch_authority(road: Road, host: str, token: Token) -> x509.Certificate:
    """Fetch the server's authority and accept it only if its fingerprint is the token's."""
    leaf: x509.Certificate | None = None

    def note(presented: x509.Certificate) -> None:
        nonlocal leaf
        check_no_inspection(road, presented)
        leaf = presented

    # This call trusts everybody: what it gets is checked below, and it says nothing.
    answer = await _call(road, trusting(None), AUTHORITY, b"", note)
    assert leaf is not None
    try:
        authority = tls.read_certificate(join_pb2.AuthorityReply.FromString(answer).certificate)
    except DecodeError:
        raise AdmissionRefused("the program at that address is not an Isthmus server") from None
    if tls.fingerprint(authority) != token.fingerprint or not tls.issued_by(leaf, authority):
        raise AdmissionRefused(
            f"the server at {road.address} is not the one this token is for; nothing was sent to it"
        )
    names = _names_of(leaf)
    if _canonical(host.strip("[]")) not in map(_canonical, names):
        raise UserError(
            f"the server at {road.address} has no certificate for {host!r}; it is known as "
            f"{', '.join(names)}; connect to one of these"
        )
    return authority


async def _pause(attempt: int) -> None:
    """Wait before the try after `attempt`, counted from 0."""
    seconds = min(_FIRST_PAUSE * 2.0**attempt, _LONGEST_PAUSE)
    await asyncio.sleep(seconds * random.uniform(0.5, 1.0))  # noqa: S311 - jitter


def _names_of(certificate: x509.Certificate) -> list[str]:
    """The host names and addresses of a server's certificate, at least one."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        addresses = map(str, names.get_values_for_type(x509.IPAddress))
        hosts = [*names.get_values_for_type(x509.DNSName), *addresses]
    except (
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        x509.UnsupportedGeneralNameType,
        ValueError,
    ):
        hosts = []
    if not hosts:
        raise AdmissionRefused("the program at that address is not an Isthmus server")
    return hosts


def _canonical(host: str) -> str:
    """A host name or address in its canonical form."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()


async def _call(
    road: Road,
    context: ssl.SSLContext,
    method: str,
    message: bytes,
    check: Callable[[x509.Certificate], None] | None = None,
) -> bytes:
    """Call a method, with retries while the server is busy; `check` as in `join_channel`."""
    more = () if check is None else (check,)
    for attempt in range(_TRIES):
        try:
            async with join_channel(road, context, _OPTIONS, _TIMEOUT, *more) as channel:
                answer = await channel.unary_unary(method)(message, timeout=_TIMEOUT)
        except OSError as error:
            # A server without a place for a further connection ends it.
            if not isinstance(error, ENDED) or attempt == _TRIES - 1:
                raise AdmissionRefused(_nobody(road, error.strerror or str(error))) from None
        except grpc.aio.AioRpcError as error:
            busy = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
            if error.code() not in busy or attempt == _TRIES - 1:
                raise AdmissionRefused(_failure_message(road, error)) from None
        else:
            assert isinstance(answer, bytes)
            return answer
        await _pause(attempt)
    raise AssertionError("the last try returns or raises")


def _nobody(road: Road, why: str) -> str:
    own = ": unless a server has one port, joining has a port of its own, the one after that of the"
    own = "" if road.balancer is not None else f"{own} link"
    return f"no server accepts joins at {road.address}{road.detour}{own}; {why}"


def _failure_message(road: Road, error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return _nobody(road, short_message(details_of(error)))
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return (
            f"the server at {road.address}{road.detour} took the connection and did not answer "
            f"within {_TIMEOUT:g} s: it is busy, or the network loses packets that are large; try "
            "again, and if it is the same, ask the network's owner about its MTU"
        )
    return f"the server at {road.address} refused to join this machine: {details_of(error)}"
