"""A device at a server's mirror: only where its owner allows, bounded, verified and continued."""

import pytest
from tests.server.scripted_participant import payload_of
from tests.static_https import static_https

from isthmus.errors import UserError
from isthmus.transport.blob_sources import Filling
from isthmus.transport.blobs import Assembly, describe, into
from isthmus.transport.encrypted_blobs import KEY_BYTES, keystream
from isthmus.transport.mirrors import MirrorSources

SIZE = 3_000_017
KEY = bytes(range(KEY_BYTES))
NAME = "0f" * 32


@pytest.fixture
def payload():
    return payload_of(SIZE)


@pytest.fixture
def mirror(tmp_path, monkeypatch, payload):
    """A web server with an encrypted model."""
    folder = tmp_path / "www"
    folder.mkdir()
    (folder / NAME).write_bytes(keystream(KEY, 0).update(payload))
    with static_https(folder, tmp_path / "keys") as served:
        monkeypatch.setenv("SSL_CERT_FILE", str(served.certificate))
        yield served


def blob_at(payload, address, key=KEY):
    blob = describe(payload)
    blob.address = address
    blob.key = key
    return blob


def sources(*patterns):
    return MirrorSources(patterns, "server_sources in policy.toml")


async def filled(blob, source, held=b""):
    memory = bytearray(blob.size)
    assembly = Assembly(blob, into(memory))
    if held:
        memory[: len(held)] = held
        assembly.offset = len(held)
        assembly._hash.update(held)
    return await Filling(assembly, [source]).run(), memory


async def test_a_model_is_decrypted_and_continued_by_ranges(mirror, payload):
    mirror.sends = 1_000_000
    blob = blob_at(payload, mirror.address + NAME)
    found, memory = await filled(blob, sources(f"{mirror.address}*").of(blob))
    assert found.complete
    assert memory == payload
    begins = [(asked or "bytes=0-").partition("=")[2] for _, asked in mirror.asked]
    assert begins == ["0-", *(f"{n}000000-{SIZE - 1}" for n in (1, 2, 3))]


async def test_a_device_says_how_much_it_got_from_a_mirror(mirror, payload, caplog):
    caplog.set_level("INFO")
    blob = blob_at(payload, mirror.address + NAME)
    await filled(blob, sources(f"{mirror.address}*").of(blob))
    host = mirror.address.split("/")[2]
    assert f"the mirror {host} gave 3,000,017 bytes" in caplog.messages


async def test_what_is_here_of_it_is_not_asked_for(mirror, payload):
    blob = blob_at(payload, mirror.address + NAME)
    found, memory = await filled(blob, sources(f"{mirror.address}*").of(blob), payload[:12_345])
    assert found.complete
    assert memory == payload
    assert mirror.asked == [(f"/{NAME}", f"bytes=12345-{SIZE - 1}")]


@pytest.mark.parametrize("fault", ["lies", "absent", "cut", "redirects", "misleads", "key"])
async def test_what_a_mirror_does_not_have_right_is_left_to_the_link(
    mirror, payload, tmp_path, caplog, fault
):
    said = "has something else under this name"
    if fault == "lies":
        mirror.lies = True
    elif fault == "absent":
        mirror.folder = tmp_path
        said = "does not have a model; it comes from the server"
    elif fault == "cut":
        mirror.sends = 0
        said = "sends only a part; "
    elif fault == "redirects":  # such as into the network of the owner
        mirror.redirect = f"https://localhost:{mirror.port}/admin"
        said = "redirects to an address that the owner does not allow"
    elif fault == "misleads":  # such as to what a request alone changes at an allowed host
        mirror.redirect = f"{mirror.address}logout"
        said = "redirects to an address that the owner does not allow"
    key = bytes(KEY_BYTES) if fault == "key" else KEY
    blob = blob_at(payload, mirror.address + NAME, key)
    mirrors = sources(f"{mirror.address}*")
    found, _ = await filled(blob, mirrors.of(blob))
    assert (found.complete, found.offset) == (False, 0)
    assert caplog.text.count("WARNING") == 1
    assert said in caplog.text
    asked = len(mirror.asked)
    assert {path for path, _ in mirror.asked} == {f"/{NAME}"}
    # One that lied or broke off would cost each round a model.
    await filled(blob, mirrors.of(blob))
    assert (len(mirror.asked) == asked) == (fault != "absent")


@pytest.mark.parametrize("fault", ["lies", "cut", "untrusted", "away"])
async def test_a_device_says_what_follows_where_a_mirror_fails(
    mirror, payload, monkeypatch, caplog, fault
):
    if fault == "lies":
        mirror.lies = True
    elif fault == "cut":
        mirror.sends = 0
    elif fault == "untrusted":
        monkeypatch.delenv("SSL_CERT_FILE")
    blob = blob_at(payload, mirror.address + NAME)
    if fault == "away":
        blob.address = f"https://127.0.0.1:1/{NAME}"
    await filled(blob, sources("https://127.0.0.1:*/*", f"{mirror.address}*").of(blob))
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    said = record.getMessage()
    host = "127.0.0.1:1" if fault == "away" else mirror.address.split("/")[2]
    what = {
        "lies": "has something else under this name (",
        "cut": "sends only a part;",
        "untrusted": "cannot be reached: its certificate does not pass: ",
        "away": "cannot be reached: Connection refused;",
    }
    assert said.startswith(f"the mirror {host} {what[fault]}")
    assert said.endswith(
        "; models come from the server, and the mirror is left alone for 10 minutes"
    )
    assert "Err" not in said
    assert NAME not in said


