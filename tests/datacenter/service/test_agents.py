"""Agents on the nodes of a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests import forked
from tests.datacenter.conftest import wait_until
from tests.free_ports import free_ports

from isthmus_datacenter.service import agents
from isthmus_datacenter.service.rank_group import Nodes
from isthmus_datacenter.service.signed_store import read_key_file, write_key_file


@pytest.mark.parametrize("has_key", [False, True])
def test_a_node_logs_that_it_waits_for_its_service(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    has_key: bool,
) -> None:
    attempts: list[int] = []
    key_file = tmp_path / "control.key"
    if has_key:
        write_key_file(key_file)

    def read(path: Path) -> bytes:
        if not has_key:
            attempts.append(0)
        return read_key_file(path)

    def refuse(key: bytes, host: str, port: int) -> Any:
        attempts.append(port)
        raise dist.DistNetworkError("connection refused")

    monkeypatch.setattr(agents, "AgentForkServer", contextlib.nullcontext)
    monkeypatch.setattr(agents.ControlStore, "connect", refuse)
    monkeypatch.setattr(agents, "read_key_file", read)
    monkeypatch.setattr(agents, "MAX_RECONNECT_SECONDS", 0.0)
    with caplog.at_level("INFO"):
        agents.serve_node("head", 29400, key_file, lambda: len(attempts) == 9)
    waits = "no service at head:29400; this node waits for it"
    if not has_key:  # the service may run with another --state: the key is what is missing
        waits = (
            f"no key {key_file}; this node waits until the service at head:29400 has made it, "
            "with the same --state"
        )
    assert caplog.messages == [waits] * 4


def test_two_nodes_make_one_group(
    start_datacenter: Any, make_setup: Any, warm_datacenter: Any, tmp_path: Path
) -> None:
    """Two agents, one of whose ranks is killed, give the same bytes as one machine."""
    port = free_ports(1)
    state = ("--state", str(tmp_path / "state"))
    words = ("datacenter", "agent", "--control", f"127.0.0.1:{port}", *state)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [forked.start(words, tmp_path, environment) for _ in range(2)]
    try:
        driver = start_datacenter(ranks=1, nodes=Nodes(count=2, host="127.0.0.1", port=port))
        setup = make_setup("Table", {"dropout": 0.2}, zero_stage=3)
        for each in (driver, warm_datacenter):
            each.open("nodes", setup)
        assert driver.train("nodes", 0, 4, hand_back=True) is not None
        warm_datacenter.train("nodes", 0, 4)
        group = driver.service.group
        os.kill(driver.rank_pids()[1], signal.SIGKILL)
        _, blob = driver.train("nodes", 4, 8, hand_back=True)
        assert blob == warm_datacenter.train("nodes", 4, 8, hand_back=True)[1]
        # A node that receives SIGTERM asks the service to leave.
        os.kill(nodes[0][0].pid, signal.SIGTERM)
        wait_until(lambda: driver.run(group.is_leave_requested()))
    finally:
        for process, _ in nodes:
            process.kill()
            process.join()
