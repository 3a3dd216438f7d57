"""Devices evaluate the model on their own data: equal to pooled data, and the server sees sums."""

import contextlib
import functools
import io
import itertools
import json
import math

import pytest
import torch
from rich.console import Console
from tests.server.deployment import Killed, SimulatedDatacenter
from tests.server.waiting import wait_until
from torch.utils.data import ConcatDataset

from isthmus.errors import CannotContinue, JobError
from isthmus.task import Participant, load_task
from isthmus.task.measurements.bounded_means import evaluation_vector
from isthmus.task.measurements.evaluation import EvaluationVector
from isthmus.wire import link_pb2
from isthmus_clients.device.own_figures import OwnFigures
from isthmus_server.read.report.report import read_report, show
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.measurements.followed_metrics import check_followed_metrics
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.strategy.loading import load_policy

VALIDATES = """
def validation_data(self, participant):
    return rows(15 + ord(participant.name) % 5, seed=100 + ord(participant.name))

def device_metrics(self):
    return {
        "accuracy": isthmus.Mean(bins=10),
        "confusion": isthmus.Confusion(
            3, of=lambda output, target: (output.argmax(-1), target)
        ),
        "auc": isthmus.BinnedScores(
            of=lambda output, target: (output.softmax(-1)[:, 2], target == 2)
        ),
    }
"""
WITHOUT_CENTRAL = VALIDATES + "\neval_data = isthmus.Task.eval_data\n"
NOT_A_NUMBER = """
def metrics(self, output, target):
    right = (output.argmax(-1) == target).float()
    return {"accuracy": torch.where(target == 2, torch.nan, right)}
"""
CLIPPED = [0, 900, 0, 900]
"""What a device says of its loss: 900 values more, all of which were clipped."""
BEST = "evaluation.keep_best={name='devices_loss', mode='min'}"
NAMES = tuple("abcd")
PRIVACY = 'privacy={mechanism="gaussian", epsilon=1.0, delta=1e-5, clip=1.0}'
SETTINGS = (
    "federated.cohort=4",
    "federated.quorum=3",
    "evaluation.devices=4",
    "evaluation.quorum=4",
    "rounds=1",
    "time.join_seconds=100",  # a loaded machine has the same cohort
)


def measured(folder, model, names):
    """The task's vector, and what the named devices count with a model, int64 (devices, size)."""
    task = load_task("task.py:Learn", {}, base=folder)
    vector, module = EvaluationVector(task), task.model()
    torch.nn.utils.vector_to_parameters(model, [module.bias, module.weight])
    of = [task.validation_data(Participant(name=name, regime="federated")) for name in names]
    pooled = vector.measure(module, ConcatDataset(of), 512)
    return vector, torch.stack([vector.measure(module, each, 7) for each in of]), pooled


async def run(deployment, name, *overrides):
    store = deployment.create_run(name, *SETTINGS, *overrides)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    final = await coordinator.run()
    return store, coordinator, final


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_an_evaluation_on_devices_equals_that_of_their_pooled_data(
    deployment, tmp_path, secure
):
    await deployment.start(WITHOUT_CENTRAL, NAMES)
    store, coordinator, final = await run(
        deployment, "run", f"federated.secure_aggregation={secure}"
    )
    vector, each, pooled = measured(tmp_path, coordinator.model.vector, NAMES)
    (row,) = read_report(store).rounds
    evaluation = row.evaluation
    assert (evaluation.asked, evaluation.devices, evaluation.error) == (4, 4, None)
    assert evaluation.sums == vector.sums(each.sum(0))
    assert evaluation.sums["confusion"] == vector.sums(pooled)["confusion"]
    assert evaluation.sums["auc"] == vector.sums(pooled)["auc"]
    expected = vector.figures(pooled)
    for figure in ("accuracy", "confusion_recall", "auc"):
        assert row.metrics[f"devices_{figure}"] == expected[f"devices_{figure}"]
    loss = row.metrics["devices_loss"]
    assert loss == pytest.approx(expected["devices_loss"], abs=1024 / 2**28)
    assert row.metrics == evaluation.metrics == final.metrics  # there are no central ones
    assert "devices_accuracy_p50" not in row.metrics  # it would be of four devices
    assert row.cost.price == pytest.approx(4 + 4 * 0.02)
    assert coordinator.parts.limits.observe().history[0].metrics == row.metrics


