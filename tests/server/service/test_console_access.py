"""The console of a server: on loopback with a token, elsewhere for operators only, over TLS."""

import asyncio
import http.client
import ssl

import pytest
from tests.server.read.console.serving import ask

from isthmus.identity import tls
from isthmus_server.fleet.callers import OperatorsOnly
from isthmus_server.read.console.access import kept_token
from isthmus_server.read.console.serving import ConsoleListener
from isthmus_server.service.operator_service import ObservedServer
from isthmus_server.transport.event_loop import LoopObserver


def read(port, authority, member=None):
    """Status and text of an answer to a caller with or without a certificate."""
    context = ssl.create_default_context(cadata=tls.pem(authority).decode())
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    if member is not None:
        context.load_cert_chain(member.directory / "credentials.pem")
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=30.0, context=context)
    try:
        connection.request("GET", "/devices")
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


async def test_only_operators_read_the_console_from_other_machines(fleet):
    await fleet.listen(queue=True)
    operator = await fleet.member("alice", kind="operator")
    device = await fleet.member("phone-0")
    served = ObservedServer(fleet.server, fleet.runner)
    check = OperatorsOnly(served.pair, served.authority, LoopObserver(), served.registered)
    state = fleet.server.members.directory
    authority = fleet.server.members.authority_certificate
    listener = ConsoleListener(state, "0.0.0.0", 0, token="", check=check)
    async with listener.serving():

        async def visit(*member):
            return await asyncio.to_thread(read, listener.port, authority, *member)

        status, page = await visit(operator)
        assert status == 200
        assert "phone-0" in page
        assert (await visit(device))[0] == 403
        with pytest.raises(OSError, match=r"certificate required|closed|EOF|reset"):
            await visit()
        fleet.registry().revoke("alice")
        assert (await visit(operator))[0] == 403


async def test_a_server_shows_its_jobs_to_its_own_user(fleet, make_job):
    await fleet.listen(queue=True)
    state = fleet.server.members.directory
    fleet.runner.queue.submit(make_job(), "alice", "key")
    token = kept_token(state)
    listener = ConsoleListener(state, "127.0.0.1", 0, token=token)
    async with listener.serving():
        status, _, page = await asyncio.to_thread(ask, listener, "/", cookie=token)
        assert status == 200
        assert "alice" in page
        assert "queued" in page or "running" in page or "paused" in page
        assert (await asyncio.to_thread(ask, listener, "/", cookie="x"))[0] == 403
