"""Several hosts on one machine: Linux network namespaces on a bridge, connected by slow cables.

    with Network({"server": "10.77.0.1/24", "phone": "10.77.0.2/24"}) as network:
        network.run("phone", ["ip", "address"])

    with Network(hosts, {"phone": Cable(rate=1e6, forgets=3.0)}) as network:
        ...

Each host has its own interface, and the addresses exist only in these namespaces. A kernel token
bucket (tc tbf) limits the rate into and out of a host. This program implements the cables with
delay and loss, and what else a way may do to frames: it forwards every frame between the host's end
(a TAP device) and the bridge's end, or drops it. Linux has netem for that, but not every kernel
includes it.
"""

from __future__ import annotations

import ctypes
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Cable:
    """What the cable of one host does to the frames in both directions."""

    delay: float = DELAY
    """Seconds."""
    loss: float = LOSS
    """Fraction of frames."""
    rate: float = RATE
    """Bits per second."""
    flap: float = 0.0
    """Seconds for which nothing passes, in every `period`."""
    period: float = 20.0
    """Seconds from one flap to the next."""
    forgets: float = 0.0
    """Seconds of silence after which a connection passes no more, as with a router that translates
    addresses and has forgotten it; 0 for none."""
    largest: int = 0
    """Bytes of the largest frame that passes, of which nobody is told; 0 for any."""


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

    def __init__(self, hosts: Mapping[str, str], cables: Mapping[str, Cable] | None = None) -> None:
        """Build it; the cables of hosts that are not in `cables` are usual ones."""
        others = {name: dataclasses.asdict(cable) for name, cable in (cables or {}).items()}
        self._cables = subprocess.Popen(
            [*_SEPARATE, sys.executable, __file__, json.dumps(hosts), json.dumps(others)],
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


def _cap(device: str, rate: float) -> str:
    return f"tc qdisc add dev {device} root tbf rate {rate:.0f}bit burst 16kb {_QUEUE}"


class _Wire:
    """Decides about the frames of one cable, in both directions."""

    def __init__(self, cable: Cable) -> None:
        self.delay = cable.delay
        self._cable = cable
        self._rng = random.Random(1)
        self._begun = time.monotonic()
        self._heard: dict[bytes, float] = {}
        """When something of a connection passed last, by its addresses and ports."""

    def passes(self, frame: bytes, now: float) -> bool:
        """Whether a frame gets through at this time."""
        cable = self._cable
        if self._rng.random() < cable.loss:
            return False
        if (now - self._begun) % cable.period < cable.flap:
            return False
        if cable.largest and len(frame) > cable.largest:
            return False
        return not cable.forgets or self._is_known(frame, now)

    def _is_known(self, frame: bytes, now: float) -> bool:
        if frame[12:14] != b"\x08\x00" or frame[23] != 6:
            return True  # not TCP over IPv4
        begin = 14 + 4 * (frame[14] & 15)
        ends = sorted(
            (frame[26:30] + frame[begin : begin + 2], frame[30:34] + frame[begin + 2 : begin + 4])
        )
        connection = b"".join(ends)
        opens = frame[begin + 13] & 0x12 == 0x02
        last = self._heard.get(connection)
        if not opens and (last is None or now - last > self._cable.forgets):
            return False
        self._heard[connection] = now
        return True


def _plug_in(host: str, address: str, rate: float) -> tuple[int, int, int]:
    """Create a host; returns its namespace and both ends of its cable."""
    libc = ctypes.CDLL(None, use_errno=True)
    bridge = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    port = _tap(host)
    _ip(f"ip link set dev {host} master bridge", f"ip link set dev {host} up")
    _ip(_cap(host, rate))
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no new network namespace")
    namespace, end = os.open("/proc/thread-self/ns/net", os.O_RDONLY), _tap("eth0")
    _ip("ip link set lo up", f"ip address add {address} dev eth0", "ip link set eth0 up")
    _ip(_cap("eth0", rate))
    if libc.setns(bridge, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no way back from a network namespace")
    os.close(bridge)
    return namespace, end, port


def _carry(cables: Sequence[tuple[int, int, _Wire]]) -> dict[str, int]:
    """Forward frames until standard input ends."""
    opposite = {}
    for end, other, wire in cables:
        opposite[end] = other, wire
        opposite[other] = end, wire
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
            target, wire = opposite[handle]
            now = time.monotonic()
            if not wire.passes(frame, now):
                lost += 1
                continue
            carried += 1
            heapq.heappush(in_transit, (now + wire.delay, carried, target, frame))
        while in_transit and in_transit[0][0] <= time.monotonic():
            _, _, handle, frame = heapq.heappop(in_transit)
            os.write(handle, frame)


def _main(hosts: Mapping[str, str], others: Mapping[str, Any]) -> None:
    _ip("ip link add bridge type bridge", "ip link set bridge up")
    namespaces, cables = {}, []
    for host, address in hosts.items():
        cable = Cable(**others.get(host, {}))
        namespaces[host], end, port = _plug_in(host, address, cable.rate)
        cables.append((end, port, _Wire(cable)))
    print(json.dumps(namespaces), flush=True)
    print(json.dumps(_carry(cables)), flush=True)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
