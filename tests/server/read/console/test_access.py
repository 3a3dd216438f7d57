"""Who may read a console, what its answers allow a browser, and its vendored files."""

import asyncio
import contextlib
import hashlib
import re
import socket
from pathlib import Path

import pytest
from tests.server.read.console.serving import TOKEN, ask, served

from isthmus.errors import UserError
from isthmus_server.read import console
from isthmus_server.read.console import live, serving
from isthmus_server.read.console.access import kept_token
from isthmus_server.read.console.live import LiveUpdates
from isthmus_server.read.console.serving import ConsoleListener
from isthmus_server.storage.store import Store

STATIC = Path(console.__file__).with_name("static")
UPLOT = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"


@pytest.fixture
def run(make_job, tmp_path):
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    yield store.directory
    store.close()


def test_a_console_on_loopback_wants_its_token(run):
    with served(run) as listener:
        for cookie in ("", "x", TOKEN[:-1], "\xff"):
            for path in ("/", "/runs/run", "/static/console.js", "/events", "/?token=x"):
                assert ask(listener, path, cookie=cookie)[0] == 403
        status, headers, text = ask(listener, f"/runs/run?page=2&token={TOKEN}", cookie="")
        assert (status, headers["location"], text) == (303, "/runs/run?page=2", "")
        cookie = headers["set-cookie"]
        assert f"isthmus-console-{listener.port}={TOKEN}" in cookie
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        location = ask(listener, f"//evil.example/?token={TOKEN}", cookie="")[1]["location"]
        assert location == "/evil.example/"
        status, headers, text = ask(listener, "/runs/run")
        assert status == 200
        assert TOKEN not in text
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert not re.search(r"<script(?![^>]*\bsrc=)|\bon\w+=|\bstyle=|javascript:", text)
        for host in ("evil.example", f"evil.example:{listener.port}", "127.0.0.1.evil.example"):
            assert ask(listener, "/", host=host)[0] == 421
        assert ask(listener, "/", host=f"localhost:{listener.port}")[0] == 303
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(listener, "/runs/run", method=method)[0] == 405
        assert ask(listener, "/static/../commands.py")[0] == 404


def test_a_console_without_a_way_to_know_callers_stays_on_loopback(run):
    with pytest.raises(UserError, match=r"^--console 0.0.0.0:0 is not loopback, and others could"):
        ConsoleListener(run, "0.0.0.0", 0, token=TOKEN)
    with served(run) as listener, pytest.raises(UserError, match="cannot be used"):
        ConsoleListener(run, "127.0.0.1", listener.port, token=TOKEN)


def test_the_token_is_kept_for_this_user_alone(tmp_path):
    token = kept_token(tmp_path / "state")
    assert kept_token(tmp_path / "state") == token
    assert len(token) >= 43
    file = tmp_path / "state" / "console.token"
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(UserError):
        kept_token(tmp_path / "state")


async def test_browsers_share_one_poller_and_streams_are_bounded(monkeypatch):
    monkeypatch.setattr(live, "POLL_SECONDS", 0.001)
    versions = iter(range(1, 10_000))
    seen = asyncio.Event()

    async def read(name):
        assert name == "run"
        version = next(versions)
        if version > 5:
            seen.set()
        return str(min(version, 5))

    updates = LiveUpdates(read)
    streams = [updates.stream("run") for _ in range(3)]
    for stream in streams:
        assert await anext(stream) == "retry: 1000\n\n"
        assert (await anext(stream)).startswith("id: ")
    assert updates.streams == 3
    assert not updates.full
    await seen.wait()
    polls = [task for task in asyncio.all_tasks() if "LiveUpdates._poll" in repr(task.get_coro())]
    assert len(polls) == 1
    monkeypatch.setattr(live, "MAX_STREAMS", 3)
    assert updates.full
    for stream in streams:
        await stream.aclose()
    assert updates.streams == 0
    await asyncio.gather(*polls, return_exceptions=True)
    assert polls[0].cancelled()


def luminance(colour):
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_all_text_has_the_contrast_of_wcag_aa(theme):
    style = (STATIC / "console.css").read_text()
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[theme]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    texts = ("text", "soft", "link", "rejected", "dropped", "datacenter", "federated", "late")
    for text in (*texts, "hybrid"):
        for ground in ("panel", "mark") if text in ("text", "soft", "link") else ("panel",):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        if text in ("text", "soft"):
            assert contrast(colours[text], colours["back"]) >= 4.5, text


def test_uplot_is_the_published_file_with_its_licence():
    script = (STATIC / "uplot" / "uPlot.iife.min.js").read_bytes()
    assert hashlib.sha256(script).hexdigest() == UPLOT
    assert b"v1.6.32" in script[:200]
    assert "MIT License" in (STATIC / "uplot" / "LICENSE").read_text()


def test_who_holds_all_connections_keeps_nobody_out(run, monkeypatch):
    # Connections of the same address are idle at once.
    monkeypatch.setattr(serving, "_IDLE_SECONDS", 0.0)
    with served(run) as listener, contextlib.ExitStack() as held:
        for _ in range(serving.MAX_CONNECTIONS + 40):
            address = ("127.0.0.1", listener.port)
            held.enter_context(socket.create_connection(address, timeout=10))
        for _ in range(3):
            assert ask(listener, "/runs/run")[0] == 200
