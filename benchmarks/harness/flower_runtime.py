"""Flower's own runtime, started as its users start it: one SuperLink and some SuperNodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from harness.processes import Program, Tree, free_port, started, wait_for_port

SCRIPTS = next(
    Path(str(distribution("flwr").locate_file(file))).resolve().parent
    for file in distribution("flwr").files or ()
    if file.name == "flower-superlink"
)
"""Where Flower's own programs are."""
NAME = "stock"
"""By which `flwr run APP` knows the SuperLink."""


@contextlib.contextmanager
def deployment(home: Path, clients: int) -> Iterator[tuple[Program, Tree, dict[str, str]]]:
    """A SuperLink and its SuperNodes: the first, all processes, the environment to call it with."""
    port = free_port()
    environment = {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # It starts its own parts by name.
        "PATH": f"{SCRIPTS}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\n'
        f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    with contextlib.ExitStack() as stack:
        # Whoever reaches its port can have code run: it listens on this machine alone.
        command = [str(SCRIPTS / "flower-superlink"), "--insecure"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        superlink = stack.enter_context(
            started(
                [*command, "--disable-runtime-dependency-installation"],
                home / "superlink.log",
                environment=environment,
                directory=home,
            )
        )
        tree = Tree(superlink.popen.pid)
        wait_for_port(port, superlink, 60.0)
        for index in range(clients):
            command = [str(SCRIPTS / "flower-supernode"), "--insecure"]
            command += ["--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
            node = f'name="node-{index}" partition-id={index} num-partitions={clients}'
            command += ["--node-config", node]
            supernode = stack.enter_context(
                started(
                    command,
                    home / f"supernode-{index}.log",
                    environment=environment,
                    directory=home,
                )
            )
            tree.add(supernode.popen.pid)
        yield superlink, tree, environment
