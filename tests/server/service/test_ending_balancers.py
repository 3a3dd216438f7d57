"""A server behind the distribution's nginx, which ends TLS and forwards WebSockets."""

import asyncio
import contextlib
import logging
from pathlib import Path

import pytest
import websockets.asyncio.server
from click.testing import CliRunner
from cryptography import x509
from tests.connect_proxy import ConnectProxy
from tests.server.loopback import BreakableProxy
from tests.server.real_nginx import ending_tls
from tests.server.scripted_participant import (
    ScriptedParticipant,
    payload_of,
    replying,
    training_request,
)
from tests.server.service.conftest import Fleet
from tests.server.waiting import wait_until

from isthmus.doctor.checks import server_reached
from isthmus.errors import AdmissionRefused, IsthmusError, UserError
from isthmus.identity import joining, tls
from isthmus.identity.membership import Membership
from isthmus.identity.obstacles import obstacle, presented
from isthmus.identity.proxies import ProxyChoice, road_to
from isthmus.system.sealed_files import read_sealed, write_sealed
from isthmus.transport.blobs import describe, into
from isthmus.wire import link_pb2
from isthmus.wire import operator_pb2 as pb
from isthmus_server.cli.operators import OperatorClient, jobs
from isthmus_server.service.server import BalancerListener
from isthmus_server.transport.balancer_port import network_named


class BalancedFleet(Fleet):
    """A fleet whose participants know the balancer's address only."""

    one_port = True
    balancer = BalancerListener("127.0.0.1", 0, (network_named("127.0.0.1"),))
    choice = ProxyChoice()

    async def member(self, name, kind="client"):
        token = self.token(name, kind)
        return await joining.join(self.url, token, self.folder / name, kind, self.choice)


@contextlib.asynccontextmanager
async def balanced(folder, changes=None, balancer=BalancedFleet.balancer):
    fleet = BalancedFleet(folder)
    fleet.balancer = balancer
    await fleet.listen(queue=True)
    try:
        async with ending_tls(fleet.server.balancer_port, folder, changes=changes) as (url, ca):
            fleet.url = fleet.address = url
            fleet.choice = ProxyChoice.given(None, None, ca)
            yield fleet
            for participant in fleet.connections:
                participant.cancel()
            await asyncio.gather(*fleet.connections, return_exceptions=True)
    finally:
        await fleet.close()


@pytest.fixture
async def behind(tmp_path):
    async with balanced(tmp_path) as fleet:
        yield fleet


@pytest.fixture
async def proxied(behind, monkeypatch):
    """The same, with a proxy that one has to give."""
    async with ConnectProxy({"localhost": "127.0.0.1"}) as proxy:
        behind.proxy = proxy
        ca = behind.choice.balancer_ca
        behind.choice = ProxyChoice.given(proxy.url, None, Path(ca))
        yield behind


async def test_a_device_gets_through_a_proxy_and_then_the_balancer(proxied, caplog):
    caplog.set_level(logging.INFO)
    member = await proxied.member("phone-0")
    place = proxied.url.split("/")[2]
    worker = ScriptedParticipant(replying(examples=5))
    connection = proxied.dial(member, worker)
    await wait_until(lambda: "phone-0" in proxied.link.peers)
    assert (await proxied.link.ask("phone-0", training_request(proxied.link))).trained.examples == 5
    assert {head.split()[1] for head in proxied.proxy.requests} == {place}
    road = f"connections to {proxied.url} go through the proxy {proxied.proxy.url}"
    way = f"in a WebSocket through the balancer {place}"
    assert f"{road} (--proxy), {way}" in caplog.messages
    assert f"{road} (--proxy when it joined), {way}" in caplog.messages
    proxied.proxy.status = "403 Forbidden"
    proxied.proxy.break_tunnels()
    refused = f"the proxy {proxied.proxy.url} refuses connections to {place} (403 Forbidden)"
    await wait_until(lambda: f"no link to {proxied.url} through the proxy" in caplog.text)
    await wait_until(lambda: refused in caplog.text)
    proxied.proxy.status = "200 Connection established"
    proxied.proxy.raw_answer = b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n"
    blocked = str(await obstacle(member.road(), member.authority))
    assert blocked.startswith(f"the proxy {proxied.proxy.url} answers with more than 128 lines")
    connection.cancel()


async def test_a_transfer_goes_on_after_the_balancer_has_ended_its_connection(tmp_path, caplog):
    """A device is told by whom, and what has arrived is not sent again."""
    caplog.set_level(logging.INFO)
    payload = payload_of(8_000_000)
    blob = describe(payload)

    async def reverse(participant, request, model):
        return link_pb2.Reply(trained=link_pb2.Trained(examples=len(model))), None

    async with balanced(tmp_path) as fleet:
        fleet.link.publish(blob, payload)
        (tmp_path / "nginx").mkdir()
        breaking = BreakableProxy(fleet.server.balancer_port)
        port = await breaking.start()
        async with ending_tls(port, tmp_path / "nginx") as (url, ca):
            fleet.url = fleet.address = url
            fleet.choice = ProxyChoice.given(None, None, ca)
            await fleet.join("phone-0", reverse)
            before = breaking.carried[-1]["down"]
            breaking.limits["down"] = before + 6_000_000
            asking = asyncio.create_task(
                fleet.link.ask("phone-0", training_request(fleet.link, blob))
            )
            await breaking.stalled.wait()
            breaking.cut()
            assert (await asking).trained.examples == len(payload)
            assert sum(each["down"] for each in breaking.carried) < 1.5 * len(payload)
            place = url.split("/")[2]
            ended = f"no link to {url}: the balancer {place} ended the connection"
            assert ended in caplog.text
            for participant in fleet.connections:
                participant.cancel()
            await asyncio.gather(*fleet.connections, return_exceptions=True)
        await breaking.stop()


