"""A connection that a busy server ends in the handshake is tried again, in any Python."""

import socket
import ssl
import threading

import pytest

from isthmus.errors import UserError
from isthmus.identity import joining
from isthmus.identity.proxies import Road


@pytest.mark.parametrize("error", [ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError])
async def test_a_connection_that_was_ended_is_tried_again(error, monkeypatch):
    answers = [error("it was ended"), error("it was ended"), "the certificate"]

    async def presented(road, seconds, protocols):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(joining, "presented", presented)
    monkeypatch.setattr(joining, "_FIRST_PAUSE", 0.0)
    assert await joining._presented_by(Road("localhost:1")) == "the certificate"
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
        with pytest.raises(UserError, match=r"no server can be joined at 127\.0\.0\.1"):
            await joining._presented_by(Road(f"127.0.0.1:{listener.getsockname()[1]}"))
        thread.join(20)
    assert len(calls) == 3
