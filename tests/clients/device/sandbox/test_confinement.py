"""A process in the sandbox, without PyTorch: what it tries, and what the kernel answers."""

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus_clients.device.sandbox import landlock, seccomp
from isthmus_clients.device.sandbox.confinement import _without

FILTERED = platform.machine() in ("x86_64", "aarch64")
UNSHARE = shutil.which("unshare")
NAMESPACES = bool(UNSHARE) and not subprocess.run([UNSHARE, "-Urpn", "true"]).returncode
needs_landlock = pytest.mark.skipif(
    landlock.abi_version() < landlock.TRUNCATE_ABI,
    reason="this kernel has no Landlock; use one with CONFIG_SECURITY_LANDLOCK",
)
needs_filter = pytest.mark.skipif(not FILTERED, reason="no filter for this architecture")
needs_namespaces = pytest.mark.skipif(
    not NAMESPACES, reason="there are no user namespaces; allow them in the kernel"
)

ATTEMPTS = """
import ctypes, json, os, resource, socket, subprocess, sys
from pathlib import Path

folder, agent, separate, required = Path(sys.argv[1]), int(sys.argv[2]), *map(int, sys.argv[3:])
from isthmus_clients.device.sandbox import confinement, namespaces

shmget = ({"x86_64": 29, "aarch64": 194}[os.uname().machine], 0, 4096, 0o1600)
separate = namespaces.enter_namespaces() if separate else False
if separate and os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
allowed = confinement.Confinement(
    (folder / "data",), folder / "state/scratch", folder / "state", required
)
report = confinement.confine(allowed, separate=separate)

def send_to_a_path(kind, connect=False):
    own, _ = socket.socketpair(socket.AF_UNIX, kind)
    path = str(folder / "collector")
    if connect:
        own.connect(path)
        own.send(b"private")
    else:
        own.sendto(b"private", path)

def call(*arguments):
    if ctypes.CDLL(None, use_errno=True).syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")

attempts = {
    "a socket": lambda: socket.socket(),
    "a datagram to a path": lambda: send_to_a_path(socket.SOCK_DGRAM),
    "a raw datagram to a path": lambda: send_to_a_path(socket.SOCK_RAW),
    "connecting a pair": lambda: send_to_a_path(socket.SOCK_DGRAM, connect=True),
    "the agent's limits": lambda: resource.prlimit(agent, resource.RLIMIT_CPU),
    "shared memory": lambda: call(*shmget),
    "a Unix socket": lambda: socket.socket(socket.AF_UNIX),
    "reading the key": lambda: (folder / "state/identity.key").read_bytes(),
    "listing the state": lambda: os.listdir(folder / "state"),
    "reading another file": lambda: (folder / "other").read_bytes(),
    "changing the data": lambda: (folder / "data/rows").write_text("changed"),
    "removing the data": lambda: (folder / "data/rows").unlink(),
    "writing outside": lambda: (folder / "new").write_text("x"),
    "truncating the key": lambda: os.truncate(folder / "state/identity.key", 0),
    "opening up the key": lambda: (folder / "state/identity.key").chmod(0o644),
    "the agent's environment": lambda: Path(f"/proc/{agent}/environ").read_bytes(),
    "the agent's memory": lambda: open(f"/proc/{agent}/mem", "rb"),
    "the agent's descriptors": lambda: os.listdir(f"/proc/{agent}/fd"),
    "ending the agent": lambda: os.kill(agent, 0),
    "privileges": lambda: subprocess.run(["unshare", "-Ur", "true"], check=True),
    "reading the data": lambda: (folder / "data/rows").read_bytes(),
    "writing to scratch": lambda: (folder / "state/scratch/x").write_text("x"),
    "a program": lambda: subprocess.run(["true"], check=True),
    "a module": lambda: __import__("sqlite3"),
    "a pair of sockets": lambda: socket.socketpair(),
}
results = {}
for name, attempt in attempts.items():
    try:
        attempt()
        results[name] = None
    except (OSError, subprocess.CalledProcessError) as error:
        results[name] = type(error).__name__
print(json.dumps({"report": report, "results": results}))
"""


