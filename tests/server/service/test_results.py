"""An operator fetches the results of a job over mutual TLS."""

import asyncio
import hashlib
import json
import shutil

import pytest
from click.testing import CliRunner

from isthmus.errors import UserError
from isthmus_privacy.dp.ledger import Ledger
from isthmus_server.cli.operators import fetch
from isthmus_server.storage import audit


async def command(operated, *arguments):
    """Output of `isthmus fetch`; its error is raised."""
    words = [*map(str, arguments), "--state", str(operated.me.directory)]
    result = await asyncio.to_thread(CliRunner().invoke, fetch, words)
    if result.exception is not None:
        raise result.exception
    return result.output


async def test_the_results_of_a_job_arrive_whole_or_not_at_all(operated, tmp_path):
    operated.gate.set()
    id_ = await operated.submit(operated.job())
    with pytest.raises(Exception, match=rf"{id_} has (not begun|no final model yet)"):
        await command(operated, id_, "--output", tmp_path / "early")
    await operated.devices()
    assert await operated.ended(id_) == "finished"
    folder = tmp_path / "fetched"
    await command(operated, id_, "--output", folder)
    report = json.loads((folder / "report.json").read_text())
    model = (folder / "model.safetensors").read_bytes()
    assert len(report["rounds"]) == 2
    assert hashlib.sha256(model).hexdigest() == report["final"]["model_sha256"]
    actions = [(entry.by, entry.action, entry.details) for entry in audit.read(operated.state)]
    assert ("operator me", "fetch", {"job": id_, "what": "model"}) in actions

    written = operated.state / "runs" / id_ / "model.safetensors"
    written.write_bytes(model[:-1] + b"?")
    with pytest.raises(Exception, match="is not the one that was written"):
        await command(operated, id_, "--output", folder)
    assert (folder / "model.safetensors").read_bytes() == model
    with pytest.raises(UserError, match="is not the id of a job"):
        await command(operated, f"../{id_}")


async def test_a_result_above_the_limit_is_refused_before_it_is_sent(
    operated, tmp_path, monkeypatch
):
    operated.gate.set()
    id_ = await operated.submit(operated.job("rounds=1"))
    await operated.devices()
    assert await operated.ended(id_) == "finished"
    monkeypatch.setattr("isthmus_server.cli.operators._MB", 100)
    with pytest.raises(UserError, match=rf"the report of {id_} has .* MB; allow"):
        await command(operated, id_, "--output", tmp_path / "small", "--max-mb", 1)
    assert list((tmp_path / "small").iterdir()) == []


async def test_the_jobs_of_a_server_share_the_ledger_of_their_population(operated):
    """Its budget is about what all of them have spent."""
    operated.gate.set()
    private = ("privacy.mechanism=gaussian", "privacy.epsilon=30", "privacy.delta=0.01")
    id_ = await operated.submit(operated.job("rounds=1", *private))
    await operated.devices()
    assert await operated.ended(id_) == "finished"
    ledger = Ledger.read(operated.state / "privacy" / "devices.ledger")
    (entry,) = ledger.entries.values()
    assert (entry.charge.round, entry.outcome) == (1, "committed")
    assert ledger.of_run(entry.charge.run) == [entry]


async def test_a_job_is_refused_by_a_ledger_that_lacks_what_another_job_has_charged(
    operated, tmp_path
):
    """The new job has charged nothing itself, so that its own ledger cannot say it."""
    operated.gate.set()
    private = ("privacy.mechanism=gaussian", "privacy.epsilon=30", "privacy.delta=0.01")
    private += ("privacy.noise=2",)  # with which there is a budget for both
    first = await operated.submit(operated.job("rounds=1", *private))
    await operated.devices()
    assert await operated.ended(first) == "finished"
    newer = shutil.copytree(operated.state / "privacy", tmp_path / "newer")
    shutil.rmtree(operated.state / "privacy")
    second = await operated.submit(operated.job("rounds=1", "seed=1", *private), "two")
    assert await operated.ended(second) == "failed"
    reason = operated.runner.queue.get(second).reason
    assert f"is missing and had 1 of 1 charges of the run in {operated.state}" in reason
    assert f"runs/{first}, the first of round 1 attempt 1, epsilon " in reason
    shutil.copytree(newer, operated.state / "privacy", dirs_exist_ok=True)
    operated.runner.resume(second)
    assert await operated.ended(second) == "finished"
    ledger = Ledger.read(operated.state / "privacy" / "devices.ledger")
    assert len({entry.charge.run for entry in ledger.entries.values()}) == 2