@pytest.mark.parametrize(
    ("pattern", "address", "said"),
    [
        ("https://cdn.example.org/*", f"https://10.0.0.1/{NAME}", "is not allowed by server_sou"),
        ("https://cdn.example.org/*", f"https://cdn.example.org:8443/{NAME}", "is not allowed by"),
        ("https://cdn.example.org/*", f"https://cdn.example.org@10.0.0.1/{NAME}", "is not allowed"),
        (
            "https://cdn.example.org/*",
            f"https://10.0.0.1#.cdn.example.org/{NAME}",
            "is not allowed",
        ),
        ("https://cdn.example.org/a/*", f"https://cdn.example.org/a/../b/{NAME}", "is not allowed"),
        ("https://cdn.example.org/*", f"http://cdn.example.org/{NAME}", "is not allowed by"),
        ("https://cdn.example.org/*", f"file:///etc/{NAME}", "is not allowed by"),
        ("https://cdn.example.org/*", "https://cdn.example.org/logout", "is of no blob"),
        ("https://cdn.example.org/*", f"https://cdn.example.org/{NAME}/", "is of no blob"),
        ("https://cdn.example.org/*", f"https://cdn.example.org/{'a' * 5000}", "is none that can"),
    ],
)
def test_a_server_cannot_have_a_device_ask_other_addresses(pattern, address, said, caplog):
    mirrors = sources(pattern)
    blob = blob_at(b"model", address)
    for _ in range(3):
        assert mirrors.of(blob) is None
    assert caplog.text.count("models come on the link") == 1
    assert said in caplog.text


def test_without_an_owners_word_no_mirror_is_asked():
    assert sources().of(blob_at(b"model", f"https://cdn.example.org/{NAME}")) is None


def test_a_signature_is_not_in_the_log(caplog):
    blob = blob_at(b"model", f"https://cdn.example.org/{NAME}?signature=secret")
    assert sources().of(blob) is None
    source = sources("https://cdn.example.org/*").of(blob)
    assert source is not None
    assert "secret" not in caplog.text + source.named


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "https://*",
        "https://*/*",
        "https://*:443/*",
        "https://?*.*/*",
        "cdn.org/*",
        "https://*.org/*",
        "https://*-*/*",
        "https://*1*/*",
        "https://192.168.*/*",
        "https://10.0.0.?/*",
        "https://*.0.1/*",
        "https://[!x]*[!]-]/*",
        "https://*[a-z].example.org/*",
        "https://1*/*",
        "https://10.0.0.*/*",
        "https://*.1/*",
        "https://*.0x1/*",
        "https://cdn.*/*",
        "https://[f]*/*",
        "https://*[.a]/*",
        "https://[fd00::*]/*",
    ],
)
def test_a_pattern_has_to_name_a_host(pattern):
    with pytest.raises(UserError, match=r"server_sources in policy\.toml: .* has to name a host"):
        sources(pattern)


@pytest.mark.parametrize("pattern", ["https://cdn.example.org/", "https://cdn.example.org/models/"])
def test_a_pattern_of_a_folder_says_that_it_is_for_all_files(pattern):
    with pytest.raises(UserError, match=r"for all files of a folder, end it in /\*"):
        sources(pattern)


@pytest.mark.parametrize(
    ("pattern", "address"),
    [
        ("https://cdn.example.org", "https://cdn.example.org"),
        ("https://cdn-*.example.org:8443/*", f"https://cdn-1.example.org:8443/{NAME}"),
        ("https://*.example.org/*", f"https://cdn.example.org/{NAME}"),
        ("https://cdn?.example.org:*/*", f"https://cdn1.example.org:8443/{NAME}"),
        ("https://CDN.example.org/*", f"https://cdn.example.org/{NAME}"),
        ("https://mirror/*", f"https://mirror/{NAME}"),
        ("https://10.0.0.1/*", f"https://10.0.0.1/{NAME}"),
        ("https://[2001:DB8::1]/*", f"https://[2001:db8::1]/{NAME}"),
        ("https://[2001:db8::1]:8443/*", f"https://[2001:db8::1]:8443/{NAME}"),
    ],
)
def test_a_host_or_a_domain_that_a_pattern_names_is_allowed(pattern, address):
    assert sources(pattern).allows(address)


def test_an_ipv6_address_is_that_host_alone():
    mirrors = sources("https://[2001:db8::1]/*")
    for host in ("[2001:db8::2]", "[2001:db8::1]:8443", "2", "b"):
        assert not mirrors.allows(f"https://{host}/{NAME}")
