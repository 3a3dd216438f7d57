"""Two datacenters that compress their updates, and are killed, end with the same model."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tests import forked

from isthmus.job import Job, with_changes
from isthmus_server.read.report.report import read_report
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.merger import ModelMerger
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundCommitted
from isthmus_server.storage.store import Store
from isthmus_server.transport.link import Link

NAMES = ("first", "second")
ROUNDS = 4


class Killed(BaseException):
    """Ends a coordinator as a signal would: nothing catches it."""


@pytest.fixture
def job(make_setup: Any) -> Job:
    setup = make_setup("Table", {"own_data": True}, ranks=0, steps=3, optimizer_on_load="keep")
    changes = {
        "datacenter.compression.keep": 256,
        "strategy.policy": "datacenter",
        "rounds": ROUNDS,
        "attempts": 20,  # those while the services start again
        "time.join_seconds": 600.0,
    }
    job: Job = with_changes(setup.job, changes)
    return job


class Datacenters:
    """The processes of two datacenters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.services: dict[str, BaseProcess] = {}

    def start(self, name: str, port: int) -> None:
        state = self.folder / name
        words = ["datacenter", "launch", "--ranks", "1", "--server", f"127.0.0.1:{port}"]
        words += ["--name", name, "--state", str(state)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.services[name] = forked.start_into(log.fileno(), words, self.folder, os.environ)

    def kill(self) -> None:
        """SIGKILL."""
        for service in self.services.values():
            service.kill()
            service.join()


@pytest.fixture
def datacenters(tmp_path: Path) -> Iterator[Datacenters]:
    datacenters = Datacenters(tmp_path)
    yield datacenters
    datacenters.kill()


async def train(store: Store, link: Link, *, killed_after: int = 0) -> list[str]:
    """Run to the end, or until a round is committed; the digests of the models."""
    coordinator = Coordinator(RunParts.of(store, link))

    def kill(event: object) -> None:
        if isinstance(event, RoundCommitted) and event.record.round == killed_after:
            raise Killed

    coordinator.events.subscribe(kill)
    with contextlib.suppress(Killed):
        await coordinator.run()
    return [str(record.model_sha256) for record in read_report(store).rounds]


async def test_failed_attempts_and_kills_lose_and_repeat_nothing(
    job: Job, datacenters: Datacenters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, link = Path(__file__).parent, Link(job.time.lease_seconds)
    port = await link.start()
    try:
        for name in NAMES:
            datacenters.start(name, port)
        with contextlib.closing(Store.create(tmp_path / "whole", job, base)) as store:
            undisturbed = await train(store, link)
        assert len(undisturbed) == len(set(undisturbed)) == ROUNDS

        merge = ModelMerger.merge

        async def merge_or_fail(self: ModelMerger, spec: Any, results: Any) -> None:
            """Both updates have arrived; the attempt fails, and both services are killed."""
            if (spec.round, spec.attempt) == (2, 1):
                await asyncio.to_thread(datacenters.kill)
                for name in NAMES:
                    datacenters.start(name, port)
                raise AttemptFailed("the disk is full", [])
            await merge(self, spec, results)

        monkeypatch.setattr(ModelMerger, "merge", merge_or_fail)
        with contextlib.closing(Store.create(tmp_path / "killed", job, base)) as store:
            await train(store, link, killed_after=3)
        with contextlib.closing(Store.open_to_continue(tmp_path / "killed")) as store:
            assert await train(store, link) == undisturbed
            rows = read_report(store).to_json()["rounds"]
        assert rows[1]["attempt"] > 1
        assert not [note for row in rows for each in row["receipts"] if (note := each["reason"])]
    finally:
        await link.stop()
