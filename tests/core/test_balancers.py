"""Addresses of servers behind balancers: what is read of them, and what is refused."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.identity.approach import Approach, _Passage, approach_to
from isthmus.identity.balancers import Balancer, host_and_port, is_behind_balancer
from isthmus.identity.membership import check_dialling
from isthmus.identity.proxies import road_to

ADDRESSES = {
    "wss://fleet.example.org": ("fleet.example.org", 443, "/"),
    "wss://fleet.example.org/": ("fleet.example.org", 443, "/"),
    "wss://fleet.example.org:443/a": ("fleet.example.org", 443, "/a"),
    "WSS://Fleet.Example.org/A": ("Fleet.Example.org", 443, "/A"),
    "wss://192.0.2.7:8443/a/b?c=d&e=%20": ("192.0.2.7", 8443, "/a/b?c=d&e=%20"),
    "wss://[2001:db8::7]": ("[2001:db8::7]", 443, "/"),
    "wss://[2001:db8::7]:8443/@a": ("[2001:db8::7]", 8443, "/@a"),
}


@pytest.mark.parametrize("url", ADDRESSES)
def test_an_address_has_a_host_a_port_and_a_path(url):
    assert is_behind_balancer(url)
    found = Balancer.at(url)
    assert (found.host, found.port, found.path) == ADDRESSES[url]
    assert host_and_port(url) == ADDRESSES[url][:2]
    assert Balancer.at(found.url) == found


REFUSED = (
    "wss://",
    "wss:///isthmus",
    "wss://fleet.example.org:/isthmus",
    "wss://fleet.example.org:0/isthmus",
    "wss://fleet.example.org:70000/isthmus",
    "wss://fleet.example.org?a",
    "wss://fleet.example.org/a b",
    "wss://fleet.example.org/a#b",
    "wss://fleet.example.org/ä",
    "wss://fleet.example.org/a\r\nHost: b",
    "wss://2001:db8::7/isthmus",
    "wss://[fe80::1%eth0]/isthmus",
    "wss://fleet..example.org\n/",
    f"wss://fleet.example.org/{'a' * 1024}",
)


@pytest.mark.parametrize("url", REFUSED)
def test_another_form_is_refused(url):
    with pytest.raises(UserError, match="not of the form wss://HOST/PATH or wss://HOST:PORT/PATH"):
        Balancer.at(url)


def test_a_password_in_an_address_is_refused_and_not_repeated():
    with pytest.raises(UserError, match="has a user name or a password") as caught:
        host_and_port("wss://ward:blue-chair@fleet.example.org/isthmus")
    assert "blue-chair" not in str(caught.value)


@pytest.mark.parametrize("url", ["ws://fleet.example.org/a", "https://fleet.example.org"])
def test_another_scheme_is_refused(url):
    with pytest.raises(UserError, match="or wss://HOST/PATH for a server behind a balancer"):
        host_and_port(url)


def test_nobody_dials_a_balancer_without_a_certificate():
    """On this machine, either: without one the connection would be in plain."""
    with pytest.raises(UserError, match="requires a certificate; join it first"):
        check_dialling("wss://localhost/isthmus", "client", "phone-0", None)


@contextlib.contextmanager
def no_further_files():
    """Let this process open no file or connection during the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (last, hard))
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class _Watched(socket.socket):
    """A connection of gRPC, which notes what is known of the road when it is closed."""

    def close(self):
        self.known = self.known or str(self.approach.blocked)
        super().close()


def test_what_is_in_the_way_is_known_before_the_connection_is_closed(tmp_path):
    """Or a password that a proxy refuses was tried once more."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        road = road_to(f"wss://127.0.0.1:{port}/isthmus")
        found = Approach(road, "")
        passage = _Passage(found, str(tmp_path / "socket"))
        near = _Watched(socket.AF_UNIX)
        near.approach = found
        near.known = ""
        passage._loop.run_until_complete(passage._pass_on(near))
        assert "cannot be reached: Connection refused" in near.known
        with passage:
            pass


def wait_until_blocked(approach, words):
    end = time.monotonic() + 60
    while words not in str(approach.blocked):
        assert time.monotonic() < end, approach.blocked
        time.sleep(0.005)  # another thread notes it, which can only be polled


def test_a_machine_without_further_files_says_so_and_goes_on():
    road = road_to("wss://localhost:1/isthmus")
    with approach_to(road) as approach, socket.socket(socket.AF_UNIX) as dialling:
        with no_further_files():
            dialling.connect(approach.target.removeprefix("unix:"))
            wait_until_blocked(approach, "opens no further connection: Too many open files")
        wait_until_blocked(approach, "cannot be reached: Connection refused")


ENDS_IN_A_LOOK_UP = """
import socket, threading
from isthmus.identity.approach import approach_to
from isthmus.identity.proxies import road_to

begun = threading.Event()

def unanswered(*_, **__):
    begun.set()
    threading.Event().wait()

socket.getaddrinfo = unanswered
with approach_to(road_to("wss://fleet.example.org")) as approach:
    dialling = socket.socket(socket.AF_UNIX)
    dialling.connect(approach.target.removeprefix("unix:"))
    assert begun.wait(60)
print("ended")
"""


def test_a_process_ends_while_a_name_server_does_not_answer():
    command = [sys.executable, "-c", ENDS_IN_A_LOOK_UP]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (found.stdout, found.stderr, found.returncode) == ("ended\n", "", 0)
