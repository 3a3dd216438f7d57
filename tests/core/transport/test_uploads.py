"""A device at a server's store: only where its owner allows, encrypted, bounded and tried again."""

import asyncio
import threading

import pytest
from tests.connect_proxy import ConnectProxy
from tests.server.scripted_participant import payload_of
from tests.server.waiting import wait_until
from tests.static_https import static_https

from isthmus.errors import UserError
from isthmus.transport import blob_sources
from isthmus.transport.blobs import describe
from isthmus.transport.encrypted_blobs import KEY_BYTES, keystream
from isthmus.transport.uploads import UploadAddresses

SIZE = 3_000_017
KEY = bytes(range(KEY_BYTES))
NAME = "0f" * 32


@pytest.fixture
def payload():
    return payload_of(SIZE)


@pytest.fixture
def web(tmp_path, monkeypatch):
    """A web server that takes files."""
    (tmp_path / "www").mkdir()
    with static_https(tmp_path / "www", tmp_path / "keys") as served:
        monkeypatch.setenv("SSL_CERT_FILE", str(served.certificate))
        yield served


def addresses(*patterns):
    return UploadAddresses(patterns, "server_uploads in policy.toml")


def blob_at(payload, address):
    blob = describe(payload)
    blob.address = address
    blob.key = KEY
    return blob


def upload(web, payload, query="?X-Amz-Signature=secret"):
    blob = blob_at(payload, f"{web.address}{NAME}{query}")
    return addresses(f"{web.address}*").of(blob, payload)


async def test_an_update_is_put_there_encrypted_with_its_size(web, payload, caplog):
    told = []
    sending = upload(web, payload)
    assert await sending.run(told.append)
    assert sending.is_stored
    stored = (web.folder / NAME).read_bytes()
    assert payload[:32] not in stored
    assert keystream(KEY, 0).update(stored) == payload
    assert web.put == [(f"/{NAME}?X-Amz-Signature=secret", str(SIZE))]
    assert told[-1:] in ([], [SIZE])
    assert "secret" not in caplog.text


async def test_an_update_goes_through_the_proxy_of_the_environment(web, payload, monkeypatch):
    async with ConnectProxy({"127.0.0.1": "127.0.0.1"}) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert await upload(web, payload).run(lambda sent: None)
        (request,) = proxy.requests
        assert request.startswith(f"CONNECT 127.0.0.1:{web.port} ")
        assert "Signature" not in request
    assert keystream(KEY, 0).update((web.folder / NAME).read_bytes()) == payload


async def test_a_connection_that_breaks_is_tried_again(web, payload):
    web.takes = [1_000_000, 2_000_000]
    assert await upload(web, payload).run(lambda sent: None)
    assert len(web.put) == 3
    assert keystream(KEY, 0).update((web.folder / NAME).read_bytes()) == payload


@pytest.mark.parametrize(
    ("fault", "said", "tries"),
    [
        ("breaks", "it cannot be reached", 3),
        ("refuses", "it answers 403", 1),
        ("fails", "it answers 503", 3),
        ("redirects", "it answers 307", 3),
        ("hangs", "it took too little for 0.3 s", 1),
    ],
)
async def test_what_a_store_does_not_take_goes_over_the_link(
    web, payload, monkeypatch, caplog, fault, said, tries
):
    if fault == "breaks":
        web.takes = [0, 0, 0]
    elif fault == "hangs":
        monkeypatch.setattr(blob_sources, "SILENT_SECONDS", 0.3)
        web.gate = threading.Event()
    else:
        web.status = {"refuses": 403, "fails": 503, "redirects": 307}[fault]
    sending = upload(web, payload)
    assert not await sending.run(lambda sent: None)
    assert sending.is_stored is False
    assert caplog.text.count("WARNING") == 1
    assert said in caplog.text
    assert "the update goes over the link" in caplog.text
    assert "secret" not in caplog.text
    assert NAME not in caplog.text
    assert len(web.put) == tries
    # One that failed would cost each round an update.
    blob = blob_at(payload, f"{web.address}{NAME}")
    assert sending._addresses.of(blob, payload) is None


async def test_nothing_is_read_of_an_update_that_is_not_wanted_any_more(web, payload, caplog):
    web.gate = threading.Event()
    sending = upload(web, payload)
    running = asyncio.create_task(sending.run(lambda sent: None))
    await wait_until(lambda: web.put)
    sending.abandon()
    web.gate.set()
    assert not await running
    assert not sending._addresses.rest.lasts
    assert caplog.text.count("WARNING") == 0


@pytest.mark.parametrize(
    ("pattern", "address", "said"),
    [
        ("https://store.example.org/*", f"https://10.0.0.1/{NAME}", "is not allowed by server_upl"),
        ("https://store.example.org/*", f"http://store.example.org/{NAME}", "is not allowed by"),
        ("https://store.example.org/*", "https://store.example.org/logout", "is of no blob"),
        ("https://store.example.org/*", f"https://store.example.org/{'a' * 5000}", "is none that"),
    ],
)
def test_a_server_cannot_have_a_device_send_elsewhere(pattern, address, said, caplog, payload):
    allowed = addresses(pattern)
    for _ in range(3):
        assert allowed.of(blob_at(payload, f"{address}?secret"), payload) is None
    assert caplog.text.count("updates go over the link: the server's store") == 1
    assert said in caplog.text
    assert "secret" not in caplog.text


def test_a_pattern_has_to_name_a_host():
    with pytest.raises(UserError, match=r"server_uploads in policy\.toml: .* has to name a host"):
        addresses("https://*")
