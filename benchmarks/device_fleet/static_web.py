"""A web server for the folder of a server's mirror: nginx where it is installed.

Elsewhere a small one of the tests, in this process, serves the folder: enough for a few devices.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness import code_of_tests
from harness.processes import ProcessTree, free_port, started, wait_for_port

code_of_tests.make_importable()
if TYPE_CHECKING:
    from static_https import new_certificate, static_https
else:
    from tests.static_https import new_certificate, static_https

_CONFIGURATION = """
daemon off;
{user}
pid {scratch}/nginx.pid;
worker_processes auto;
worker_rlimit_nofile 16384;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path {scratch}/body;
    proxy_temp_path {scratch}/proxy;
    fastcgi_temp_path {scratch}/fastcgi;
    uwsgi_temp_path {scratch}/uwsgi;
    scgi_temp_path {scratch}/scgi;
    server {{
        listen 127.0.0.1:{port} ssl backlog=4096;
        root {folder};
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
    }}
}}
"""


@dataclass(frozen=True)
class StaticWeb:
    """A web server that runs."""

    named: str
    folder: Path
    """What it serves."""
    address: str
    """URL of the folder."""
    certificate: Path
    """What clients have to trust."""
    tree: ProcessTree | None
    """The processes of nginx; None if this process serves the folder."""

    def cpu_seconds(self) -> float:
        """CPU time of its processes."""
        return 0.0 if self.tree is None else self.tree.cpu_seconds()


@contextlib.contextmanager
def static_web(scratch: Path) -> Iterator[StaticWeb]:
    """Serve a new folder over HTTPS until the block ends; all its files are in `scratch`."""
    folder = scratch / "www"
    folder.mkdir()
    keys = scratch / "keys"
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if nginx is None:
        with static_https(folder, keys) as served:
            yield StaticWeb("Python", folder, served.address, served.certificate, None)
        return
    certificate, key = new_certificate(keys)
    port = free_port()
    configuration = scratch / "nginx.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            # What else would be another user, who cannot read the folder.
            user="user root;" if os.geteuid() == 0 else "",
            scratch=scratch,
            folder=folder,
            port=port,
            certificate=certificate,
            key=key,
        )
    )
    command = [nginx, "-p", str(scratch), "-c", str(configuration), "-e", "stderr"]
    with started(command, scratch / "nginx.log") as program:
        wait_for_port(port, program, 60.0)
        yield StaticWeb("nginx", folder, f"https://127.0.0.1:{port}/", certificate, program.tree)