WEIGHTED = """
def metrics(self, output, target):
    error = torch.nn.functional.cross_entropy(output, target, reduction="none")
    return {"perplexity": (error, target * 12.5), "of_each": (error, target + 1)}

def device_metrics(self):
    return {"perplexity": isthmus.Mean(0, 8, weighted=True)}

def validation_data(self, participant):
    return rows(15 + ord(participant.name) % 5, seed=100 + ord(participant.name))

def eval_data(self):
    return torch.utils.data.ConcatDataset(
        [rows(15 + ord(name) % 5, seed=100 + ord(name)) for name in "abcd"]
    )
"""


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_a_weighted_mean_of_devices_is_that_of_all_their_data(deployment, secure):
    """Which is also what the server computes of the same rows, if it has them."""
    await deployment.start(WEIGHTED, NAMES)
    store, _, final = await run(deployment, "run", f"federated.secure_aggregation={secure}")
    (row,) = read_report(store).rounds
    assert row.evaluation.devices == 4
    metrics = final.metrics
    # The steps of the sums of values and weights of four devices.
    assert metrics["devices_perplexity"] == pytest.approx(metrics["perplexity"], rel=1e-8)
    assert abs(metrics["perplexity"] - metrics["of_each"]) > 1e-3  # the weights do matter


async def test_weights_without_a_declaration_are_refused(deployment):
    await deployment.start(WEIGHTED.replace(", weighted=True", ""), NAMES)
    with pytest.raises(CannotContinue, match=r"isthmus\.Mean\(low, high, weighted=True\)}"):
        await run(deployment, "run", "federated.secure_aggregation=false")


def printed(store):
    """What `isthmus report` prints of a run, with its lines joined."""
    console = Console(file=io.StringIO(), width=200)
    show(read_report(store), console)
    return " ".join(console.file.getvalue().split())


async def test_a_job_in_plaintext_can_have_the_figures_of_each_device(deployment, tmp_path):
    await deployment.start(WITHOUT_CENTRAL, NAMES)
    plain = "federated.secure_aggregation=false"
    store, coordinator, final = await run(deployment, "run", plain, "evaluation.per_device=true")
    vector, each, _ = measured(tmp_path, coordinator.model.vector, NAMES)
    report = read_report(store)
    evaluation = report.rounds[0].evaluation
    expected = {name: vector.figures(one) for name, one in zip(NAMES, each, strict=True)}
    assert evaluation.by_device == expected
    assert evaluation.metrics == final.metrics == vector.figures(each.sum(0))
    figures = json.loads(json.dumps(report.to_json()))["rounds"][0]["evaluation"]["by_device"]
    assert figures == expected
    for name in NAMES:
        accuracy = expected[name]["devices_accuracy"]
        assert f"device {name}: devices_accuracy {accuracy:.1%}" in printed(store)
    without, _, _ = await run(deployment, "without", plain)
    assert read_report(without).rounds[0].evaluation.by_device == {}
    assert "device a" not in printed(without)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ((), "do not leave a device with federated.secure_aggregation"),
        (("federated.secure_aggregation=false", "evaluation.devices=0"), "set evaluation.devices"),
        ((PRIVACY,), r"each device's figures, which \[privacy\] hides"),
    ],
)
def test_figures_of_each_device_are_refused_where_they_are_hidden(make_job, settings, reason):
    secure = "federated.secure_aggregation=true"
    with pytest.raises(JobError, match=reason):
        make_job(*SETTINGS, secure, "evaluation.per_device=true", *settings)


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_an_owner_sees_the_figures_of_the_own_device(deployment, tmp_path, secure):
    for name in NAMES:
        (tmp_path / f"state-{name}").mkdir()
        deployment.own_figures[name] = OwnFigures(tmp_path / f"state-{name}")
    await deployment.start(WITHOUT_CENTRAL, NAMES)
    store, coordinator, _ = await run(
        deployment, "run", "rounds=2", f"federated.secure_aggregation={secure}"
    )
    vector, each, _ = measured(tmp_path, coordinator.model.vector, NAMES)
    for name, counts in zip(NAMES, each, strict=True):
        (sentence,) = OwnFigures.read(tmp_path / f"state-{name}").sentences
        figures = vector.figures(counts)
        assert sentence.startswith(f"{store.run_id}, model of round 2: ")
        for figure in ("accuracy", "auc", "confusion_recall", "loss"):
            assert f"{figure} {figures[f'devices_{figure}']:.4g}" in sentence


