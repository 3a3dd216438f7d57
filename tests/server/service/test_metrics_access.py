"""Metrics at an address that other machines reach: operators only, over TLS."""

import asyncio
import io
import ssl
import urllib.error
import urllib.request

import pytest
from rich.console import Console
from tests.server.waiting import wait_until

from isthmus.identity import tls
from isthmus_server.observability.listener import MetricsListener
from isthmus_server.observability.metrics import RunMetrics
from isthmus_server.observability.observers import Observers
from isthmus_server.service.operator_service import ObservedServer


def read(url, authority, member=None):
    """Status and text of an answer to a caller with or without a certificate."""
    context = ssl.create_default_context(cadata=tls.pem(authority).decode())
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    if member is not None:
        context.load_cert_chain(member.directory / "credentials.pem")
    try:
        with urllib.request.urlopen(url, timeout=30.0, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_only_operators_read_metrics_from_other_machines(fleet, caplog):
    await fleet.listen(queue=True)
    operator = await fleet.member("alice", kind="operator")
    device = await fleet.member("phone-0")
    listener = MetricsListener("0.0.0.0", 0, RunMetrics(), certified=True)
    observers = Observers(Console(file=io.StringIO()), metrics=listener)
    authority = fleet.server.members.authority_certificate
    async with observers.serving(ObservedServer(fleet.server, fleet.runner)):
        address = f"https://127.0.0.1:{listener.port}"

        async def ask(path, *member):
            return await asyncio.to_thread(read, address + path, authority, *member)

        status, text = await ask("/metrics", operator)
        assert status == 200
        assert "isthmus_link_lag_seconds" in text
        assert await ask("/readyz", operator) == (200, "ready\n")
        fleet.runner.queue.close()
        status, text = await ask("/readyz", operator)
        assert status == 503
        assert "the queue of jobs cannot be read" in text
        assert (await ask("/metrics", operator))[0] == 200
        for stranger in ((), (device,), (device,)):
            with pytest.raises(OSError, match=r"certificate required|closed|EOF|reset|Broken pipe"):
                await ask("/metrics", *stranger)
        await wait_until(lambda: "'phone-0' is a client, not an operator" in caplog.text)
        assert caplog.text.count("is a client") == 1
        fleet.registry().revoke("alice")
        with pytest.raises(OSError, match=r"closed|EOF|reset"):
            await ask("/metrics", operator)
        await wait_until(lambda: "'alice' has been revoked" in caplog.text)
