"""Several hosts on one machine: Linux network namespaces on a bridge, with cables that are slow.

    with Network({"server": "10.77.0.1/24", "phone": "10.77.0.2/24"}) as network:
        network.run("phone", ["ip", "address"])

Each host has an interface of its own and nothing else in common with the others, and the
addresses exist only in these namespaces. A token bucket of the kernel (tc tbf) caps what goes in
and out of a host. Delay and loss are the cables', which are this program: it carries every frame
between the host's end (a TAP device) and the bridge's, late or not at all. Linux has netem for
that, which not every kernel is built with; this does the same on all of them.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DELAY = 0.01
"""Seconds on one cable; from host to host there are two."""
LOSS = 0.01
"""Share of frames that one cable loses."""
RATE = 20e6
"""Bits a second into and out of a host."""

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x0002 | 0x1000
_QUEUE = "latency 500ms"


class Network:
    """Hosts by name with their addresses, until closed; then nothing of it is left."""

    def __init__(self, hosts: Mapping[str, str]) -> None:
        command = ["unshare", "--user", "--map-root-user", "--net"]
        self._cables = subprocess.Popen(
            [*command, sys.executable, __file__, json.dumps(hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._cables.stdout is not None
        ready = self._cables.stdout.readline()
        if not ready:
            _, said = self._cables.communicate()
            raise AssertionError(
                "this test needs Linux network namespaces (as root, or in user namespaces), "
                f"/dev/net/tun, bridges, tc tbf and iproute2, and has them not: {said.strip()}"
            )
        self._namespaces: dict[str, int] = json.loads(ready)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        if self._cables.poll() is None:
            self.close()

    def close(self) -> dict[str, int]:
        """Take the network down; returns how many frames were carried, and lost."""
        said, error = self._cables.communicate("", timeout=200)
        assert self._cables.returncode == 0, error
        counted: dict[str, int] = json.loads(said)
        return counted

    def namespaces(self, host: str) -> dict[str, int]:
        """What a process on a host is in, in the order of entering: paths with their kinds."""
        cables = f"/proc/{self._cables.pid}"
        network = f"{cables}/fd/{self._namespaces[host]}"
        return {f"{cables}/ns/user": _CLONE_NEWUSER, network: _CLONE_NEWNET}

    def on(self, host: str, command: Sequence[str | Path]) -> list[str]:
        """The command that runs a command on a host."""
        user, network = self.namespaces(host)
        enter = ["nsenter", f"--user={user}", "--preserve-credentials", f"--net={network}"]
        return [*enter, "--", *map(str, command)]

    def start(self, host: str, command: Sequence[str | Path], **more: Any) -> subprocess.Popen[str]:
        """Start a command on a host."""
        return subprocess.Popen(self.on(host, command), text=True, **more)

    def run(self, host: str, command: Sequence[str | Path], **more: Any) -> str:
        """Run a command on a host; returns what it printed."""
        return subprocess.check_output(self.on(host, command), text=True, timeout=200, **more)


# -- what runs inside ------------------------------------------------------------------------------


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
    """A host in a namespace of its own: the namespace, and both ends of its cable."""
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
    """Carry frames, until standard input ends."""
    draw = random.Random(1)
    other = {a: b for pair in cables for a, b in (pair, pair[::-1])}
    waiting: list[tuple[float, int, int, bytes]] = []
    carried = lost = 0
    poll = select.epoll()
    for handle in (*other, 0):
        poll.register(handle, select.EPOLLIN)
    while True:
        timeout = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        for handle, _ in poll.poll(timeout):
            if handle == 0:
                return {"carried": carried, "lost": lost}
            frame = os.read(handle, 1 << 16)
            if draw.random() < LOSS:
                lost += 1
                continue
            carried += 1
            due = time.monotonic() + DELAY
            heapq.heappush(waiting, (due, carried, other[handle], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, handle, frame = heapq.heappop(waiting)
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
