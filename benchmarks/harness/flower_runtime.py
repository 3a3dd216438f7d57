"""Start Flower's own runtime as a user does: one SuperLink and several SuperNodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from harness.processes import ProcessTree, Program, free_port, started, wait_for_port

NAME = "stock"
"""Name of the SuperLink for `flwr run APP`."""


def programs() -> Path:
    """Directory of Flower's programs."""
    flower = distribution("flwr")
    return next(
        Path(str(flower.locate_file(file))).resolve().parent
        for file in flower.files or ()
        if file.name == "flower-superlink"
    )


@contextlib.contextmanager
def deployment(home: Path, clients: int) -> Iterator[tuple[Program, ProcessTree, dict[str, str]]]:
    """Run a SuperLink with its SuperNodes.

    Yields:
        The SuperLink, the tree of all processes, and the environment for `flwr` commands.
    """
    port, folder = free_port(), programs()
    environment = {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # Flower starts its components by name.
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\n'
        f'address = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    with contextlib.ExitStack() as stack:
        # Clients of this port can run code, so it listens on loopback only.
        command = [str(folder / "flower-superlink"), "--insecure"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        superlink = stack.enter_context(
            started(
                [*command, "--disable-runtime-dependency-installation"],
                home / "superlink.log",
                environment=environment,
                directory=home,
            )
        )
        tree = ProcessTree(superlink.popen.pid)
        wait_for_port(port, superlink, 60.0)
        for index in range(clients):
            command = [str(folder / "flower-supernode"), "--insecure"]
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
