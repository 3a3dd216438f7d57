"""Consoles on loopback in this process, as their commands serve them."""

import asyncio
import contextlib
import http.client
import re
import threading

from isthmus_server.read.console.serving import ConsoleListener

TOKEN = "t" * 43


@contextlib.contextmanager
def served(path, port=0):
    """A console that answers during the block."""
    listener = ConsoleListener(path, "127.0.0.1", port, token=TOKEN)
    thread = threading.Thread(target=lambda: asyncio.run(listener.serve()))
    thread.start()
    try:
        yield listener
    finally:
        listener.stop()
        thread.join(20)
        assert not thread.is_alive()


def ask(listener, path, *, cookie=TOKEN, host=None, method="GET"):
    """Status, headers and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", listener.port, timeout=30)
    headers = {"Host": host or f"127.0.0.1:{listener.port}"}
    if cookie:
        headers["Cookie"] = f"isthmus-console-{listener.port}={cookie}"
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def rows(html, part):
    """The number of rows in the body of the table in a section."""
    section = re.search(rf'<section[^>]* id="{part}".*?</section>', html, re.DOTALL)[0]
    return section.count("<tr>") - 1