async def test_central_metrics_stay_and_training_does_not_change(deployment):
    await deployment.start(VALIDATES, NAMES)
    _, _, with_devices = await run(deployment, "with")
    store, _, without = await run(deployment, "without", "evaluation.devices=0")
    central = {key: x for key, x in with_devices.metrics.items() if not key.startswith("devices_")}
    assert central == without.metrics
    assert with_devices.model_sha256 == without.model_sha256
    assert read_report(store).rounds[0].evaluation is None


async def test_groups_are_evaluated_by_themselves(deployment, tmp_path):
    north, south = "abc", "def"
    deployment.groups = {**dict.fromkeys(north, "north"), **dict.fromkeys(south, "south")}
    await deployment.start(WITHOUT_CENTRAL, tuple(north + south))
    settings = (
        "federated.groups={minimum=3}",
        "federated.cohort=6",
        "federated.quorum=5",
        "evaluation.devices=6",
        "evaluation.quorum=6",
    )
    store, coordinator, _ = await run(deployment, "run", *settings)
    (row,) = read_report(store).rounds
    vector, each, _ = measured(tmp_path, coordinator.model.vector, north + south)
    assert row.evaluation.devices == 6
    assert row.evaluation.sums == vector.sums(each.sum(0))
    for name, counts in (("north", each[:3]), ("south", each[3:])):
        assert row.evaluation.groups[name].devices == 3
        assert row.evaluation.groups[name].metrics == vector.figures(counts.sum(0))
    shown = printed(store)
    right = vector.figures(each[:3].sum(0))["devices_accuracy"]
    assert f"group north, 3 devices: devices_accuracy {right:.1%}" in shown
    assert "group south, 3 devices: " in shown


@pytest.mark.parametrize("when", ["evaluating", "committing"])
@pytest.mark.parametrize("secure", ["true", "false"])
async def test_a_run_killed_around_an_evaluation_resumes_to_the_same_metrics(
    deployment, when, secure
):
    """Also one whose sum was unmasked: its devices take part once more, and only together."""
    await deployment.start(WITHOUT_CENTRAL, tuple("abcdef"))
    settings = (
        "federated.clients=6",
        f"federated.secure_aggregation={secure}",
        "rounds=2",
    )
    whole, _, final = await run(deployment, "whole", *settings)
    store = deployment.create_run("killed", *SETTINGS, *settings)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    evaluator, commit = coordinator.parts.evaluator, store.commit
    ask = evaluator._questions.ask

    async def die(question):
        answers = await ask(question)
        if question.number == 2:
            raise Killed
        return answers

    def die_at_commit(record, state):
        if record.round == 2:
            raise Killed
        commit(record, state)

    if when == "evaluating":
        evaluator._questions.ask = die
    else:
        store.commit = die_at_commit
    with pytest.raises(Killed):
        await coordinator.run()
    again = deployment.reopen(store)
    resumed = await Coordinator(RunParts.of(again, deployment.link)).run()
    assert resumed.model_sha256 == final.model_sha256
    rows, expected = read_report(again).rounds, read_report(whole).rounds
    for row, other in zip(rows, expected, strict=True):
        assert (row.metrics, row.evaluation.sums) == (other.metrics, other.evaluation.sums)
    assert rows[1].attempt == 2


