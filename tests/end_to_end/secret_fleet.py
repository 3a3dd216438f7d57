"""A fleet on hosts of its own (see `network`), which joins a server and trains in secret."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.end_to_end.network import Network
from tests.end_to_end.test_several_hosts import (
    HostCommands,
    create_token,
    install_task,
    run_concurrently,
)

from isthmus_server.fleet.authority import initialise

PHONES = ["phone-0", "phone-1", "phone-2"]
MEMBERS = {**dict.fromkeys(PHONES, "client"), "alice": "operator"}
"""Roles; the operator is on the host of the first phone."""
_CHANGES = [
    *("task.source=table/task.py:Table", "federated.clients=0", "datacenter.ranks=0"),
    *("federated.cohort=3", "federated.quorum=3", "federated.secure_aggregation=true"),
    *("rounds=1", "time.lease_seconds=10", "strategy.policy=federated"),
]


@contextlib.contextmanager
def commands_on(hosts: Network, folder: Path) -> Iterator[HostCommands]:
    """Commands on hosts, which are stopped at the end of the block."""
    commands = HostCommands(hosts, folder)
    try:
        yield commands
    finally:
        commands.stop()


class SecretFleet:
    """The members of a fleet, and the author of the task that its devices trust."""

    def __init__(self, commands: HostCommands, folder: Path, server: str) -> None:
        """Prepare the state of a server with the name `server`, and a token for each member."""
        self._commands = commands
        self._folder = folder
        initialise(folder / "state", [server])
        self._tokens = [create_token(folder / "state", *member) for member in MEMBERS.items()]
        self._author = install_task(folder, ["state/tasks"])

    def join(self, address: str, more: Mapping[str, Sequence[str]] | None = None) -> None:
        """Have all members join at an address, with more arguments by name, and start devices."""
        more = more or {}
        run_concurrently(
            (
                self._commands.run,
                "phone-0" if name == "alice" else name,
                *(role, "join", address, token, "--state", name, *more.get(name, ())),
            )
            for (name, role), token in zip(MEMBERS.items(), self._tokens, strict=True)
        )
        for name in PHONES:
            (self._folder / name / "policy.toml").write_text(
                # A small fleet.
                f"authors = ['{self._author.hex()}']\n[privacy]\nclients_min = 2\n"
            )
            self._commands.start(name, "client", "start", "--state", name)

    def train(self) -> None:
        """Submit the job from the operator's host, and follow it to its end."""
        sets = [part for change in _CHANGES for part in ("--set", change)]
        run = self._commands.run
        submitted = run("phone-0", "submit", "job.toml", "--state", "alice", *sets)
        assert submitted.endswith("table-1")
        log = run("phone-0", "logs", "table-1", "--follow", "--state", "alice")
        assert log.endswith("table-1 finished: all rounds are done"), log

    def check_all_took_part(self) -> None:
        """Check that the updates of all devices are in the one round of the run."""
        report = json.loads(self._commands.run("server", "report", "state/runs/table-1", "--json"))
        (row,) = report["rounds"]
        assert {receipt["participant"] for receipt in row["receipts"]} == set(PHONES)
        assert row["participants"]["accepted"] == len(PHONES)
