"""Machines that run a real systemd, on this one: with processes, mounts and state of their own.

    with Machines(folder) as machines:
        machine = machines.start("server", units)
        machine.run("systemctl", "start", "isthmus-server")

Namespaces separate them; they share one network, in which only the loopback interface exists. A
machine has only the units that it is given, and this project in /opt/isthmus, as after an
installation there.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SYSTEMD = Path("/lib/systemd/systemd")
_CGROUPS = Path("/sys/fs/cgroup")
_TARGETS = ("machine", "sysinit", "basic", "shutdown", "network-online", "umount")
_NAMESPACES = ("--fork", "--kill-child", "--pid", "--mount-proc", "--mount", "--uts", "--ipc")

_BOOT = """
set -e
mount --make-rprivate /
{cgroups}
mount --bind {files} /mnt
mount -t tmpfs -o mode=755 tmpfs /opt
mkdir -p /opt/python /opt/isthmus/bin {packages}
mount --bind {python} /opt/python
{binds}
for each in /run /tmp /var/tmp /var/cache /var/lib /var/log; do
    mount -t tmpfs -o mode=755 tmpfs $each
done
chmod 1777 /tmp /var/tmp
ln -s /opt/python/bin/{executable} /opt/isthmus/bin/python3
install -m 755 /mnt/isthmus /opt/isthmus/bin/isthmus
cp /mnt/pyvenv.cfg /opt/isthmus/pyvenv.cfg
site=/opt/isthmus/lib/{executable}/site-packages
mkdir -p $site
cp /mnt/packages.pth $site/
mount --bind /mnt/units /etc/systemd/system
for each in passwd group; do mount --bind /mnt/$each /etc/$each; done
exec env -i PATH="$PATH" container=lxc SYSTEMD_UNIT_PATH=/etc/systemd/system \
    {systemd} --system --unit=machine.target --show-status=0 --log-target=console --log-level=notice