async def test_a_revoked_participant_is_disconnected(behind):
    participant = await behind.join("phone-0", replying(examples=5))
    behind.registry().revoke("phone-0")
    with pytest.raises(AdmissionRefused, match="'phone-0' has been revoked"):
        await participant.connection


async def test_participants_and_operators_work_through_it(behind):
    payload = payload_of(3_000_000)
    blob = describe(payload)
    behind.link.publish(blob, payload)

    async def reverse(participant, request, model):
        result = bytearray(reversed(model))
        return link_pb2.Reply(trained=link_pb2.Trained(result=describe(result))), result

    operator = await behind.member("alice", kind="operator")
    assert Membership(operator.directory).server == behind.url
    await behind.join("phone-0", reverse)
    await behind.join("hall", replying(examples=9), kind="datacenter")
    reply = await behind.link.ask("phone-0", training_request(behind.link, blob))
    back = bytearray(reply.trained.result.size)
    await behind.link.fetch("phone-0", reply.trained.result, into(back))
    assert back == bytes(reversed(payload))
    reply = await behind.link.ask("hall", training_request(behind.link))
    assert reply.trained.examples == 9
    jobs = await asyncio.to_thread(
        lambda: OperatorClient(operator.directory).call("Jobs", pb.JobsRequest(), pb.JobsReply)
    )
    assert list(jobs.jobs) == []


ROADS = """
    location = /page { return 200 "hello"; }
    location = /moved { return 301 https://elsewhere.example.org/isthmus; }
    location = /closed { return 403; }
    location = /unset { proxy_pass http://127.0.0.1:%(server)d; }
    location = /broken { proxy_pass http://127.0.0.1:1; }
    location = /chat {
        proxy_pass http://127.0.0.1:%(chat)d;
        proxy_http_version 1.1;
        proxy_set_header Upgrade $http_upgrade;
        proxy_set_header Connection "upgrade";
    }
    location = /other {
        proxy_pass http://127.0.0.1:%(other)d;
        proxy_http_version 1.1;
        proxy_set_header Upgrade $http_upgrade;
        proxy_set_header Connection "upgrade";
    }
    location = /isthmus {
"""

FAULTS = {
    "/page": "{balancer} answers /page with a page (200 OK), so another service is there; compare "
    "the path of the address with the balancer's",
    "/nothing": "{balancer} has nothing at /nothing (404 Not Found); compare the path of the "
    "address with the balancer's",
    "/moved": "{balancer} points to https://elsewhere.example.org/isthmus (301 Moved Permanently); "
    "give that address with wss://; if it is a page to log in at, ask who runs it to let "
    "WebSockets through",
    "/closed": "{balancer} refuses /closed (403 Forbidden); ask who runs it to let WebSockets "
    "through",
    "/unset": "{balancer} does not open a WebSocket at /unset (505 HTTP Version Not Supported); it "
    "has to pass on the headers Upgrade and Connection, by HTTP/1.1, and to ask for no certificate",
    "/broken": "{balancer} does not reach the server (502 Bad Gateway); check that the server "
    "runs, and that it listens (--balancer) where the balancer forwards to",
    "/chat": "{balancer} forwards /chat to a WebSocket that is not of an Isthmus server; check the "
    "path, and that it forwards to where the server listens (--balancer)",
    "/other": "the server at {url} is of another fleet: its certificate is not of the authority "
    "that this machine has joined; check the address; at a new server join again",
}


@contextlib.asynccontextmanager
async def faulty(folder):
    """An nginx with a path for each fault, before one of two fleets and a chat."""
    other = BalancedFleet(folder / "other")
    await other.listen()

    async def chat(connection):
        async for message in connection:
            await connection.send(message)

    async with websockets.asyncio.server.serve(chat, "127.0.0.1", 0) as server:
        fleet = BalancedFleet(folder)
        await fleet.listen()
        ports = {
            "server": fleet.server.balancer_port,
            "chat": server.sockets[0].getsockname()[1],
            "other": other.server.balancer_port,
        }
        changes = {"    location = /isthmus {\n": ROADS % ports}
        try:
            async with ending_tls(ports["server"], folder, changes=changes) as (url, ca):
                fleet.url = fleet.address = url
                fleet.choice = ProxyChoice.given(None, None, ca)
                yield fleet
        finally:
            await fleet.close()
            await other.close()


