"""An attempt that fails after its model was merged changes nothing: not the model, and no state."""

import errno
import sqlite3

import pytest
import torch
from tests.outside_package import OutsidePackage
from tests.server.deployment import SimulatedDatacenter

from isthmus.errors import RoundFailed, TaskError, UserError
from isthmus.wire import link_pb2
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.attempt_log import AttemptLog
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.measurements.evaluation import RoundEvaluator
from isthmus_server.rounds.model_publication import ModelPublication
from isthmus_server.rounds.model_versions import ModelVersions
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.rounds.running_statistics import RunningStatistics
from isthmus_server.storage.checkpoints import Checkpoints
from isthmus_server.storage.store import Store

NORMALISED = """
def model(self):
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
"""

RULE = '''
"""The mean of the updates, plus half of the last result."""

import torch


class Momentum:
    needs_all = True

    def __init__(self, federated):
        self.last = None

    def begin(self, facts):
        return MomentumRound(self.last)

    def commit(self, state):
        self.last = state

    def reset(self):
        self.last = None

    def export_state(self):
        return ({} if self.last is None else {"last": self.last}), {}

    def import_state(self, tensors, values):
        self.last = tensors.get("last")


class MomentumRound:
    def __init__(self, last):
        self.last = last
        self.vectors = []

    def add(self, update):
        self.vectors.append(update.vector)

    def result(self):
        self.state = torch.stack(self.vectors).mean(dim=0)
        if self.last is not None:
            self.state += 0.5 * self.last
        return self.state
'''

ADAM = (
    "strategy.server_optimizer.name=Adam",
    "strategy.server_optimizer.options={lr=0.05}",
)
RECOMPUTED = ("datacenter.ranks=1", "exchange.buffers='recompute'", "attempts=3")
WITH_RULE = (
    "federated.secure_aggregation=false",
    "federated.aggregation=momentum",
)
SECURE = ("federated.download_bits=8",)

POINTS = {
    "statistics": (RunningStatistics, "recompute"),
    "publication": (ModelPublication, "current"),
    "evaluation": (RoundEvaluator, "evaluate"),
    "model file": (Checkpoints, "write_model"),
    "optimizer file": (ModelVersions, "write_optimizer"),
    "record": (AttemptLog, "commit"),
    "commit": (Store, "commit"),
}
"""What is called between the merge and the end of the commit."""


@pytest.fixture
def momentum(tmp_path, monkeypatch):
    """The rule `momentum`, of another package."""
    entries = {"isthmus.aggregation_rules/momentum": "Momentum"}
    package = OutsidePackage(tmp_path / "site", f"undone_{tmp_path.name}", RULE, entries)
    with package.on_path(monkeypatch):
        yield


@pytest.fixture
def runs(deployment, network):
    """Runs whose statistics are those of a datacenter; `await runs.begin()` first."""
    return Runs(deployment, network)


class Runs:
    def __init__(self, deployment, network):
        self.deployment = deployment
        self.network = network
        self.failing = set()
        """Rounds whose next statistics fail."""

    async def begin(self):
        await self.deployment.start(NORMALISED)
        layout = Coordinator(
            RunParts.of(
                self.deployment.create_run("layout", *RECOMPUTED, "attempts=1"),
                self.deployment.link,
            )
        ).model.layout
        datacenter = SimulatedDatacenter(layout)
        trained = layout.trained_size
        datacenter.gradient[trained:] = torch.linspace(1, 2, layout.size - trained)

        async def respond(participant, request, model):
            if request.mean_gradient.statistics and request.mean_gradient.round in self.failing:
                self.failing.remove(request.mean_gradient.round)
                raise TaskError("the batch is broken")
            return await datacenter.respond(participant, request, model)

        await self.network.join("dc", respond, role=link_pb2.DATACENTER)

    def coordinator(self, name, *overrides):
        overrides = (*RECOMPUTED, *ADAM, *overrides, "federated.clients=3")
        store = self.deployment.create_run(name, *overrides)
        return Coordinator(RunParts.of(store, self.deployment.link))

    def continued(self, coordinator):
        store = self.deployment.reopen(coordinator.store)
        return Coordinator(RunParts.of(store, self.deployment.link))


def models(coordinator):
    """SHA-256 of each round's model."""
    return [row["model_sha256"] for row in read_report(coordinator.store).to_json()["rounds"]]


