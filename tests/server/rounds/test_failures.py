"""Failed attempts are repeated, recorded and paid for, and a run that cannot continue says why."""

import asyncio
import errno
import io
import json
import shutil
import sqlite3

import pytest
import torch
from rich.console import Console
from tests.server.rounds.policies import TRANSFER, WAITS, write_policy
from tests.server.rounds.results import LAYOUT

from isthmus.errors import TaskError, UserError
from isthmus_server.read.report.progress import ProgressView
from isthmus_server.read.report.report import Report, read_report, show
from isthmus_server.regimes.datacenter import DatacenterRegime
from isthmus_server.rounds import concurrent_regimes
from isthmus_server.rounds import coordinator as coordinator_module
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import (
    EventStream,
    RoundCommitted,
)


async def test_a_failed_attempt_is_repeated_and_paid_for(deployment):
    await deployment.start()
    deployment.faults["b"][2, 1] = "no power"
    output = io.StringIO()
    events = EventStream()
    with ProgressView(Console(file=output, width=200)) as view:
        events.subscribe(view)
        report, final = await deployment.run("run", events=events)
    # Otherwise later time limits end in CancelledError before Python 3.11.4.
    assert asyncio.current_task().cancelling() == 0
    assert report["status"] == "finished"
    (failed,) = report["failed_attempts"]
    assert (failed["round"], failed["attempt"]) == (2, 1)
    assert "3 are needed (federated.quorum)" in failed["error"]
    assert "b: no power" in failed["error"]
    assert [receipt["participant"] for receipt in failed["receipts"]] == list(deployment.names)
    assert [(row["round"], row["attempt"]) for row in report["rounds"]] == [(1, 1), (2, 2), (3, 1)]
    assert failed["cost"]["price"] == 3.0

    progress = output.getvalue()
    assert "round 2, try 1 failed" in progress
    assert f"sha256  {final.model_sha256}" in progress
    output = io.StringIO()
    show(Report.from_json(report), Console(file=output, width=200))
    page = output.getvalue()
    assert "2 try 2" in page
    assert "round 2: b rejected: no power" in page
    assert "cost 12" in page

    deployment.faults["b"].clear()
    _, undisturbed = await deployment.run("undisturbed")
    assert undisturbed.model_sha256 == final.model_sha256


async def test_a_round_that_keeps_failing_ends_the_run_with_one_sentence(deployment):
    await deployment.start()
    deployment.faults["c"] |= {(1, 1): "no power", (1, 2): "no power"}
    store = deployment.create_run("run", "attempts=2")
    with pytest.raises(UserError) as caught:
        await Coordinator(RunParts.of(store, deployment.link)).run()
    sentence = str(caught.value)
    assert sentence.startswith("round 1 failed 2 times; the last time because: ")
    assert "c: no power" in sentence
    report = read_report(store).to_json()
    assert (report["status"], report["reason"], report["final"]) == ("failed", sentence, None)
    assert len(report["failed_attempts"]) == 2
    assert store.run_state().spent == 6.0

    again = deployment.reopen(store)
    await Coordinator(RunParts.of(again, deployment.link)).run()
    assert read_report(again).to_json()["status"] == "finished"
    assert read_report(again).to_json()["rounds"][0]["attempt"] == 3


async def test_a_run_directory_that_cannot_be_written_is_one_sentence(deployment):
    await deployment.start()
    store = deployment.create_run("run")
    coordinator = Coordinator(RunParts.of(store, deployment.link))

    def lose(event):
        if isinstance(event, RoundCommitted):
            shutil.rmtree(store.checkpoints.directory)

    coordinator.events.subscribe(lose)
    with pytest.raises(UserError, match=r"could not be used: .*model-000002.* repair it; then"):
        await coordinator.run()
    assert store.status()[0] == "failed"
    assert len(read_report(store).to_json()["rounds"]) == 1


async def test_a_model_that_cannot_be_fetched_is_a_failed_attempt_in_the_log(run_with_datacenter):
    store, coordinator, datacenter = await run_with_datacenter(
        "strategy.policy=alternate", "rounds=2"
    )
    datacenter.failing_exports = 1
    await coordinator.run()
    (failed,) = read_report(store).to_json()["failed_attempts"]
    assert (failed["round"], failed["error"]) == (2, "dc: the disk is full")
    assert [receipt["participant"] for receipt in failed["receipts"]] == ["dc"]
    (planned,) = store.log.connection.execute("SELECT planned FROM attempts WHERE state='failed'")
    planned = json.loads(planned[0])
    assert (planned["invited"], planned["datacenters"]) == ([], ["dc"])  # only it was asked
    assert read_report(store).to_json()["rounds"][1]["attempt"] == 2