async def test_a_device_that_cannot_evaluate_is_not_named_and_not_in_the_sum(deployment, tmp_path):
    """One without validation data, or whose task fails, sends zeros of weight 0."""
    fails = WITHOUT_CENTRAL.replace(
        "    return rows(15",
        "    if participant.name == 'b':\n        return None\n    return rows(15",
    )
    await deployment.start(fails, NAMES)
    store, coordinator, _ = await run(deployment, "run", "evaluation.quorum=3")
    (row,) = read_report(store).rounds
    vector, each, _ = measured(tmp_path, coordinator.model.vector, "acd")
    assert (row.evaluation.asked, row.evaluation.devices) == (4, 3)
    assert row.evaluation.sums == vector.sums(each.sum(0))
    assert row.evaluation.error is None


async def test_a_clipped_loss_is_told_and_decides_about_no_run(deployment, monkeypatch):
    """With a loss in other units all models would be the same, and the first one the best."""
    large = "\ndef loss(self, output, target):\n    return 1e6 * super().loss(output, target)\n"
    await deployment.start(WITHOUT_CENTRAL + large, NAMES)
    store, _, _ = await run(deployment, "run")
    (row,) = read_report(store).rounds
    assert row.metrics["devices_loss_clipped"] > 0
    sentence = "values of devices_loss were not within -1000 to 1000 and were clipped"
    assert sentence in row.evaluation.clipped["devices_loss"]
    for certified in (False, True):
        monkeypatch.setattr(FederatedContext, "certified", certified)
        with pytest.raises(CannotContinue, match=rf"{sentence}; declare bounds .* decides about"):
            await run(deployment, f"best-{certified}", BEST, f"seed={1 + certified}")


async def test_a_loss_that_is_not_a_number_is_in_the_sum_and_not_told_of_a_device(deployment):
    await deployment.start(WITHOUT_CENTRAL + NOT_A_NUMBER, NAMES)
    store, _, _ = await run(deployment, "run")
    (row,) = read_report(store).rounds
    assert math.isnan(row.metrics["devices_accuracy"])
    assert row.metrics["devices_loss"] > 0
    assert row.evaluation.sums["accuracy"][2] > 0


@pytest.mark.parametrize("secure", [True, False])
async def test_counts_that_no_data_have_are_in_no_metric(deployment, monkeypatch, secure):
    """One device sends -1 for every count, once: a mean of all would be nan, or a share above 1."""
    measure = EvaluationVector.measure
    calls = itertools.count()

    def measured_by_liar(vector, *arguments):
        counts = measure(vector, *arguments)
        return -torch.ones_like(counts) if next(calls) == 0 else counts

    monkeypatch.setattr(EvaluationVector, "measure", measured_by_liar)
    await deployment.start(WITHOUT_CENTRAL, NAMES)
    settings = (f"federated.secure_aggregation={str(secure).lower()}", "evaluation.quorum=3")
    store, _, _ = await run(deployment, "run", *settings, "attempts=2")
    (row,) = read_report(store).rounds
    assert 0 <= row.metrics["devices_accuracy"] <= 1
    assert row.metrics["devices_loss"] > 0
    assert row.evaluation.devices == (4 if secure else 3)  # of a second sum, or without the liar


