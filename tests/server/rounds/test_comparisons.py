"""Devices compare models for a policy: the result, its price, and what a crash leaves."""

import itertools
import statistics

import pytest
from tests.server.deployment import Killed, round_of
from tests.server.rounds.policies import COMPARES_MODELS, write_policy
from tests.server.rounds.results import LAYOUT, read_model
from tests.server.waiting import wait_until

from isthmus.errors import TaskError
from isthmus.task import Participant, load_task, paired_scores
from isthmus.task.paired_scores import comparisons_run_id
from isthmus.wire import link_pb2
from isthmus_clients.training.model_scores import score_each
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundCommitted
from isthmus_server.transport.inprocess import InProcessLink
from isthmus_simulation.devices.device import devices_of
from isthmus_simulation.devices.fleet import VirtualFleet

MODELS = ("initial", "current", "initial+current")


@pytest.fixture
def comparing(deployment, tmp_path):
    """Job keys of a policy that compares models before the second round."""

    def comparing(devices=3, models=MODELS):
        source = COMPARES_MODELS.format(devices=devices, models=models)
        return (write_policy(tmp_path, "compares", source),)

    return comparing


class FailsToScore:
    """A device that fails its first `times` requests to score; always if negative."""

    def __init__(self, device, times):
        self.device = device
        self.times = times
        self.identity, self.welcomed = device.identity, device.welcomed
        self.buffer, self.acknowledged, self.cancel = (
            device.buffer,
            device.acknowledged,
            device.cancel,
        )

    async def work(self, request, model, progress):
        if request.WhichOneof("work") == "score" and self.times:
            self.times -= 1
            raise TaskError("the battery is empty")
        return await self.device.work(request, model, progress)


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_a_comparison_equals_the_scores_computed_directly(
    deployment, comparing, tmp_path, secure
):
    await deployment.start(names=tuple("abcd"))
    store = deployment.create_run("run", *comparing(4), f"federated.secure_aggregation={secure}")
    first = {}

    def keep_model(event):
        if isinstance(event, RoundCommitted) and event.record.round == 1:
            path = store.directory / "checkpoints/model-000001.safetensors"
            first["current"] = read_model(path)

    coordinator = Coordinator(RunParts.of(store, deployment.link))
    coordinator.events.subscribe(keep_model)
    await coordinator.run()
    first["initial"] = coordinator.model.initial()
    task = load_task("task.py:Learn", {}, base=tmp_path)
    encoded = [LAYOUT.encode(first["initial"]), LAYOUT.encode(first["current"])]
    by_device = [
        score_each(
            task,
            task.model(),
            LAYOUT,
            task.local_data(Participant(name=who, regime="federated")),
            7,
            encoded,
            [[0], [1], [0, 1]],
        )
        for who in "abcd"
    ]
    by_model = dict(zip(MODELS, zip(*by_device, strict=True), strict=True))

    row = read_report(store).to_json()["rounds"][1]
    (comparison,) = row["comparisons"]
    result = comparison["result"]
    assert (result["devices"], tuple(result["models"])) == (4, MODELS)
    for name in MODELS:
        differences = [b - a for a, b in zip(by_model["initial"], by_model[name], strict=True)]
        error = statistics.stdev(differences) / 4**0.5
        assert result["score"][name] == pytest.approx(statistics.mean(by_model[name]), abs=1e-6)
        assert result["difference"][name] == pytest.approx(statistics.mean(differences), abs=1e-6)
        assert result["standard_error"][name] == pytest.approx(error, abs=1e-4)
    assert row["reason"] == "devices like current"
    assert [receipt["status"] for receipt in comparison["receipts"]] == ["accepted"] * 4
    # Four devices scored three models, which came as two vectors.
    assert comparison["price"] == result["price"] == pytest.approx(4 * 3 * 0.02)
    assert row["cost"]["price"] == pytest.approx(3 + comparison["price"])
    assert comparison["receipts"][0]["bytes_out"] == 2 * LAYOUT.nbytes
    assert coordinator.state.spent == pytest.approx(9 + comparison["price"])


async def test_scores_that_no_devices_have_are_in_no_comparison(deployment, comparing, monkeypatch):
    """One device makes the standard errors zero, once, so that each difference is significant."""
    vector_of = paired_scores.score_vector
    calls = itertools.count()

    def sent_by_liar(scores):
        vector = vector_of(scores)
        if next(calls) == 0:
            vector[2 * len(scores) - 1 :] = -1
        return vector

    monkeypatch.setattr(paired_scores, "score_vector", sent_by_liar)
    await deployment.start(names=tuple("abcd"))
    store = deployment.create_run("run", *comparing(4), "federated.secure_aggregation=true")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    failed, answered = read_report(store).to_json()["rounds"][1]["comparisons"]
    assert "the sum of the scores is one that devices cannot have: the mean sq" in failed["error"]
    assert min(answered["result"]["standard_error"][name] for name in MODELS[1:]) > 0