async def test_who_dials_a_balancer_as_if_it_were_a_server_is_told_of_wss(behind, caplog):
    """As HOST:PORT: at a join, in the log, for an operator, and for `isthmus doctor device`."""
    caplog.set_level(logging.INFO)
    place = behind.url.split("/")[2]
    operator = await behind.member("alice", kind="operator")
    member = await behind.member("phone-0")
    sentence = (
        f"what answers at {place} does not speak TLS as a server does (tlsv1 alert no application "
        "protocol); check address and port; a balancer that ends TLS may be there: ask the "
        "operator for its address with wss://"
    )
    with pytest.raises(UserError) as caught:
        await joining.join(place, behind.token("late"), behind.folder / "late", "client")
    assert str(caught.value) == sentence
    behind.address = place
    behind.dial(member, ScriptedParticipant(replying(examples=5)))
    await wait_until(lambda: f"no link to {place}: {sentence}" in caplog.text)
    found = await asyncio.to_thread(server_reached, member, member.road(None, place))
    assert f"{found.found}; {found.remedy}" == sentence
    about = read_sealed(operator.directory / "member.json")
    write_sealed(operator.directory / "member.json", {**about, "server": place, "proxy": None})
    with pytest.raises(AdmissionRefused) as refused:
        await asyncio.to_thread(
            lambda: OperatorClient(operator.directory).call("Jobs", pb.JobsRequest(), pb.JobsReply)
        )
    assert str(refused.value) == f"the server at {place} cannot be reached: {sentence}"
    words = ["--state", str(operator.directory), "--server", behind.url]
    words += ["--balancer-ca", behind.choice.balancer_ca]
    result = await asyncio.to_thread(CliRunner().invoke, jobs, words)
    assert result.output == "nothing has been submitted yet\n"


async def test_each_fault_of_the_road_has_its_sentence(tmp_path, caplog):
    (tmp_path / "other").mkdir()
    async with faulty(tmp_path) as fleet:
        member = await fleet.member("phone-0")
        balancer = f"the balancer {fleet.url.split('/')[2]}"
        for path, sentence in FAULTS.items():
            url = fleet.url.replace("/isthmus", path)
            blocked = await obstacle(road_to(url, fleet.choice), member.authority)
            assert str(blocked) == sentence.format(balancer=balancer, url=url)
        assert await obstacle(road_to(fleet.url, fleet.choice), member.authority) is None

        # Joining and the link say the same.
        token = fleet.token("phone-1")
        for path, error in (("/nothing", "has nothing at /nothing"), ("/other", "is not the one")):
            url = fleet.url.replace("/isthmus", path)
            with pytest.raises(IsthmusError, match=error):
                await joining.join(url, token, fleet.folder / "phone-1", "client", fleet.choice)
        caplog.set_level(logging.INFO)
        for path in ("/broken", "/other"):
            fleet.address = fleet.url.replace("/isthmus", path)
            sentence = FAULTS[path].format(balancer=balancer, url=fleet.address)
            task = fleet.dial(member, ScriptedParticipant(replying(examples=5)))
            await wait_until(
                lambda said=f"no link to {fleet.address}: {sentence}": said in caplog.text
            )
            task.cancel()

        unknown = await obstacle(road_to(fleet.url), member.authority)
        assert str(unknown) == (
            f"the certificate of {balancer} does not pass: unable to get local issuer certificate; "
            "check the address; if an authority of your organisation has issued it, give that "
            "with --balancer-ca FILE"
        )
        elsewhere = fleet.url.replace("localhost", "127.0.0.1")
        wrong = str(await obstacle(road_to(elsewhere, fleet.choice), member.authority))
        assert "IP address mismatch" in wrong


async def test_certificates_are_renewed_through_the_balancer(behind, monkeypatch):
    """A device's own over its connection, and the server's for the connections after it."""
    monkeypatch.setattr("isthmus.identity.membership.RENEW_AT", 0.4)  # half of it is over
    monkeypatch.setattr("isthmus_server.service.server._RENEWAL_SECONDS", 0.01)
    member = await behind.member("phone-0")
    before = member.certificate
    key = member.key
    behind.dial(member, ScriptedParticipant(replying(examples=5)), proxy=behind.choice)
    await wait_until(lambda: member.certificate is not before)
    assert member.key is not key
    peer = behind.link.peers["phone-0"]
    await wait_until(lambda: peer.subject == tls.subject_of(member.certificate))
    stream = peer.stream
    served = behind.server.pair
    authority = behind.server.members.certificate_authority
    names = tls.read_certificate(served[1]).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    authority.renew_server(names.value)
    await wait_until(lambda: behind.server.pair != served)
    assert (await behind.link.ask("phone-0", training_request(behind.link))).trained.examples == 5
    assert peer.stream is stream
    # Those that dial from now on are shown the new one, and accept it.
    shown = await presented(road_to(behind.url, behind.choice))
    assert shown == tls.read_certificate(behind.server.pair[1]) != tls.read_certificate(served[1])
    other = await behind.member("phone-1")
    behind.dial(other, ScriptedParticipant(replying(examples=7)), proxy=behind.choice)
    await wait_until(lambda: "phone-1" in behind.link.peers)
