"""A connection that a busy server ends in the handshake is tried again, in any Python."""

import contextlib
import socket
import ssl
import threading

import pytest

from isthmus.errors import AdmissionRefused
from isthmus.identity import join_channel, joining
from isthmus.identity.proxies import Road


@pytest.mark.parametrize("error", [ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError])
async def test_a_connection_that_was_ended_is_tried_again(error, monkeypatch):
    answers = [error("it was ended"), error("it was ended"), AdmissionRefused("there it is")]

    @contextlib.asynccontextmanager
    async def opened(road, context, seconds):
        raise answers.pop(0)
        yield

    monkeypatch.setattr(join_channel, "opened", opened)
    monkeypatch.setattr(joining, "_FIRST_PAUSE", 0.0)
    with pytest.raises(AdmissionRefused, match="there it is"):
        await joining._call(Road("localhost:1"), None, joining.AUTHORITY, b"")
    assert not answers


async def test_what_this_python_says_of_it_is_such_an_error(monkeypatch):
    """A server that closes each connection at once, after it has read the first message."""
    monkeypatch.setattr(joining, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(joining, "_TRIES", 3)
    calls = []

    def serve(listener):
        for _ in range(3):
            connection, _ = listener.accept()
            calls.append(len(connection.recv(1 << 16)))
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        road = Road(f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(AdmissionRefused, match=r"no server accepts joins at 127\.0\.0\.1"):
            await joining._call(road, join_channel.trusting(None), joining.AUTHORITY, b"")
        thread.join(20)
    assert len(calls) == 3