def attempts(folder, *, separate, required=False):
    scratch = folder / "state/scratch"
    scratch.mkdir(parents=True)
    (folder / "data").mkdir()
    for name in ("state/identity.key", "data/rows", "other"):
        (folder / name).write_text("private")
    command = [sys.executable, "-c", ATTEMPTS, folder, os.getpid(), int(separate), int(required)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as collector:
        collector.bind(str(folder / "collector"))
        found = json.loads(subprocess.check_output(list(map(str, command)), text=True))
        collector.setblocking(False)
        with pytest.raises(BlockingIOError):
            collector.recv(10)
    assert (folder / "data/rows").read_text() == "private"
    assert (folder / "state/identity.key").read_text() == "private"
    return found


@pytest.fixture(scope="module")
def in_namespaces(tmp_path_factory):
    return attempts(tmp_path_factory.mktemp("separate"), separate=True)["results"]


@pytest.fixture(scope="module")
def without_namespaces(tmp_path_factory):
    return attempts(tmp_path_factory.mktemp("together"), separate=False)["results"]


@needs_filter
@needs_landlock
@pytest.mark.parametrize(
    "what",
    [
        "a socket",
        "a Unix socket",
        "a datagram to a path",
        "a raw datagram to a path",
        "connecting a pair",
        "the agent's limits",
        "shared memory",
        "reading the key",
        "listing the state",
        "reading another file",
        "changing the data",
        "removing the data",
        "writing outside",
        "truncating the key",
        "opening up the key",
        "the agent's environment",
        "the agent's memory",
        "the agent's descriptors",
        "privileges",
    ],
)
def test_what_a_task_must_not_do_fails(what, in_namespaces, without_namespaces):
    """With every restriction, and where containers permit no namespaces."""
    assert in_namespaces[what] in ("PermissionError", "CalledProcessError")
    assert without_namespaces[what] in ("PermissionError", "CalledProcessError")


def test_what_a_task_needs_works(in_namespaces, without_namespaces):
    needed = ("reading the data", "writing to scratch", "a program", "a module")
    for results in (in_namespaces, without_namespaces):
        assert [results[name] for name in (*needed, "a pair of sockets")] == [None] * 5


@needs_namespaces
def test_a_task_sees_no_other_process(in_namespaces):
    assert in_namespaces["ending the agent"] == "ProcessLookupError"


@pytest.mark.skipif(
    landlock.abi_version() < 6,
    reason="this Landlock does not restrict signals; use Linux 6.12 or newer",
)
def test_without_namespaces_landlock_restricts_signals(without_namespaces):
    assert without_namespaces["ending the agent"] == "PermissionError"


@needs_filter
@needs_landlock
def test_the_report_says_what_is_in_force(tmp_path):
    found = attempts(tmp_path, separate=False, required=True)
    version = landlock.abi_version()
    assert found["report"] == (
        f"no network (seccomp); files read-only (Landlock {version}); processes not separated"
    )


PARTIAL = """
import sys
from pathlib import Path
from isthmus_clients.device.sandbox import confinement, landlock, seccomp

def absent(*_, **__):
    raise OSError(38, "Function not implemented")

(landlock if sys.argv[1] == "Landlock" else seccomp).restrict = absent
folder = Path(sys.argv[2])
try:
    print(confinement.confine(
        confinement.Confinement((), folder, folder / "state", sys.argv[3] == "required"),
        separate=False,
    ))
except ValueError as error:
    print(error)
"""


@needs_filter
@needs_landlock
@pytest.mark.parametrize(
    ("lacking", "required", "sentence"),
    [
        (
            "Landlock",
            "required",
            "its owner requires a sandbox for tasks (required, in policy.toml), and this kernel "
            "lacks Landlock",
        ),
        (
            "seccomp",
            "required",
            "its owner requires a sandbox for tasks (required, in policy.toml), and this kernel "
            "lacks filters of system calls (seccomp)",
        ),
        ("Landlock", "", "files NOT restricted (Landlock: Function not implemented)"),
        ("seccomp", "", "network NOT restricted (seccomp: Function not implemented)"),
    ],
)
def test_a_kernel_without_a_restriction_is_reported_or_refused(
    lacking, required, sentence, tmp_path
):
    command = [sys.executable, "-c", PARTIAL, lacking, tmp_path, required]
    output = subprocess.check_output(list(map(str, command)), text=True)
    assert sentence in output


def test_a_directory_that_contains_the_state_is_readable_except_for_it(tmp_path):
    """An interpreter may be in the owner's home directory, as the state is."""
    for name in ("home/python", "home/.local/share", "home/.local/state/isthmus/client"):
        (tmp_path / name).mkdir(parents=True)
    hidden = tmp_path / "home/.local/state/isthmus"
    assert set(_without(tmp_path / "home", hidden)) == {
        tmp_path / "home/python",
        tmp_path / "home/.local/share",
    }
    assert list(_without(hidden / "client", hidden)) == []


@pytest.mark.skipif(
    not Path("/usr/include/asm-generic/unistd.h").exists(),
    reason="there are no headers of the kernel; install linux-libc-dev",
)
def test_every_number_of_a_system_call_is_that_of_the_kernel():
    """Of aarch64, whose numbers are the generic ones; calls newer than the headers are skipped."""
    header = Path("/usr/include/asm-generic/unistd.h").read_text()
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header))
    table = {**seccomp._CALLS, **seccomp._ABSENT, "clone": seccomp._CLONE}
    table |= {"socketpair": seccomp._SOCKETPAIR, "prlimit64": seccomp._PRLIMIT}
    table |= {"memfd_create": seccomp._MEMFD_CREATE, "mmap": seccomp._MMAP}
    table |= {"prctl": seccomp._PRCTL}
    newer = {"fchmodat2", "setxattrat", "removexattrat"}
    for name, (_, number) in table.items():
        if number is not None and name not in newer:
            assert numbers[name] == str(number), name