async def test_a_policy_observes_its_past_comparisons(deployment, comparing):
    await deployment.start()
    store = deployment.create_run("run", *comparing())
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    await coordinator.run()
    past = coordinator.parts.limits.observe().history
    assert [len(round_.comparisons) for round_ in past] == [0, 1, 0]
    assert past[1].comparisons[0].models == MODELS


@pytest.mark.parametrize("when", ["asked", "unmasked", "compared", "planned"])
async def test_a_run_killed_around_a_comparison_resumes_to_the_same_bytes(
    deployment, comparing, when
):
    await deployment.start(names=tuple("abcde"))
    settings = ("federated.clients=5", *comparing())
    uninterrupted, final = await deployment.run("whole", *settings)
    store = deployment.create_run("killed", *settings)

    def kill(event):
        if event.kind == when and round_of(event) == 2:
            raise Killed

    coordinator = Coordinator(RunParts.of(store, deployment.link))
    coordinator.events.subscribe(kill)
    if when == "asked":
        begin_comparison = store.begin_comparison

        def die(*values):
            begin_comparison(*values)
            raise Killed

        store.begin_comparison = die
    if when == "unmasked":

        def lose_record(record):
            raise Killed

        store.end_comparison = lose_record
    with pytest.raises(Killed):
        await coordinator.run()
    again = deployment.reopen(store)
    resumed = Coordinator(RunParts.of(again, deployment.link))
    assert (await resumed.run()).model_sha256 == final.model_sha256
    rows, expected_rows = read_report(again).to_json()["rounds"], uninterrupted["rounds"]
    results = [[comparison["result"] for comparison in row["comparisons"]] for row in rows]
    assert results == [
        [comparison["result"] for comparison in row["comparisons"]] for row in expected_rows
    ]
    assert resumed.state.spent == pytest.approx(sum(row["cost"]["price"] for row in expected_rows))
    attempts = [comparison["attempt"] for comparison in rows[1]["comparisons"]]
    assert attempts == ([2] if when in ("asked", "unmasked") else [1])


async def test_a_run_goes_on_without_a_device_that_has_unmasked_a_comparison(deployment, comparing):
    """The others may not unmask another sum over these models; the policy decides without one."""
    await deployment.start(names=tuple("abcde"))
    settings = ("federated.clients=5", "time.join_seconds=3", "attempts=2", *comparing())
    store = deployment.create_run("killed", *settings)

    def lose_record(record):
        raise Killed

    store.end_comparison = lose_record
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    with pytest.raises(Killed):
        await coordinator.run()
    again = deployment.reopen(store)
    (unmasked,) = again.unmaskings.about(comparisons_run_id(again.run_id), 1, None)
    deployment.link.disconnect(min(unmasked.devices), "its owner removed it")
    await Coordinator(RunParts.of(again, deployment.link)).run()
    report = read_report(again).to_json()
    assert report["status"] == "finished"
    row = report["rounds"][1]
    assert "could not compare the models" in row["reason"]
    assert min(unmasked.devices) in row["comparisons"][-1]["error"]


async def test_a_failed_comparison_is_repeated_and_paid_for(deployment, comparing, network):
    await deployment.start(names=("a", "b"))
    deployment.unable = FailsToScore(deployment.device("c"), 1)
    network.dial(deployment.unable, "c")
    await wait_until(lambda: "c" in deployment.link.peers)
    report, _ = await deployment.run("run", *comparing())
    failed, repeated = report["rounds"][1]["comparisons"]
    assert (failed["number"], failed["attempt"], repeated["attempt"]) == (1, 1, 2)
    assert failed["result"] is None
    assert "c: the battery is empty" in failed["error"]
    assert [receipt["participant"] for receipt in failed["receipts"]] == ["a", "b", "c"]
    assert report["rounds"][1]["cost"]["price"] == pytest.approx(
        3 + failed["price"] + repeated["price"]
    )


async def test_a_comparison_that_keeps_failing_is_refused_to_the_policy(
    deployment, comparing, network
):
    await deployment.start(names=("a", "b"))
    network.dial(FailsToScore(deployment.device("c"), -1), "c")
    await wait_until(lambda: "c" in deployment.link.peers)
    report, _ = await deployment.run("run", *comparing(), "attempts=2")
    row = report["rounds"][1]
    assert row["reason"].startswith(
        "devices could not compare the models in 2 tries; the last time because: secure "
        "aggregation stopped: "
    )
    assert [comparison["ended"] for comparison in row["comparisons"]] == [False, True]
    assert [comparison["result"] for comparison in row["comparisons"]] == [None, None]
    assert report["status"] == "finished"


@pytest.mark.parametrize("secure", ["false", "true"])
async def test_virtual_devices_compare_models(deployment, comparing, write_task, secure):
    write_task()
    link = InProcessLink()
    for device in devices_of(VirtualFleet(5)):
        link.join(device.participant.name, link_pb2.CLIENT, device)
    deployment.link = link
    aggregation = f"federated.secure_aggregation={secure}"
    report, _ = await deployment.run("run", *comparing(4), aggregation)
    row = report["rounds"][1]
    assert row["comparisons"][0]["result"]["devices"] == 4
    assert row["reason"] == "devices like current"
