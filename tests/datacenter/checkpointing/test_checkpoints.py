"""Checkpoints are complete or absent after crashes, and resuming does not change the result."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.conftest import wait_until
from tests.warm_ranks import Ranks

import isthmus_datacenter.service.service
from isthmus.errors import UserError
from isthmus.task.scoring import build_model
from isthmus_datacenter.service.service import DatacenterService
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.store import Store
from isthmus_server.transport.link import Link
from isthmus_server.transport.peer import ParticipantListener

HERE = Path(__file__).parents[1]


def _run_until_killed(group: Ranks, *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.run(*arguments)


def test_kill_while_saving_leaves_the_last_complete_checkpoint(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    open_command = make_setup("Table", zero_stage=3).open_command()
    states, last_complete = [], []
    for number, victims in enumerate(([0], [1], [0, 1])):
        state, progress = tmp_path / f"state-{number}", tmp_path / f"progress-{number}"
        with Ranks(2) as group:
            arguments = (
                HERE / "ranks.py",
                "save_until_killed",
                open_command,
                str(state),
                str(progress),
            )
            saving = threading.Thread(target=_run_until_killed, args=(group, *arguments))
            saving.start()
            wait_until(progress.exists)
            time.sleep(random.Random(number).random() * 0.1)  # at any point of a save
            processes = [process for process, _ in group._members]
            for rank in victims:
                processes[rank].kill()
            last_complete.append(int(progress.read_text() or 0))
            for process in processes:  # as an agent kills the others
                process.kill()
            saving.join()
        states.append(str(state))
    (contents,) = on_ranks(
        1, "read_checkpoints", make_setup("Table", ranks=1).open_command(), states
    )
    for steps, complete in zip(contents, last_complete, strict=True):
        assert max(steps) >= complete > 0
        assert all(numbers == {float(step)} for step, numbers in steps.items())


@pytest.mark.parametrize("readers", [0, 2])
def test_a_lost_rank_costs_at_most_the_steps_since_the_last_checkpoint(
    readers: int, warm_datacenter: Any, make_setup: Any, tmp_path: Path
) -> None:
    """Random numbers of the model and of the data continue as without the loss."""
    blobs, losses = [], []
    common = {"dropout": 0.2, "noise": True, "fault": "kill", "rank": "1"}
    for name, at, every in (("plain", "never", 0), ("disturbed", "7", 1)):
        settings = {**common, "at": at, "once": str(tmp_path / "once")}
        prepared = make_setup(
            "Faulty", settings, zero_stage=3, readers=readers, checkpoint_steps=every
        )
        run_id = f"mid-round-{name}-{readers}"
        warm_datacenter.open(run_id, prepared)
        trained, blob = warm_datacenter.train(run_id, 0, 9, hand_back=True)
        blobs.append(blob)
        losses.append(trained.training["loss"])
    assert blobs[0] == blobs[1]
    assert losses[0] == losses[1]
    (event,) = trained.events
    assert trained.profile["restarts"] == 1
    # Its seventh loss is that of the seventh step; the checkpoint after the sixth may be missing.
    assert re.search(r"replaced in \d+\.\d s; .* resumed steps 0 to 9 after step [56]$", event)
    kept = sorted(path.name for path in (warm_datacenter.service.state / run_id).iterdir())
    assert [name for name in kept if not name.startswith("data-")] == ["positions.json", "step-9"]


def test_a_round_is_saved_when_machines_are_taken_away_and_resumed(
    warm_datacenter: Any, make_setup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that cannot end in time is saved, and resumed when the machines are back."""
    # Saving begins at once, with all the time that a busy machine needs for it.
    monkeypatch.setattr(isthmus_datacenter.service.service, "SAVING_SECONDS", 200.0)
    hurry = tmp_path / "hurry"
    settings = {"dropout": 0.2, "unhurried": str(hurry), "fault": "none"}
    prepared = make_setup("Faulty", settings, ranks=0, zero_stage=3, steps=60)
    strategy = prepared.job.strategy.model_copy(update={"policy": "datacenter"})
    job = prepared.job.model_copy(update={"rounds": 1, "strategy": strategy})
    store = Store.create(tmp_path / "run", job, HERE)

    async def run() -> bytes:
        link = Link(job.time.lease_seconds)
        address = f"127.0.0.1:{await link.start()}"
        working = asyncio.Event()

        class Started(ParticipantListener):
            def progressed(self, name, progress):
                if progress.steps:
                    working.set()

        link.listeners.attach(Started())
        coordinator = Coordinator(RunParts.of(store, link))
        running = asyncio.create_task(coordinator.run())
        try:
            service = DatacenterService("dc", 2, tmp_path / "state")
            serving = asyncio.create_task(service.serve(address))
            await working.wait()
            service.leave(200.0)
            await serving
            hurry.touch()
            service = DatacenterService("dc", 2, tmp_path / "state")
            serving = asyncio.create_task(service.serve(address))
            await running
            return bytes(coordinator.model.payload)
        finally:
            for task in (serving, running):
                task.cancel()
            await asyncio.gather(serving, running, return_exceptions=True)
            await link.stop()

    model = asyncio.run(run())
    (row,) = read_report(store).to_json()["rounds"]
    store.close()
    assert row["attempt"] == 2  # repeated only after the datacenter was back
    assert re.fullmatch(
        r"resumed steps 0 to 60 after step \d+, saved by an earlier attempt",
        row["receipts"][0]["reason"],
    )
    warm_datacenter.open("not-taken", prepared)
    sent = bytes(
        prepared.layout.encode(prepared.layout.gather(build_model(prepared.task, job.seed)))
    )
    assert warm_datacenter.train("not-taken", 0, 60, sent, hand_back=True)[1] == model


def test_a_damaged_checkpoint_is_refused(warm_datacenter: Any, make_setup: Any) -> None:
    prepared = make_setup("Table", zero_stage=3, checkpoint_steps=1)
    folder = warm_datacenter.service.state / "damaged"
    warm_datacenter.open("damaged", prepared)
    warm_datacenter.train("damaged", 0, 2)
    step = folder / "step-2"
    names = sorted(path.name for path in step.iterdir() if path.suffix != ".sha256")
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "digests.json"]
    for name in names:
        whole = (step / name).read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        for content in (flipped, whole[:-1], b""):
            (step / name).write_bytes(content)
            warm_datacenter.open("damaged", prepared)  # nothing is in memory any more
            with pytest.raises(UserError, match=rf"{name}.* is damaged: .*isthmus runs rollback"):
                warm_datacenter.train("damaged", 2, 4)
        (step / name).write_bytes(whole)
    warm_datacenter.open("damaged", prepared)
    trained, blob = warm_datacenter.train("damaged", 2, 4, hand_back=True)
    assert trained.steps == 2
    assert blob
