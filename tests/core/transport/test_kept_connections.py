"""A kept HTTPS connection: used again, replaced, and never one with something left to read."""

import asyncio
import contextlib
import socket
import ssl
import time
import urllib.error
import urllib.request

import pytest
from tests.connect_proxy import ConnectProxy
from tests.server.scripted_participant import payload_of
from tests.static_https import static_https

from isthmus.transport import kept_connections, timely_answers
from isthmus.transport.https_source import HttpsSource
from isthmus.transport.kept_connections import KeptConnection

SIZE = 100_003


@pytest.fixture
def web(tmp_path, monkeypatch):
    """A web server with a file."""
    folder = tmp_path / "www"
    folder.mkdir()
    (folder / "file").write_bytes(payload_of(SIZE))
    with static_https(folder, tmp_path / "keys") as served:
        monkeypatch.setenv("SSL_CERT_FILE", str(served.certificate))
        yield served


class Kept(KeptConnection):
    """Notes the connections that are kept."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def keep(self, host, connection):
        self.noted.append(connection)
        super().keep(host, connection)


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def source(web, kept):
    return HttpsSource(f"{web.address.removeprefix('https:')}file", {"a": "file"}, kept=kept)


def read(source):
    with source.open("a", SIZE, 0) as stream:
        return b"".join(iter(lambda: stream.read1(SIZE), b""))


def pem(web):
    return web.certificate.read_bytes()


def test_a_connection_is_used_again_after_its_answer_was_read(source, kept):
    for _ in range(3):
        assert read(source) == payload_of(SIZE)
    assert len(kept.noted) == 3
    assert len(set(kept.noted)) == 1


def test_a_connection_with_something_left_to_read_is_closed(source, kept):
    with source.open("a", SIZE, 0) as stream:
        assert stream.read(10) == payload_of(SIZE)[:10]
    assert kept.noted == []
    assert read(source) == payload_of(SIZE)


def test_one_that_the_server_has_ended_is_replaced(source, kept, web):
    assert read(source) == payload_of(SIZE)
    [first] = kept.noted
    first.sock.shutdown(2)
    assert read(source) == payload_of(SIZE)
    assert len(set(kept.noted)) == 2
    assert first.sock is None


def test_one_that_was_idle_for_too_long_is_not_used_again(source, kept, monkeypatch):
    monkeypatch.setattr(kept_connections, "KEPT_SECONDS", -1.0)
    for _ in range(2):
        assert read(source) == payload_of(SIZE)
    first, second = kept.noted
    assert first is not second
    assert first.sock is None


def test_one_that_answers_nothing_is_given_up_after_a_moment(source, kept, web, monkeypatch):
    monkeypatch.setattr(kept_connections, "_AGAIN_SECONDS", 0.2)
    assert read(source) == payload_of(SIZE)
    web.forgets_next = True
    assert read(source) == payload_of(SIZE)
    assert len(set(kept.noted)) == 2


def test_a_connection_to_another_host_is_left_alone(source, kept):
    assert read(source) == payload_of(SIZE)
    assert kept.take("localhost:1") is None
    [connection] = kept.noted
    assert kept.take(connection.host + f":{connection.port}") is connection
    connection.close()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("leads_back", [False, True], ids=["to a direct host", "to the proxy"])
async def test_only_the_proxy_reads_its_login(web, tmp_path, monkeypatch, kept, keeps, leads_back):
    """Also after a redirection to a host that is reached without it."""
    with static_https(web.folder, tmp_path / "others") as other:
        (tmp_path / "trusted").write_bytes(b"".join(map(pem, (web, other))))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "trusted"))
        web.redirect = f"{other.address}file"
        async with ConnectProxy({"127.0.0.1": "127.0.0.1"}) as proxy:
            proxy.login = "device:secret"
            monkeypatch.setenv("https_proxy", proxy.url.replace("//", "//device:secret@"))
            monkeypatch.setenv("no_proxy", "" if leads_back else f"127.0.0.1:{other.port}")
            target = f"{web.address.removeprefix('https:')}file"
            source = HttpsSource(target, {"a": "file"}, kept=kept if keeps else None)
            assert await asyncio.to_thread(read, source) == payload_of(SIZE)
            assert len(proxy.requests) == (2 if leads_back else 1)
        for headers in (*web.headers, *other.headers):
            assert "authorization" not in " ".join(headers).lower()


@pytest.mark.parametrize("keeps", [True, False])
def test_nothing_is_read_of_what_comes_with_a_redirection(web, kept, keeps):
    web.redirect = f"{web.address}file"
    web.redirects_at_length = True
    name = web.address.removeprefix("https:") + "other"
    source = HttpsSource(name, {"a": "other"}, kept=kept if keeps else None)
    # It leads to another one, until there were too many.
    with pytest.raises(OSError, match="would lead to an infinite loop"):
        source.open("a", SIZE, 0)
    # Less than what fits into the buffers between both.
    assert web.redirect_bytes < 64 << 20
    assert kept.noted == []


def test_a_proxy_has_connections_of_its_own(source, kept, monkeypatch):
    asked = []
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr(
        urllib.request.HTTPSHandler, "https_open", lambda self, request: asked.append(request.host)
    )
    through = HttpsSource("//127.0.0.2/file", {"a": "file"}, kept=kept)
    with pytest.raises(OSError, match="unknown url type"):  # what a handler without an answer is
        through.open("a", SIZE, 0)
    assert asked == ["127.0.0.1:9"]


def test_requests_other_than_get_have_connections_of_their_own(web, kept):
    """One on a kept connection would be sent twice if the server has ended that."""
    handler = kept_connections.KeepingHandler(ssl.create_default_context(), kept)
    opener = urllib.request.build_opener(handler)
    for method, data in (("POST", b"update"), ("HEAD", None)):
        request = urllib.request.Request(f"{web.address}file", data=data, method=method)
        # The server of tests has neither.
        with pytest.raises(urllib.error.HTTPError, match="Unsupported method"):
            opener.open(request)
    assert kept.noted == []


@pytest.fixture
def silent():
    """An address where nobody answers a connection: the queue of its listener is full."""
    with socket.socket() as listener, contextlib.ExitStack() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield listener.getsockname()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("answers", [False, True])
def test_the_addresses_of_a_name_share_one_limit(web, kept, keeps, answers, silent, monkeypatch):
    """Else a name with thousands of them would hold a device for a day."""
    monkeypatch.setattr(timely_answers, "CONNECTION_SECONDS", 1.0)
    places = [silent] * (2 if answers else 2000)
    if answers:
        places.append(("127.0.0.1", web.port))
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    target = f"{web.address.removeprefix('https:')}file"
    source = HttpsSource(target, {"a": "file"}, kept=kept if keeps else None)
    began = time.monotonic()
    if answers:
        assert read(source) == payload_of(SIZE)
    else:
        with pytest.raises(OSError, match="cannot be reached: "):
            read(source)
    assert time.monotonic() - began < 10
