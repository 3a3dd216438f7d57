"""The best model of a run by a metric: kept, delivered, and a reason to end the run."""

import math

import pytest
import torch
from tests.server.rounds.results import stored_models
from tests.server.strategy.observations import past_round

from isthmus.errors import JobError
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundCommitted
from isthmus_server.strategy.observation import best_round

# The loss of these runs falls in each round, so that a highest loss is that of the first round.
HIGHEST_LOSS = 'evaluation.keep_best={ name = "loss", mode = "max" }'
DELIVERED = (HIGHEST_LOSS, "evaluation.deliver=best")


@pytest.mark.parametrize("averaged", [(), ("strategy.served_average=0.9",)])
async def test_the_best_model_is_delivered(deployment, tmp_path, averaged):
    await deployment.start()
    report, final = await deployment.run("run", *DELIVERED, *averaged)
    first, *_, last = report["rounds"]
    assert (final.round, final.best) == (1, True)
    assert final.metrics == first["metrics"] != last["metrics"]
    assert final.model_sha256 == first["model_sha256"] != last["model_sha256"]


async def test_the_last_model_is_delivered_unless_asked(deployment):
    await deployment.start()
    report, final = await deployment.run("run", HIGHEST_LOSS)
    assert (final.round, final.best) == (3, False)
    assert final.model_sha256 == report["rounds"][-1]["model_sha256"]


@pytest.mark.parametrize("round_", [1, 2, 3])
async def test_a_killed_run_delivers_the_same_best_model(deployment, round_):
    await deployment.start()
    _, final = await deployment.run("whole", *DELIVERED)
    store = deployment.create_run("killed", *DELIVERED)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    again = await deployment.run_until_killed(coordinator, RoundCommitted, round_)
    resumed = await Coordinator(RunParts.of(again, deployment.link)).run()
    assert (resumed.round, resumed.model_sha256) == (1, final.model_sha256)


async def test_the_models_of_a_datacenter_are_compared_too(run_with_datacenter, deployment):
    store, coordinator, _ = await run_with_datacenter(*DELIVERED, "strategy.policy=datacenter")
    final = await coordinator.run()
    rows = read_report(store).to_json()["rounds"]
    assert all(row["model_sha256"] for row in rows)  # none stays in the datacenter only
    losses = [row["metrics"]["loss"] for row in rows]
    assert final.model_sha256 == rows[losses.index(max(losses))]["model_sha256"]


async def test_a_round_can_start_from_the_best_model(deployment, planned):
    """A device's epoch is one batch here: from the same model it goes the same way."""
    await deployment.start()
    plans = planned([{}, {"keep": {"second": "current"}}, {"start": "best"}])
    store = deployment.create_run("run", HIGHEST_LOSS, *plans)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    models = stored_models(store)
    second, third = models["model-000002.safetensors"], models["model-000003.safetensors"]
    torch.testing.assert_close(third, second, atol=1e-5, rtol=0)


async def test_a_run_ends_when_its_metric_no_longer_improves(deployment):
    await deployment.start()
    report, final = await deployment.run("run", *DELIVERED, "evaluation.patience=2", "rounds=9")
    assert len(report["rounds"]) == 3
    loss = report["rounds"][0]["metrics"]["loss"]
    assert report["reason"] == (
        f"2 evaluated rounds in a row did not improve loss, which was best in round 1 ({loss:.4g})"
    )
    assert final.round == 1


@pytest.mark.parametrize(
    ("name", "methods", "sentence"),
    [
        ("f1", "pass", r"is not a held-out metric"),
        ("devices_loss", "pass", "is measured on devices, and evaluation.devices is 0; set it"),
        ("loss", "eval_data = isthmus.Task.eval_data", "follows a metric, and nothing evaluates"),
        (
            "loss",
            "def eval_data(self):\n    return None",
            r"follows a metric, and nothing evaluates the model: eval_data\(\) returned None",
        ),
    ],
)
async def test_a_metric_that_no_round_will_have_is_refused(deployment, name, methods, sentence):
    await deployment.start(methods)
    unknown = f"evaluation.keep_best={{ name = '{name}', mode = 'max' }}"
    with pytest.raises(JobError, match=rf"^evaluation\.keep_best\.name='{name}' {sentence}"):
        await deployment.run("run", unknown)


async def test_a_device_metric_that_does_not_exist_is_refused(deployment):
    await deployment.start("def validation_data(self, participant):\n    return rows(9, seed=1)")
    rules = ("evaluation.devices=3", "evaluation.keep_best={name='devices_f1', mode='max'}")
    with pytest.raises(JobError, match=r"keep_best\.name='devices_f1' is not a held-out metric"):
        await deployment.run("run", *rules)


@pytest.mark.parametrize(
    ("mode", "min_change", "values", "best"),
    [
        ("max", 0.0, [0.5, 0.7, 0.7, 0.6], 2),
        ("min", 0.0, [0.5, 0.7, 0.4, 0.4], 3),
        ("max", 0.1, [0.5, 0.55, 0.7, 0.75], 3),
        ("max", 0.0, [math.nan, 0.5, math.nan], 2),
        ("max", 0.0, [None, 0.5, None], 2),
        ("max", 0.0, [None, math.nan], None),
    ],
)
def test_which_round_is_the_best(make_job, mode, min_change, values, best):
    job = make_job(
        f'evaluation.keep_best={{ name = "accuracy", mode = "{mode}", min_change = {min_change} }}'
    )
    history = [
        past_round(round_, "federated", **({} if value is None else {"accuracy": value}))
        for round_, value in enumerate(values, 1)
    ]
    found = best_round(history, job.evaluation.keep_best)
    assert (found and found.round) == best


@pytest.mark.parametrize("key", ["patience=3", "deliver=best"])
def test_keys_that_need_a_metric_say_so(make_job, key):
    with pytest.raises(JobError, match="needs the metric that decides"):
        make_job(f"evaluation.{key}")