async def dial_with_a_liar(deployment, network, names, lie):
    """Connect devices, of which the first that is asked adds a lie to its counts.

    `lie` is a list for the first counts, or changes the ring's elements of a configuration. Returns
    the names of it, one for each time that it was asked.
    """
    liars = []

    def lying(name, join, attempt, *arguments):
        if attempt.config.whole and name in (liars or [name]):
            liars.append(name)
            attempt.encode = functools.partial(changed, attempt, attempt.encode)
        return join(attempt, *arguments)

    def changed(attempt, encode, *arguments, **options):
        encode(*arguments, **options)
        if callable(lie):
            lie(attempt.config, attempt._encoded.vector)
        else:
            attempt._encoded.vector[: len(lie)] += torch.tensor(lie)

    for name in names:
        device = deployment.device(name)
        secure = device.agent._secure
        secure.join = functools.partial(lying, name, secure.join)
        network.dial(device, name)
    await wait_until(lambda: set(names) <= deployment.link.peers.keys())
    return liars


ENCODED = ("federated.clip=4", "federated.max_examples=1000")
"""No other sum than that of an evaluation has whole numbers."""


def say_that_two_failed(config, vector):
    """Say that two of the other devices could not evaluate."""
    weight = config.size  # then the share of clipped elements, and the figure
    vector[weight] -= 2
    vector[weight + 2] += 2


@pytest.mark.parametrize(
    ("lie", "settings"),
    [([1 << 40], ()), ([1 << 62], ()), (CLIPPED, (BEST,)), (say_that_two_failed, ())],
)
async def test_one_liar_does_not_keep_others_from_evaluating(
    deployment, network, monkeypatch, lie, settings
):
    """It stays, and the devices that are asked with it would give the same sum again."""
    monkeypatch.setattr(FederatedContext, "certified", True)
    await deployment.start(WITHOUT_CENTRAL, ())
    liars = await dial_with_a_liar(deployment, network, "abcdefgh", lie)
    settings = ("federated.clients=0", *ENCODED, "attempts=2", *settings)
    store, _, _ = await run(deployment, "run", *settings)
    (row,) = read_report(store).rounds
    assert len(liars) == 1  # it was asked once
    assert row.evaluation.devices == 4
    assert row.metrics["devices_loss"] > 0


@pytest.mark.parametrize("lie", [1 << 40, 1 << 62])
async def test_one_liar_does_not_keep_others_from_evaluating_by_group(
    deployment, network, monkeypatch, lie
):
    monkeypatch.setattr(FederatedContext, "certified", True)
    north = "abcdefgh"
    south = "ijklmnop"
    deployment.groups = {**dict.fromkeys(north, "north"), **dict.fromkeys(south, "south")}
    await deployment.start(WITHOUT_CENTRAL, ())
    liars = await dial_with_a_liar(deployment, network, north + south, [lie])
    settings = (
        "federated.clients=0",
        "federated.groups={minimum=3}",
        "federated.cohort=8",
        "federated.quorum=6",
        "evaluation.devices=8",
        "evaluation.quorum=8",
    )
    store, _, _ = await run(deployment, "run", *settings, *ENCODED, "attempts=2")
    (row,) = read_report(store).rounds
    assert len(liars) == 1  # it was asked once
    assert row.evaluation.devices == 8
    assert set(row.evaluation.groups) == {"north", "south"}


async def test_a_round_is_kept_when_its_evaluation_fails(deployment):
    fails = WITHOUT_CENTRAL.replace("    return rows(15", "    raise ValueError(7)\n    rows(15")
    await deployment.start(fails, NAMES)
    store, _, final = await run(deployment, "run", "attempts=2")
    (row,) = read_report(store).rounds
    assert row.metrics == final.metrics == {}
    assert "no device had a usable update" in row.evaluation.error
    assert row.evaluation.sums == {}
    assert row.cost.price == pytest.approx(4 + 2 * 4 * 0.02)


