"""Several hosts on one machine: Linux network namespaces on a bridge, connected by slow cables.

    with Network({"server": "10.77.0.1/24", "phone": "10.77.0.2/24"}) as network:
        network.run("phone", ["ip", "address"])

Each host has its own interface, and the addresses exist only in these namespaces. A kernel token
bucket (tc tbf) limits the rate into and out of a host. This program implements the cables with
delay and loss: it forwards every frame between the host's end (a TAP device) and the bridge's end,
or drops it. Linux has netem for that, but not every kernel includes it.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DELAY = 0.01
"""Delay of one cable in seconds; the path between two hosts has two cables."""
LOSS = 0.01
"""Fraction of frames that one cable loses."""
RATE = 20e6
"""Bits per second into and out of a host."""

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x0002 | 0x1000
_QUEUE = "latency 500ms"


_PROBE = f"""
set -e
ip link add bridge type bridge
ip tuntap add dev cable mode tap
tc qdisc add dev cable root tbf rate 1mbit burst 16kb {_QUEUE}
"""
_SEPARATE = ("unshare", "--user", "--map-root-user", "--net")


def missing() -> str:
    """Why no such network can be built here, and what to do about it; empty if one can."""
    for program, package in {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}.items():
        if shutil.which(program) is None:
            return f"there is no {program}; install {package}"
    tried = subprocess.run([*_SEPARATE, "sh", "-c", _PROBE], capture_output=True, text=True)
    if tried.returncode == 0:
        return ""
    error = " ".join(tried.stderr.split())
    return (
        f"no slow network can be built here ({error}); allow network namespaces, /dev/net/tun, "
        "bridges and tc tbf, for example by running as root"
    )


class Network:
    """Hosts by name with their addresses; `close` removes all of them."""

    def __init__(self, hosts: Mapping[str, str]) -> None:
        self._cables = subprocess.Popen(
            [*_SEPARATE, sys.executable, __file__, json.dumps(hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._cables.stdout is not None
        ready = self._cables.stdout.readline()
        if not ready:
            _, error = self._cables.communicate()
            raise AssertionError(f"the network could not be built: {error.strip()}")
        self._namespaces: dict[str, int] = json.loads(ready)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        if self._cables.poll() is None:
            self.close()

    def close(self) -> dict[str, int]:
        """Remove the network; returns the numbers of frames carried and lost."""
        output, error = self._cables.communicate("", timeout=200)
        assert self._cables.returncode == 0, error
        counts: dict[str, int] = json.loads(output)
        return counts

    def namespaces(self, host: str) -> dict[str, int]:
        """Namespaces of a host in the order of entering: paths with their kinds."""
        cables = f"/proc/{self._cables.pid}"
        network = f"{cables}/fd/{self._namespaces[host]}"
        return {f"{cables}/ns/user": _CLONE_NEWUSER, network: _CLONE_NEWNET}

    def on(self, host: str, command: Sequence[str | Path]) -> list[str]:
        """Wrap a command so that it runs on a host."""
        user, network = self.namespaces(host)
        enter = ["nsenter", f"--user={user}", "--preserve-credentials", f"--net={network}"]
        return [*enter, "--", *map(str, command)]

    def start(
        self, host: str, command: Sequence[str | Path], **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command on a host."""
        return subprocess.Popen(self.on(host, command), text=True, **options)

    def run(self, host: str, command: Sequence[str | Path], **options: Any) -> str:
        """Run a command on a host and return its output."""
        return subprocess.check_output(self.on(host, command), text=True, timeout=200, **options)


# -- inside the namespaces ------------------------------------------------------------------------


def _tap(name: str) -> int:
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP_NO_PI))
    return handle


def _ip(*lines: str) -> None:
    for line in lines:
        subprocess.run(line.split(), check=True, stdout=subprocess.DEVNULL)


def _cap(device: str) -> str:
    return f"tc qdisc add dev {device} root tbf rate {RATE:.0f}bit burst 16kb {_QUEUE}"


def _plug_in(host: str, address: str) -> tuple[int, int, int]:
    """Create a host; returns its namespace and both ends of its cable."""
    libc = ctypes.CDLL(None, use_errno=True)
    bridge = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    port = _tap(host)
    _ip(f"ip link set dev {host} master bridge", f"ip link set dev {host} up", _cap(host))
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no new network namespace")
    namespace, end = os.open("/proc/thread-self/ns/net", os.O_RDONLY), _tap("eth0")
    _ip("ip link set lo up", f"ip address add {address} dev eth0", "ip link set eth0 up")
    _ip(_cap("eth0"))
    if libc.setns(bridge, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no way back from a network namespace")
    os.close(bridge)
    return namespace, end, port


def _carry(cables: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Forward frames until standard input ends."""
    rng = random.Random(1)
    opposite = {a: b for pair in cables for a, b in (pair, pair[::-1])}
    in_transit: list[tuple[float, int, int, bytes]] = []
    carried = lost = 0
    poll = select.epoll()
    for handle in (*opposite, 0):
        poll.register(handle, select.EPOLLIN)
    while True:
        timeout = max(in_transit[0][0] - time.monotonic(), 0) if in_transit else None
        for handle, _ in poll.poll(timeout):
            if handle == 0:
                return {"carried": carried, "lost": lost}
            frame = os.read(handle, 1 << 16)
            if rng.random() < LOSS:
                lost += 1
                continue
            carried += 1
            due = time.monotonic() + DELAY
            heapq.heappush(in_transit, (due, carried, opposite[handle], frame))
        while in_transit and in_transit[0][0] <= time.monotonic():
            _, _, handle, frame = heapq.heappop(in_transit)
            os.write(handle, frame)


def _main(hosts: Mapping[str, str]) -> None:
    _ip("ip link add bridge type bridge", "ip link set bridge up")
    namespaces, cables = {}, []
    for host, address in hosts.items():
        namespaces[host], *cable = _plug_in(host, address)
        cables.append((cable[0], cable[1]))
    print(json.dumps(namespaces), flush=True)
    print(json.dumps(_carry(cables)), flush=True)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
