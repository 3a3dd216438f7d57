"""Balancers that answer wrongly, or stop to: each fault has its sentence, and none a traceback."""

import asyncio
import base64
import contextlib
import gc
import hashlib
import logging
import re
import ssl

import pytest
from tests.server.real_nginx import certified
from tests.server.scripted_participant import ScriptedParticipant, replying
from tests.server.service.conftest import Fleet
from tests.server.waiting import wait_until

from isthmus.doctor.checks import server_reached
from isthmus.identity.obstacles import obstacle, presented
from isthmus.identity.proxies import ProxyChoice, RoadBlocked, road_to

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def opening(head):
    """The answer that opens the WebSocket of a request."""
    key = re.search(rb"(?i)sec-websocket-key: *(\S+)", head)[1]
    accepted = base64.b64encode(hashlib.sha1(key + _GUID).digest())
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Protocol: isthmus-tls\r\nSec-WebSocket-Accept: " + accepted + b"\r\n\r\n"
    )


class FaultyBalancer:
    """Ends TLS on loopback, and answers each request with some bytes."""

    def __init__(self, folder, days=0):
        self.folder = folder
        self.days = days
        """Between now and when its certificate is valid."""
        self.answer = b""
        """What it answers."""
        self.opens = False
        """Whether it opens the WebSocket before that."""
        self.stays = False
        """Whether it keeps the connection open after that."""
        self._tasks = set()

    async def __aenter__(self):
        self.ca, pair = certified(self.folder, ["localhost"], days=self.days)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self.place = f"localhost:{self._server.sockets[0].getsockname()[1]}"
        self.url = f"wss://{self.place}/isthmus"
        return self

    async def __aexit__(self, *_):
        # asyncio leaves a connection open that it has accepted just before its server is closed.
        for listener in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listener)
        await asyncio.sleep(0)
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def choice(self):
        return ProxyChoice.given(None, None, self.ca)

    async def _serve(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write((opening(head) if self.opens else b"") + self.answer)
            await writer.drain()
            while self.stays and await reader.read(1 << 16):
                pass
        writer.transport.abort()


@pytest.fixture
async def faulty(tmp_path):
    """A balancer, and the membership of a device whose server nobody reaches through it."""
    fleet = Fleet(tmp_path)
    fleet.one_port = True
    await fleet.listen()
    member = await fleet.member("phone-0")
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    (tmp_path / "balancer").mkdir()
    async with FaultyBalancer(tmp_path / "balancer") as balancer:
        balancer.fleet = fleet
        balancer.member = member
        yield balancer
    await fleet.close()
    gc.collect()
    assert problems == []


def status(text, more=b""):
    return b"HTTP/1.1 " + text + b"\r\n" + more + b"\r\n"


ANSWERS = {
    "a login": (
        status(b"302 Found", b"Location: https://login.example.org/\x1b[31m\r\n"),
        "{balancer} points to https://login.example.org/\\x1b[31m (302 Found); give that address "
        "with wss://; if it is a page to log in at, ask who runs it to let WebSockets through",
    ),
    "elsewhere": (status(b"307 Temporary Redirect"), "{balancer} points elsewhere (307 Temp"),
    "too many": (
        status(b"429 Too Many Requests"),
        "{balancer} lets no further connection through (429 Too Many Requests); try again later; "
        "ask who runs it to allow more",
    ),
    "an error": (
        status(b"500 Internal Server Error"),
        "{balancer} does not open a WebSocket at /isthmus (500 Internal Server Error); ask who "
        "runs it",
    ),
    "no HTTP": (
        b"220 mail.example.org ESMTP\r\n\r\n",
        "what answers at {place} is no balancer that speaks HTTP; check the address",
    ),
    "nothing": (
        b"",
        "{balancer} closed the connection without an answer; check that it forwards to where the "
        "server listens (--balancer)",
    ),
}
OPENED = {
    "nothing": (b"", "ended the connection without a goodbye"),
    "a goodbye": (b"\x88\x02\x03\xf3", "closed the WebSocket (1011)"),
    "text": (b"\x81\x05hello", "sends text, which is none of a server's"),
    "pings": (b"\x89\x00" * 2000, "sends many frames and little in them"),
    "masked frames": (b"\x82\x85aaaahello", "sends what is no WebSocket (incorrect masking)"),
    "compressed ones": (
        b"\xc2\x05hello",
        "sends what is no WebSocket (reserved bits must be 0)",
    ),
}


async def test_each_answer_has_its_sentence(faulty):
    balancer = f"the balancer {faulty.place}"
    road = road_to(faulty.url, faulty.choice)
    for answer, sentence in ANSWERS.values():
        faulty.answer = answer
        blocked = str(await obstacle(road, faulty.member.authority))
        assert blocked.startswith(sentence.format(balancer=balancer, place=faulty.place))


async def test_what_ends_an_opened_websocket_is_found(faulty):
    """A doctor does not say that the server accepts connections, and leaves none open."""
    faulty.opens = True
    road = road_to(faulty.url, faulty.choice)
    for kind, (answer, why) in OPENED.items():
        faulty.answer = answer
        faulty.stays = kind in ("text", "pings")
        blocked = await obstacle(road, faulty.member.authority)
        assert str(blocked) == f"the balancer {faulty.place} {why}"
        found = await asyncio.to_thread(server_reached, faulty.member, road)
        assert (found.level, found.found) == ("FAIL", str(blocked))
        gc.collect()


@pytest.mark.parametrize(("days", "why"), [(-9, "has expired"), (9, "is not yet valid")])
async def test_a_certificate_of_another_time_makes_one_look_at_the_clock(faulty, days, why):
    folder = faulty.folder / "later"
    folder.mkdir()
    async with FaultyBalancer(folder, days) as balancer:
        road = road_to(balancer.url, balancer.choice)
        blocked = str(await obstacle(road, faulty.member.authority))
    assert f"does not pass: certificate {why}; check this machine's clock, which is at " in blocked
    assert "--balancer-ca" not in blocked


async def test_who_is_silent_is_named(faulty, timeouts):
    faulty.stays = True
    asking = asyncio.create_task(presented(road_to(faulty.url, faulty.choice), 7.5))
    await timeouts.expire(7.5)
    silent = f"the balancer {faulty.place} did not answer in time; check that it forwards"
    with pytest.raises(RoadBlocked, match=silent):
        await asking


# On a loaded machine a connection that was given up while it was opened left its socket open.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_device_goes_on_when_its_file_of_authorities_is_gone(faulty, caplog):
    """It says so, and uses the file as soon as that is there again."""
    caplog.set_level(logging.INFO)
    faulty.answer = status(b"503 Service Unavailable")
    faulty.fleet.address = faulty.url
    worker = ScriptedParticipant(replying(examples=5))
    task = faulty.fleet.dial(faulty.member, worker, proxy=faulty.choice)
    await wait_until(lambda: "(503 Service Unavailable)" in caplog.text)
    hidden = faulty.ca.rename(faulty.folder / "hidden.pem")
    gone = f"--balancer-ca {faulty.ca} cannot be used: No such file or directory"
    await wait_until(lambda: f"no link to {faulty.url}: {gone}" in caplog.text)
    caplog.clear()
    hidden.rename(faulty.ca)
    await wait_until(lambda: "(503 Service Unavailable)" in caplog.text)
    task.cancel()