async def test_nothing_that_the_server_receives_or_stores_is_a_devices_own_value(
    deployment, network, tmp_path
):
    """The values are found where they must be: in a job that does not hide them."""
    for name in NAMES:
        deployment.own_figures[name] = OwnFigures(None)  # they stay there
    await deployment.start(WITHOUT_CENTRAL, ())
    proxy, port = await network.start_proxy()
    for name in NAMES:
        network.dial(deployment.device(name), name, port)
    await wait_until(lambda: set(NAMES) <= deployment.link.peers.keys())
    for name, secure in (("plain", "false"), ("secure", "true")):
        proxy.received.clear()
        settings = (f"federated.secure_aggregation={secure}", "federated.clients=4")
        store, coordinator, _ = await run(deployment, name, *settings)
        _, each, _ = measured(tmp_path, coordinator.model.vector, NAMES)
        received = bytes(proxy.received)
        stored = b"".join(
            path.read_bytes() for path in store.directory.rglob("*") if path.is_file()
        )
        assert str(each[:, 0].sum().item()).encode() in stored  # the sum is
        for counts in each.tolist():
            sent = link_pb2.Counted(counts=counts).SerializeToString()
            assert (sent in received) == (secure == "false")
            assert b"confusion_recall" not in received  # the name of a figure of its own
            for text in (str(counts[0]), json.dumps(counts)[1:-1]):
                assert text.encode() not in stored + received
            for value in (counts[0], counts[0] + (1 << 50)):
                needle = value.to_bytes(8, "little", signed=True)
                assert needle not in stored + received


async def test_a_task_without_validation_data_is_refused_at_the_start(deployment):
    await deployment.start("pass", NAMES)
    with pytest.raises(JobError, match=r"Learn has no validation_data\(\); add it, or set"):
        await run(deployment, "run")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("strategy.policy=plateau",), "strategy.settings.metric='loss' is not a held-out metric"),
        (("strategy.policy=plateau", "evaluation.devices=0"), "and nothing evaluates the model"),
        (("strategy.policy=adaptive",), "follows the loss on"),
        (
            ("strategy.target_metric={name='accuracy', at_least=0.9}",),
            "strategy.target_metric.name='accuracy' is not a held-out metric",
        ),
    ],
)
async def test_a_policy_that_follows_a_metric_that_no_round_has_is_refused(
    deployment, settings, reason
):
    await deployment.start(WITHOUT_CENTRAL, NAMES)
    with pytest.raises(JobError, match=reason):
        await run(deployment, "run", *settings)


PUBLIC_ONLY = (
    VALIDATES
    + """
eval_data = isthmus.Task.eval_data
def public_eval(self):
    return rows(9, seed=1)
"""
)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            ("strategy.policy=plateau",),
            r"^strategy.settings.metric='loss' is a metric on eval_data\(\), which Learn does not "
            r"have; add it, or name one of public_eval\(\), such as public_loss$",
        ),
        (
            ("strategy.target_metric={name='accuracy', at_least=0.9}",),
            r"^strategy.target_metric.name='accuracy' is a metric on eval_data\(\), which Learn ",
        ),
        (
            ("strategy.policy=plateau", "strategy.settings.metric=devices_f1"),
            "^strategy.settings.metric='devices_f1' is not a held-out metric of the task",
        ),
        (
            (
                "evaluation.devices=0",
                "strategy.policy=plateau",
                "strategy.settings.metric=devices_loss",
            ),
            "^strategy.settings.metric='devices_loss' is measured on devices, and evaluation.devic",
        ),
    ],
)
async def test_public_rows_alone_have_no_metric_of_another_name(deployment, settings, reason):
    await deployment.start(PUBLIC_ONLY, NAMES)
    store = deployment.create_run("run", *SETTINGS, *settings)
    with pytest.raises(JobError, match=reason):
        Coordinator(RunParts.of(store, deployment.link))