"""


def missing() -> str:
    """Why no such machine can be started here; empty if one can."""
    if os.geteuid() != 0:
        return "only root can start machines with namespaces of their own; run as root"
    packages = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2"}
    for program, package in (packages | {"systemctl": "systemd"}).items():
        if shutil.which(program) is None:
            return f"there is no {program}; install {package}"
    if not SYSTEMD.exists():
        return "there is no systemd; install systemd"
    if subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True).returncode:
        return "this machine may not make namespaces; allow them, for example in the container"
    if not any((_CGROUPS / each).exists() for each in ("systemd", "cgroup.procs")):
        return "there is no hierarchy of control groups for systemd; mount one at /sys/fs/cgroup"
    return ""


class Machine:
    """One running machine."""

    def __init__(self, name: str, folder: Path, network: int, users: Sequence[str]) -> None:
        """Start it, with the units in `folder`/units; `network` is a process in its network."""
        self.name = name
        self.folder = folder
        self._cgroup = (_CGROUPS / "systemd" if _legacy() else _CGROUPS) / f"isthmus-{folder.name}"
        self._cgroup.mkdir(exist_ok=True)
        self._write_files(users)
        (folder / "boot.sh").write_text(self._boot_script())
        enter = f"echo $$ > {self._cgroup}/cgroup.procs; exec "
        command = ["nsenter", f"--net=/proc/{network}/ns/net", "unshare", "--cgroup", *_NAMESPACES]
        self._log = (folder / "systemd.log").open("w")
        self._process = subprocess.Popen(
            ["sh", "-c", enter + shlex.join([*command, "sh", str(folder / "boot.sh")])],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        self._pid = self._commands = 0
        while not self._is_up():
            assert self._process.poll() is None, self.log("systemd")
            time.sleep(0.05)  # nothing tells that systemd listens, but a connection

    def run(self, *command: str, text: str | None = None) -> str:
        """Run a command in the machine, as root; returns what it printed."""
        done = subprocess.run(
            self._inside(*command), input=text, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def isthmus(self, *arguments: str, dynamic: bool = False, user: str = "isthmus") -> str:
        """Run `isthmus ARGUMENTS` as a user, like `systemd-run --pipe`; returns its output.

        `dynamic`: systemd makes the user. (`systemd-run` itself needs a D-Bus daemon to wait.)
        """
        self._commands += 1
        unit = f"command-{self._commands}"
        words = " ".join(f'"{word}"' for word in ("/opt/isthmus/bin/isthmus", *arguments))
        lines = ["[Service]", "Type=oneshot", f"ExecStart={words}", f"User={user}"]
        lines += [f"DynamicUser={'yes' if dynamic else 'no'}", f"StateDirectory={user}"]
        lines += ["StateDirectoryMode=0700", f"WorkingDirectory=/var/lib/{user}"]
        lines += self._settings(unit)
        (self.folder / "units" / f"{unit}.service").write_text("\n".join([*lines, ""]))
        self.run("systemctl", "daemon-reload")
        try:
            self.run("systemctl", "start", unit)
        except AssertionError as error:
            raise AssertionError(self.log(unit) or str(error)) from None
        return self.log(unit).strip()

    def log(self, unit: str) -> str:
        """What a unit has printed."""
        path = self.folder / f"{unit}.log"
        return path.read_text() if path.exists() else ""

    def wait_for_log(self, unit: str, words: str, seconds: float = 100.0) -> None:
        """Wait until a unit has printed some words."""
        end = time.monotonic() + seconds
        while words not in self.log(unit):
            assert time.monotonic() < end, self.log(unit)
            state = self.run("systemctl", "show", "-P", "ActiveState", unit)
            assert state not in ("failed", "inactive"), (unit, state, self.log(unit))
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop all units, and then the machine."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("systemctl", "stop", "isthmus-*")
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, 9)
        self._process.wait(30)
        self._log.close()
        for path in sorted(self._cgroup.rglob("*"), reverse=True):
            if path.is_dir():
                with contextlib.suppress(OSError):
                    path.rmdir()
        with contextlib.suppress(OSError):
            self._cgroup.rmdir()

    def _inside(self, *command: str) -> list[str]:
        spaces = ["--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup"]
        return ["nsenter", f"--target={self._pid}", *spaces, "--", *command]

    def _is_up(self) -> bool:
        if not self._pid:
            try:
                children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
                self._pid = int(children.read_text().split()[0])
            except (OSError, IndexError):
                return False
        done = subprocess.run(
            self._inside("systemctl", "is-active", "machine.target"), capture_output=True
        )
        return done.stdout == b"active\n"

    def _settings(self, unit: str) -> list[str]:
        """What a unit has here and nowhere else: where Python is, and a file for its output."""
        return [
            "Environment=LD_LIBRARY_PATH=/opt/python/lib PYTHONDONTWRITEBYTECODE=1 COLUMNS=200",
            f"StandardOutput=append:/mnt/{unit}.log",
            f"StandardError=append:/mnt/{unit}.log",
        ]

    def _write_files(self, users: Sequence[str]) -> None:
        folder, units = self.folder, self.folder / "units"
        for name in _TARGETS:
            (units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\n")
        for unit in units.glob("*.service"):
            drop_in = units / f"{unit.name}.d"
            drop_in.mkdir()
            lines = ["[Service]", *self._settings(unit.stem), ""]
            (drop_in / "test.conf").write_text("\n".join(lines))
        for file, line in (
            ("passwd", "{0}:x:9999:9999::/var/lib/{0}:/bin/false"),
            ("group", "{0}:x:9999:"),
        ):
            added = "".join(line.format(user) + "\n" for user in users)
            (folder / file).write_text(Path("/etc", file).read_text() + added)
        (folder / "isthmus").write_text(
            "#!/opt/isthmus/bin/python3\n"
            "import sys\nfrom isthmus.cli import main\nsys.exit(main())\n"
        )
        (folder / "pyvenv.cfg").write_text(
            "home = /opt/python/bin\ninclude-system-site-packages = false\n"
        )
        listed = "".join(f"/opt/packages/{number}\n" for number in range(len(_packages())))
        (folder / "packages.pth").write_text(listed)

    def _boot_script(self) -> str:
        if _legacy():
            cgroups = (
                f"mount -t tmpfs -o mode=755 tmpfs {_CGROUPS}; mkdir {_CGROUPS}/systemd; "
                f"mount -t cgroup -o none,name=systemd,xattr cgroup {_CGROUPS}/systemd"
            )
        else:
            cgroups = f"umount -l {_CGROUPS}; mount -t cgroup2 cgroup2 {_CGROUPS}"
        packages = _packages()
        return _BOOT.format(
            cgroups=cgroups,
            files=shlex.quote(str(self.folder)),
            packages=" ".join(f"/opt/packages/{number}" for number in range(len(packages))),
            python=shlex.quote(sys.base_prefix),
            binds="\n".join(
                f"mount --bind {shlex.quote(str(path))} /opt/packages/{number}"
                for number, path in enumerate(packages)
            ),
            executable=f"python{sys.version_info.major}.{sys.version_info.minor}",
            systemd=SYSTEMD,
        )


class Machines:
    """Machines on one network; `close` stops all of them."""

    def __init__(self, folder: Path) -> None:
        """`folder` is for their files."""
        self._folder = folder
        self._running: list[Machine] = []
        ready = "ip link set lo up && echo ready && exec sleep infinity"
        self._network = subprocess.Popen(
            ["unshare", "--net", "--kill-child", "--fork", "sh", "-c", ready],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._network.stdout is not None
        assert self._network.stdout.readline() == "ready\n"
        children = Path(f"/proc/{self._network.pid}/task/{self._network.pid}/children")
        self._pid = int(children.read_text())

    def start(self, name: str, units: Sequence[Path], users: Sequence[str] = ()) -> Machine:
        """Start a machine with these units; `users` are added to those of this machine."""
        folder = self._folder / f"{name}-{os.getpid()}"
        (folder / "units").mkdir(parents=True)
        for unit in units:
            shutil.copy(unit, folder / "units")
        self._running.append(Machine(name, folder, self._pid, users))
        return self._running[-1]

    def close(self) -> None:
        """Stop the machines and remove the network."""
        for machine in self._running:
            machine.stop()
        os.kill(self._pid, 9)
        self._network.wait(10)
        assert self._network.stdout is not None
        self._network.stdout.close()

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _legacy() -> bool:
    """Whether control groups have a hierarchy of version 1 for systemd."""
    return (_CGROUPS / "systemd").exists()


def _packages() -> list[Path]:
    """The directories from which this process imports what is not part of Python."""
    base = Path(sys.base_prefix)
    found = [Path(entry) for entry in sys.path if entry and Path(entry).is_dir()]
    return [path for path in found if not path.is_relative_to(base)]