@pytest.mark.parametrize("settings", [WITH_RULE, SECURE], ids=["rule", "secure"])
async def test_a_datacenter_that_fails_after_the_merge_changes_nothing(momentum, runs, settings):
    await runs.begin()
    whole = runs.coordinator("whole", *settings)
    final = await whole.run()
    runs.failing = {1, 3}  # before the first commit there is no checkpoint to return to
    disturbed = runs.coordinator("disturbed", *settings)
    again = await disturbed.run()
    report = read_report(disturbed.store).to_json()
    assert [row["attempt"] for row in report["rounds"]] == [2, 1, 2]
    failed = report["failed_attempts"][0]
    assert "the batch is broken" in failed["error"]
    # What devices did for it is paid and counted, though nothing came of it.
    assert failed["cost"]["price"] >= 3  # one for each device
    assert models(disturbed) == models(whole)
    assert again.model_sha256 == final.model_sha256


def fail_once(monkeypatch, point, error, round_, coordinator):
    """Have a step of the round's first attempt fail, when its model is merged."""
    owner, method = POINTS[point]
    original = getattr(owner, method)
    merged = coordinator.parts.merger._merge
    begun = []

    def merge(spec, results):
        merged(spec, results)
        begun.append(spec.round)

    def step(*arguments, **options):
        if begun == list(range(1, round_ + 1)):
            monkeypatch.setattr(owner, method, original)
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(coordinator.parts.merger, "_merge", merge)
    monkeypatch.setattr(owner, method, step)


@pytest.mark.parametrize("round_", [1, 2])
@pytest.mark.parametrize("point", POINTS)
async def test_a_round_that_fails_anywhere_before_its_commit_changes_nothing(
    momentum, runs, monkeypatch, point, round_
):
    await runs.begin()
    whole = runs.coordinator("whole", *WITH_RULE)
    final = await whole.run()

    repeated = runs.coordinator("repeated", *WITH_RULE)
    fail_once(monkeypatch, point, RoundFailed("not now"), round_, repeated)
    again = await repeated.run()
    (failed,) = read_report(repeated.store).failed_attempts
    # Its participants have trained, which is paid for.
    assert {receipt.status for receipt in failed.receipts} == {"accepted"}
    assert failed.cost.price > 0
    assert models(repeated) == models(whole)
    assert again.model_sha256 == final.model_sha256

    full = {
        "commit": sqlite3.OperationalError("database or disk is full"),
        "record": sqlite3.OperationalError("database or disk is full"),
    }.get(point, OSError(errno.ENOSPC, "No space left on device"))
    stopped = runs.coordinator("stopped", *WITH_RULE)
    fail_once(monkeypatch, point, full, round_, stopped)
    with pytest.raises((UserError, sqlite3.Error)), stopped.store.locked():
        await stopped.run()
    assert stopped.store.last_round() == round_ - 1
    continued = runs.continued(stopped)
    assert (await continued.run()).model_sha256 == final.model_sha256
    assert models(continued) == models(whole)


async def test_a_model_that_a_plan_starts_from_is_loaded_anew(momentum, deployment, planned):
    await deployment.start()
    plans = planned([{}, {}, {"start": "initial+current"}])
    settings = (*plans, *ADAM, *WITH_RULE, "strategy.served_average=0.9")
    _, whole = await deployment.run("whole", *settings)
    deployment.faults["b"][3, 1] = "no power"
    report, final = await deployment.run("disturbed", *settings)
    assert [row["attempt"] for row in report["rounds"]] == [1, 1, 2]
    assert final.model_sha256 == whole.model_sha256


async def test_a_model_that_was_fetched_for_a_failed_attempt_is_fetched_again(
    run_with_datacenter, monkeypatch
):
    store, coordinator, datacenter = await run_with_datacenter(
        "strategy.policy=alternate", "rounds=2", "attempts=2"
    )
    fail_once(monkeypatch, "evaluation", RoundFailed("not now"), 2, coordinator)
    await coordinator.run()
    assert [request.HasField("export") for request in datacenter.requests].count(True) == 2
    report = read_report(store).to_json()
    assert [row["attempt"] for row in report["rounds"]] == [1, 2]
    moved = datacenter.vector - coordinator.model.vector
    assert 0.0 < moved.abs().max() < 0.1