async def test_a_failure_of_one_regime_fails_the_hybrid_attempt(run_with_datacenter, deployment):
    store, coordinator, datacenter = await run_with_datacenter(
        "strategy.policy=hybrid", "rounds=1", "attempts=1"
    )
    deployment.faults["a"][1, 1] = "no power"
    with pytest.raises(UserError, match="a: no power"):
        await coordinator.run()
    assert not datacenter.requests[-1].close.finished  # the run can be resumed
    (failed,) = read_report(store).to_json()["failed_attempts"]
    assert {receipt["participant"] for receipt in failed["receipts"]} >= set(deployment.names)


async def test_a_failure_that_no_other_attempt_changes_decides(
    run_with_datacenter, deployment, monkeypatch
):
    """A full disk is noticed while the attempt is cancelled because of a device."""

    async def train_until_cancelled(*_):
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError(errno.ENOSPC, "No space left on device", "spool")

    store, coordinator, _ = await run_with_datacenter("strategy.policy=hybrid", "rounds=1")
    monkeypatch.setattr(DatacenterRegime, "train", train_until_cancelled)
    deployment.faults["a"][1, 1] = "no power"
    with pytest.raises(UserError, match=r"could not be used: .*No space left on device"):
        await coordinator.run()
    assert store.status()[0] == "failed"


async def test_an_attempt_has_ended_when_its_run_is_cancelled_again_and_again():
    """What still cleans up may use the model, which is freed afterwards."""
    cleaned = []
    may_end = asyncio.Event()

    async def clean_up():
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()
            cleaned.append(True)

    tasks = [asyncio.create_task(clean_up()) for _ in range(2)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    waiting = asyncio.create_task(concurrent_regimes._end_of(tasks))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert cleaned == [True, True]


async def test_devices_are_not_asked_to_train_without_a_usable_gradient(
    run_with_datacenter, planned
):
    store, coordinator, datacenter = await run_with_datacenter(*planned([TRANSFER]), "attempts=1")
    datacenter.gradient = torch.full((LAYOUT.size,), float("nan"))
    with pytest.raises(UserError, match="its gradient is not finite"):
        await coordinator.run()
    (row,) = read_report(store).to_json()["failed_attempts"]
    assert [receipt["participant"] for receipt in row["receipts"]] == ["dc"]


async def test_a_run_whose_elapsed_time_cannot_be_stored_fails(deployment, tmp_path, monkeypatch):
    await deployment.start()
    policy = write_policy(tmp_path, "waits_briefly", WAITS.format(seconds=0.02, until=0.1))
    store = deployment.create_run("run", policy, "budget=9")
    monkeypatch.setattr(coordinator_module, "SAVE_ELAPSED_SECONDS", 0.01)

    def full(elapsed):
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    store.save_elapsed = full
    with pytest.raises(UserError, match=r"run.sqlite cannot be used \(.* is full\); free space on"):
        await Coordinator(RunParts.of(store, deployment.link)).run()
    assert store.status()[0] == "failed"


HALF = """
def model(self):
    return nn.Linear(4, 3).to(torch.float16)
"""


SUMMED = "federated.secure_aggregation=true"


async def test_half_precision_is_refused_before_devices_are_asked_for_a_sum(deployment):
    await deployment.start(HALF)
    deployment.link.enrolments.certified = True
    store = deployment.create_run("run", SUMMED)
    with pytest.raises(TaskError, match="'bias' is of type float16, and devices hide"):
        RunParts.of(store, deployment.link)


@pytest.mark.parametrize(
    ("certified", "settings"),
    [
        (False, [SUMMED]),
        (True, ["federated.secure_aggregation=false"]),
        (True, [SUMMED, "strategy.policy=datacenter"]),
    ],
)
async def test_half_precision_is_trained_without_such_sums(deployment, certified, settings):
    await deployment.start(HALF)
    deployment.link.enrolments.certified = certified
    store = deployment.create_run("run", *settings)
    RunParts.of(store, deployment.link).budgets.close()
