import datetime
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import tls
from isthmus_server.cli.server import server
from isthmus_server.fleet.authority import CertificateAuthority, initialise
from isthmus_server.fleet.registry import Registry
from isthmus_server.runs.jobs.queue import JobQueue
from isthmus_server.storage import audit


@pytest.fixture
def state(tmp_path):
    initialise(tmp_path / "server", ["example.org", "10.1.2.3", "::1"])
    return tmp_path / "server"


_EC_KEY = bytes.fromhex("06072a8648ce3d0201")
"""The object identifier of an EC key, as it stands in a request."""


def csr(key, digest=None):
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, digest).public_bytes(serialization.Encoding.DER)


def test_other_users_cannot_read_the_state_directory(state):
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in state.iterdir()} == {0o600}


def test_an_existing_authority_is_not_replaced(state):
    before = {path.name: path.read_bytes() for path in state.iterdir()}
    with pytest.raises(UserError, match=r"is not empty; nothing was changed"):
        initialise(state, ["localhost"])
    assert {path.name: path.read_bytes() for path in state.iterdir()} == before


def test_the_server_certificate_has_all_its_host_names(state):
    _, chain = CertificateAuthority(state).server_pair()
    certificate = tls.read_certificate(chain)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["example.org"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.1.2.3", "::1"]
    assert tls.issued_by(certificate, CertificateAuthority(state).certificate)


def test_the_server_renews_its_own_certificate_for_the_same_names(state):
    before = CertificateAuthority(state).server_pair()
    assert CertificateAuthority(state).server_pair() == before
    little_is_left = CertificateAuthority(state, server_life=datetime.timedelta(days=365))
    after = little_is_left.server_pair()
    old, new = (tls.read_certificate(chain) for _, chain in (before, after))
    assert new.not_valid_after_utc > old.not_valid_after_utc
    assert new.extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    ) == old.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def test_the_subject_in_a_signing_request_is_ignored(state):
    authority, key = CertificateAuthority(state), tls.new_key()
    asked = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "operator")]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.DER)
    )
    pem, subject = authority.issue(asked, kind="client", name="phone-0", identity=b"i" * 32)
    certificate = tls.read_certificate(pem)
    assert subject == tls.subject_of(certificate)
    assert (subject.kind, subject.name, subject.identity) == ("client", "phone-0", b"i" * 32)
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.public_key() == key.public_key()
    assert tls.issued_by(certificate, authority.certificate)
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.ExtendedKeyUsageOID.CLIENT_AUTH]


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        b"\x30\x82\xff\xff" + bytes(100),
        csr(ed25519.Ed25519PrivateKey.generate()),
        csr(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256()),
        csr(tls.new_key(), hashes.SHA256())[:-1] + b"\x00",
        csr(tls.new_key(), hashes.SHA256()).replace(_EC_KEY, _EC_KEY[:-1] + b"\x77"),
    ],
    ids=["nothing", "noise", "ed25519", "another curve", "not signed by its key", "no known key"],
)
def test_a_signing_request_that_cannot_be_used_is_refused(state, request_):
    with pytest.raises(AdmissionRefused, match=r"^the signing request cannot be used: "):
        CertificateAuthority(state).issue(
            request_, kind="client", name="phone-0", identity=bytes(32)
        )


@pytest.mark.parametrize("name", ["authority.pem", "enroller.key", "server.pem"])
def test_a_key_that_others_can_read_is_refused(state, name):
    (state / name).chmod(0o640)
    with pytest.raises(UserError, match=r"can be read by others on this machine; chmod 600"):
        CertificateAuthority(state).server_pair()


@pytest.mark.parametrize("host", ["", "a b", "-", "x" * 64, "ex_ample.org", "a..b", "1.2.3.4/8"])
def test_an_invalid_host_is_refused(tmp_path, host):
    with pytest.raises(UserError, match="is neither a host name nor an IP address"):
        initialise(tmp_path / "server", [host])
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_state_directory_is_reported_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"is the current directory; give a new one below it"):
        initialise(Path(), ["localhost"])
    assert tmp_path.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^file/server cannot be created: .*File exists"):
        initialise(Path("file/server"), ["localhost"])


def test_without_a_server_the_error_says_how_to_create_one(tmp_path):
    with pytest.raises(UserError, match=r"contains no server; create one: isthmus server init"):
        CertificateAuthority(tmp_path)


def test_a_server_is_verified_file_by_file(state):
    Registry(state).close()
    JobQueue(state).close()
    audit.record(state, "submit", by="me", job="table-1")
    shown = CliRunner().invoke(server, ["verify", str(state)])
    assert (shown.exit_code, shown.output.count("intact ")) == (0, 5)
    (state / "server.pem").write_bytes((state / "authority.pem").read_bytes()[:-100])
    (state / "jobs.sqlite").unlink()
    (state / "fleet.head").write_bytes(b"")
    (state / "audit.log").write_bytes(b"")
    shown = CliRunner().invoke(server, ["verify", str(state)])
    assert shown.exit_code == 1
    names = ("server.pem", "fleet.head", "jobs.sqlite", "audit.log")
    *damaged, ledgers = shown.output.splitlines()
    assert ledgers == "intact   privacy ledgers of populations"
    for line, name in zip(damaged, names, strict=True):
        assert line.startswith("damaged ")
        assert name in line
