"""The distribution's HTTP proxies, which ask for a password and tunnel to two ports only."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.end_to_end.network import Network

USER, PASSWORD = "ward", "blue-chair"
PORT = 3128

SQUID = """
http_port {port}
auth_param basic program {check} {folder}/passwords
acl known proxy_auth REQUIRED
acl tunnel method CONNECT
acl fleet port {ports}
http_access allow known tunnel fleet
http_access deny all
cache deny all
access_log stdio:{folder}/access
cache_log {folder}/log
pid_filename none
coredump_dir {folder}
shutdown_lifetime 0 seconds
visible_hostname proxy
cache_effective_user proxy
"""

TINYPROXY = """
User root
Port {port}
Timeout 600
MaxClients 100
LogLevel Connect
LogFile "{folder}/access"
BasicAuth {login}
{ports}
"""

_CHECKS = ("/usr/lib/squid/basic_ncsa_auth", "/usr/lib64/squid/basic_ncsa_auth")


def missing(kind: str) -> str:
    """Why a proxy cannot be started here, and what to do about it; empty if it can."""
    if _program(kind) is None:
        return f"there is no {kind}; install {kind}"
    if kind == "squid":
        if shutil.which("openssl") is None:
            return "there is no openssl for squid's passwords; install openssl"
        if _check() is None:
            return "squid has no basic_ncsa_auth here; install a squid with it"
        if os.geteuid() != 0:
            return "squid changes its user, which only root can; run the tests as root"
    return ""


class RealProxy:
    """A proxy on a host of a network, for the block; `folder` has its files."""

    def __init__(self, kind: str, hosts: Network, host: str, ports: Sequence[int]) -> None:
        self._kind = kind
        self._hosts = hosts
        self._host = host
        self._ports = ports
        self._temporary = tempfile.TemporaryDirectory(prefix="isthmus-proxy-")
        self.folder = Path(self._temporary.name)

    def __enter__(self) -> RealProxy:
        prepare = self._squid if self._kind == "squid" else self._tinyproxy
        self._process = subprocess.Popen(prepare(), stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=30)
        self._temporary.cleanup()

    def requests(self) -> str:
        """Its log, which has a line for each request."""
        return (self.folder / "access").read_text()

    def _squid(self) -> list[str | Path]:
        """In the namespace of the host's network only: squid changes its user."""
        shutil.chown(self.folder, "proxy")
        hashed = subprocess.check_output(
            ["openssl", "passwd", "-apr1", "-stdin"], input=PASSWORD, text=True
        )
        passwords = self.folder / "passwords"
        passwords.write_text(f"{USER}:{hashed}")
        shutil.chown(passwords, "proxy")
        ports = " ".join(map(str, self._ports))
        file = self._write(SQUID.format(port=PORT, folder=self.folder, check=_check(), ports=ports))
        _, network = self._hosts.namespaces(self._host)
        name = f"isthmus{os.getpid()}"  # of its shared memory, if another one runs here
        squid = _program("squid")
        assert squid is not None
        return ["nsenter", f"--net={network}", "--", squid, "-N", "-n", name, "-f", file]

    def _tinyproxy(self) -> list[str]:
        ports = "\n".join(f"ConnectPort {port}" for port in self._ports)
        login = f"{USER} {PASSWORD}"
        file = self._write(
            TINYPROXY.format(port=PORT, folder=self.folder, login=login, ports=ports)
        )
        tinyproxy = _program("tinyproxy")
        assert tinyproxy is not None
        return self._hosts.on(self._host, [tinyproxy, "-d", "-c", file])

    def _write(self, configuration: str) -> Path:
        file = self.folder / "configuration"
        file.write_text(configuration)
        file.chmod(0o644)
        return file


def _program(kind: str) -> str | None:
    return shutil.which(kind, path="/usr/sbin:/usr/bin:/sbin:/bin")


def _check() -> str | None:
    return next((path for path in _CHECKS if Path(path).exists()), None)