@pytest.mark.parametrize("side", [WITHOUT_CENTRAL, VALIDATES])
@pytest.mark.parametrize(
    ("figure", "devices", "reason"),
    [
        ("accuracy_p10", 49, "needs 50 devices that evaluate, 5 of them beyond it, and evaluation"),
        ("accuracy_p50", 9, "needs 10 devices that evaluate, 5 of them beyond it, and evaluation"),
        ("accuracy_clipped", 60, "is only there in rounds in which values were clipped; name dev"),
        ("accuracy_p10", 50, None),
        ("accuracy_p50", 10, None),
    ],
)
def test_a_figure_of_more_devices_than_evaluate_is_refused(
    make_job, write_task, tmp_path, side, figure, devices, reason
):
    write_task(side)
    name = f"devices_{figure}"
    best = f"evaluation.keep_best={{name={name!r}, mode='max'}}"
    job = make_job(f"evaluation.devices={devices}", best)
    task = load_task(job.task.source, {}, base=tmp_path)
    refused = pytest.raises(JobError, match=f"^evaluation.keep_best.name={name!r} {reason}")
    with contextlib.nullcontext() if reason is None else refused:
        vector = evaluation_vector(job, task)
        check_followed_metrics(job, task, load_policy(job.strategy), vector)


async def test_the_last_model_is_not_called_the_best_without_a_value(deployment):
    """As with a metric that is never a number."""
    await deployment.start(WITHOUT_CENTRAL + NOT_A_NUMBER, NAMES)
    best = "evaluation.keep_best={name='devices_accuracy', mode='max'}"
    store, _, final = await run(deployment, "run", best, "evaluation.deliver=best", "rounds=2")
    assert (final.round, final.best) == (2, False)
    sentence = "; no round had a value of devices_accuracy, so the last model is delivered"
    assert read_report(store).reason.endswith(sentence)
    store, _, final = await run(deployment, "patient", best, "evaluation.patience=2", "rounds=9")
    assert final.round == 2
    assert read_report(store).reason.startswith("none of 2 evaluated rounds had a value of devices")


@pytest.mark.parametrize("metric", ["public_loss", "devices_loss"])
async def test_a_policy_can_follow_public_rows_or_devices(deployment, metric):
    await deployment.start(PUBLIC_ONLY, NAMES)
    both = ("strategy.settings.first=federated", "strategy.settings.then=federated")
    settings = ("strategy.policy=plateau", *both, f"strategy.settings.metric={metric}", "rounds=2")
    store, _, _ = await run(deployment, "run", *settings)
    assert len(read_report(store).rounds) == 2


async def test_a_target_can_be_a_metric_of_devices(deployment):
    await deployment.start(WITHOUT_CENTRAL, NAMES)
    target = "strategy.target_metric={name='devices_accuracy', at_least=0.0}"
    store, _, _ = await run(deployment, "run", "rounds=3", target)
    report = read_report(store)
    assert len(report.rounds) == 1
    assert "devices_accuracy" in report.reason


async def test_a_model_that_a_datacenter_trained_is_evaluated_on_devices(
    deployment, network, tmp_path
):
    """It has to come to the server, which it does not without devices."""
    await deployment.start(WITHOUT_CENTRAL, NAMES)
    settings = ("strategy.policy=datacenter", "datacenter.ranks=1")
    store = deployment.create_run("run", *SETTINGS, *settings)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    datacenter = SimulatedDatacenter(coordinator.model.layout)
    await network.join("dc", datacenter.respond, role=link_pb2.DATACENTER)
    await coordinator.run()
    (row,) = read_report(store).rounds
    vector, each, _ = measured(tmp_path, datacenter.vector, NAMES)
    assert row.evaluation.sums == vector.sums(each.sum(0))


async def test_a_run_without_any_evaluation_ends_without_metrics(deployment):
    await deployment.start("eval_data = isthmus.Task.eval_data", NAMES)
    _, coordinator, final = await run(deployment, "run", "evaluation.devices=0")
    assert coordinator.parts.evaluator.known_metrics == []
    assert final.metrics == {}
