"""Evaluations and comparisons of jobs with `[privacy]`: noise, charges and limits."""

import statistics

import pytest
import torch
from tests.server.budgets.epsilons import found_on_the_loop
from tests.server.deployment import FaultyDevice, Killed
from tests.server.rounds.policies import COMPARES_MODELS, write_policy

from isthmus.errors import JobError, StorageError, TaskError
from isthmus.task import Participant, load_task
from isthmus.task.measurements.bounded_means import BoundedMeans, numbers_of
from isthmus_privacy.dp.ledger import LEDGER_FILE, Ledger, LedgerDamaged
from isthmus_server.read.report.privacy.spending import read_spending
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts

VALIDATES = """
def validation_data(self, participant):
    return rows(15 + ord(participant.name) % 5, seed=100 + ord(participant.name))

def device_metrics(self):
    return {
        "loss": isthmus.Mean(0, 4),
        "accuracy": isthmus.Mean(),
        "confusion": isthmus.Confusion(3, of=lambda output, target: (output.argmax(-1), target)),
    }

eval_data = isthmus.Task.eval_data
"""
NAMES = tuple("abcd")
SETTINGS = (
    "federated.cohort=4",
    "federated.quorum=3",
    "privacy.delta=0.01",
    "rounds=2",
    "time.join_seconds=100",
)
EVALUATES = ("evaluation.devices=4", "evaluation.quorum=3")
QUIET = "privacy.epsilon=1e12"
"""A budget with which there is no noise to speak of."""
WAYS = (
    ("privacy.mechanism=distributed",),
    ("privacy.mechanism=gaussian",),
    ("privacy.mechanism=gaussian", "federated.secure_aggregation=false"),
    ("privacy.mechanism=correlated",),
)


def charges(store, what):
    ledger = Ledger.read(store.directory / LEDGER_FILE)
    return [entry for entry in ledger.entries.values() if entry.charge.what == what]


async def run(deployment, name, *overrides):
    store = deployment.create_run(name, *SETTINGS, *overrides)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    await coordinator.run()
    return store, coordinator


@pytest.mark.parametrize("way", WAYS)
async def test_an_evaluation_is_the_mean_over_devices_of_their_own_means(deployment, tmp_path, way):
    await deployment.start(VALIDATES, NAMES)
    store, coordinator = await run(deployment, "run", *way, *EVALUATES, QUIET)
    task = load_task("task.py:Learn", {}, base=tmp_path)
    vector, module = BoundedMeans(task), task.model()
    torch.nn.utils.vector_to_parameters(coordinator.model.vector, [module.bias, module.weight])
    of = [task.validation_data(Participant(name=name, regime="federated")) for name in NAMES]
    numbers = [numbers_of(vector.measure(module, each, 7)) for each in of]
    expected = vector.figures_of_mean(torch.stack(numbers).mean(0), 0.0)
    *_, row = read_report(store).rounds
    assert row.evaluation.devices == 4
    assert row.evaluation.sums == {}
    assert "devices_confusion_accuracy" not in row.metrics
    for name in ("devices_accuracy", "devices_loss"):
        assert row.metrics[name] == pytest.approx(expected[name], abs=1e-3)
        assert 0 < row.metrics[name + "_noise"] < 1e-4


@pytest.mark.parametrize("way", WAYS)
async def test_evaluations_are_charged_and_fit_the_budget(deployment, way):
    await deployment.start(VALIDATES, NAMES)
    store, _ = await run(deployment, "run", *way, *EVALUATES, "privacy.epsilon=4")
    entries = charges(store, "evaluation")
    assert [(entry.charge.devices, entry.outcome) for entry in entries] == [
        (NAMES, "committed")
    ] * 2
    assert len(charges(store, "round")) == 2
    report = read_report(store)
    assert report.privacy.epsilon == pytest.approx(4, rel=0.03)
    assert report.privacy.epsilon <= 4
    assert "evaluation 1 attempt" in "\n".join(read_spending(store.directory).lines())


async def test_the_noise_of_an_evaluation_is_as_large_as_it_says(deployment):
    """Of 60 evaluations with one model, as nothing is learned.

    The deviation of a sample of 60 is outside of these bounds once in 10^9 runs (chi-square).
    """
    await deployment.start(
        VALIDATES
        + "\ndef optimizer(self, parameters, participant):\n"
        + "    return torch.optim.SGD(parameters, lr=0.0)\n",
        NAMES,
    )
    store, _ = await run(
        deployment,
        "run",
        "privacy.mechanism=gaussian",
        "privacy.noise=1e-6",
        "privacy.epsilon=1e15",
        "privacy.measurement_share=1e-9",
        "federated.secure_aggregation=false",
        *EVALUATES,
        "rounds=60",
    )
    rows = [row.metrics for row in read_report(store).rounds]
    says = rows[0]["devices_loss_noise"]
    assert 0.1 < says < 0.3
    assert 0.5 * says < statistics.stdev(row["devices_loss"] for row in rows) < 1.65 * says


async def test_a_device_is_asked_for_no_more_measurements_than_their_noise_is_made_for(deployment):
    await deployment.start(VALIDATES, NAMES)
    limits = ("privacy.epsilon=4", "privacy.measurements=1")
    store, _ = await run(deployment, "run", *WAYS[0], *EVALUATES, *limits)
    first, last = read_report(store).rounds
    assert first.evaluation.devices == 4
    assert last.evaluation.devices == 0
    sentence = "0 of 4 devices have privacy budget left for measurements, and an evaluation on 4"
    assert sentence in last.evaluation.error
    assert len(charges(store, "evaluation")) == 1
    assert len(charges(store, "round")) == 2


@pytest.mark.parametrize("way", WAYS)
async def test_devices_that_cannot_evaluate_count_as_the_middle_and_nobody_sees_how_many(
    deployment, tmp_path, way
):
    cannot = "    if participant.name > 'a':\n        raise ValueError('no data today')\n"
    await deployment.start(
        VALIDATES.replace("    return rows(15", cannot + "    return rows(15"), NAMES
    )
    store, coordinator = await run(deployment, "run", *way, *EVALUATES, QUIET, "rounds=1")
    task = load_task("task.py:Learn", {}, base=tmp_path)
    vector, module = BoundedMeans(task), task.model()
    torch.nn.utils.vector_to_parameters(coordinator.model.vector, [module.bias, module.weight])
    only = task.validation_data(Participant(name="a", regime="federated"))
    numbers = numbers_of(vector.measure(module, only, 7))
    expected = vector.figures_of_mean(numbers / len(NAMES), 0.0)
    (row,) = read_report(store).rounds
    assert (row.evaluation.devices, row.evaluation.error) == (4, None)
    for name in ("devices_accuracy", "devices_loss"):
        assert row.metrics[name] == pytest.approx(expected[name], abs=1e-3)
    assert [entry.outcome for entry in charges(store, "evaluation")] == ["committed"]


@pytest.mark.parametrize(
    ("measurements", "charged"),
    [
        ("privacy.epsilon=4", [(1, "failed"), (2, "committed"), (3, "committed")]),
        (
            "privacy.measurements=4",
            [(1, "failed"), (1, "committed"), (2, "committed"), (3, "committed")],
        ),
    ],
)
async def test_a_failed_evaluation_is_repeated_only_with_what_no_later_one_needs(
    deployment, monkeypatch, measurements, charged
):
    """Devices have accepted it, so that each attempt is spent."""
    await deployment.start(VALIDATES, NAMES)
    failing = set(NAMES[:2])
    work = FaultyDevice.work

    async def fails_once(device, request, model, progress):
        if request.WhichOneof("work") == "evaluate" and device.agent.participant.name in failing:
            failing.discard(device.agent.participant.name)
            raise StorageError("its disk is full")
        return await work(device, request, model, progress)

    monkeypatch.setattr(FaultyDevice, "work", fails_once)
    more = ("privacy.epsilon=4", measurements, "rounds=3", "federated.secure_aggregation=false")
    store, _ = await run(deployment, "run", *WAYS[1], *EVALUATES, *more)
    entries = charges(store, "evaluation")
    assert [(entry.charge.round, entry.outcome) for entry in entries] == charged
    report = read_report(store)
    assert [row.evaluation.devices for row in report.rounds][1:] == [4, 4]
    assert (report.rounds[0].evaluation.devices == 4) is (len(charged) == 4)
    assert report.privacy.epsilon <= 4


async def test_a_failed_comparison_leaves_the_evaluations_what_they_need(
    deployment, monkeypatch, tmp_path
):
    await deployment.start(VALIDATES, NAMES)
    work = FaultyDevice.work

    async def never_scores(device, request, model, progress):
        if request.WhichOneof("work") == "score":
            raise TaskError("the battery is empty")
        return await work(device, request, model, progress)

    monkeypatch.setattr(FaultyDevice, "work", never_scores)
    source = COMPARES_MODELS.format(devices=4, models=("initial", "current"))
    compares = write_policy(tmp_path, "compares", source)
    more = ("privacy.epsilon=4", "privacy.measurements=3", compares)
    store, _ = await run(deployment, "run", *WAYS[2], *EVALUATES, *more)
    assert [entry.outcome for entry in charges(store, "comparison")] == ["failed"]
    assert [entry.outcome for entry in charges(store, "evaluation")] == ["committed"] * 2


async def test_no_epsilon_of_a_repeated_comparison_is_found_on_the_event_loop(
    deployment, monkeypatch, tmp_path
):
    """An attempt that has failed has taken its part of the budget."""
    await deployment.start(VALIDATES, NAMES)
    work = FaultyDevice.work
    failed = set()

    async def fails_at_first(device, request, model, progress):
        if request.WhichOneof("work") == "score" and device not in failed:
            failed.add(device)
            raise TaskError("the battery is empty")
        return await work(device, request, model, progress)

    monkeypatch.setattr(FaultyDevice, "work", fails_at_first)
    source = COMPARES_MODELS.format(devices=4, models=("initial", "current"))
    compares = write_policy(tmp_path, "compares", source)
    more = ("privacy.epsilon=4", "privacy.measurements=5", "privacy.participations=3", compares)
    store = deployment.create_run("run", *SETTINGS, *WAYS[2], *EVALUATES, *more)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    on_the_loop = found_on_the_loop(monkeypatch)
    await coordinator.run()
    outcomes = [entry.outcome for entry in charges(store, "comparison")]
    assert outcomes == ["failed", "committed"]
    assert on_the_loop == []


async def killed_before_its_commit(deployment, store, round_):
    """Run until a round was evaluated; it is killed before the round is committed."""
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    commit = coordinator.parts.log.commit

    def die(state, spec, *arguments, **more):
        if spec.round == round_:
            raise Killed
        return commit(state, spec, *arguments, **more)

    coordinator.parts.log.commit = die
    with pytest.raises(Killed):
        await coordinator.run()
    return deployment.reopen(store)


async def test_a_crash_after_an_evaluation_does_not_lose_its_charge(deployment):
    await deployment.start(VALIDATES, NAMES)
    more = ("privacy.epsilon=4", "privacy.measurements=3", "privacy.participations=3")
    store = deployment.create_run("run", *SETTINGS, *WAYS[0], *EVALUATES, *more)
    again = await killed_before_its_commit(deployment, store, 1)
    assert [entry.outcome for entry in charges(again, "evaluation")] == ["committed"]
    await Coordinator(RunParts.of(again, deployment.link)).run()
    assert [entry.charge.round for entry in charges(again, "evaluation")] == [1, 1, 2]
    report = read_report(again)
    assert [row.evaluation.devices for row in report.rounds] == [4, 4]
    assert report.privacy.epsilon <= 4


async def test_a_repeated_round_does_not_wait_for_budget_that_is_used_up(deployment):
    await deployment.start(VALIDATES, NAMES)
    more = ("privacy.epsilon=4", "privacy.measurements=1", "privacy.participations=3")
    store = deployment.create_run("run", *SETTINGS, *WAYS[0], *EVALUATES, *more, "rounds=1")
    again = await killed_before_its_commit(deployment, store, 1)
    await Coordinator(RunParts.of(again, deployment.link)).run()  # join_seconds are 100
    (row,) = read_report(again).rounds
    assert "0 of 4 devices have privacy budget left" in row.evaluation.error
    assert row.evaluation.seconds < 20


def cut_before_the_evaluation(store):
    path = store.directory / LEDGER_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if b'"what":"evaluation"' in line)
    path.write_bytes(b"".join(lines[:first]))


async def test_a_ledger_without_the_last_evaluation_is_refused(deployment):
    await deployment.start(VALIDATES, NAMES)
    store, _ = await run(deployment, "run", *WAYS[0], *EVALUATES, "privacy.epsilon=4", "rounds=1")
    cut_before_the_evaluation(store)
    with pytest.raises(LedgerDamaged, match="the last ones were removed"):
        read_spending(store.directory)


async def test_a_ledger_that_was_cut_after_a_crash_is_refused(deployment):
    await deployment.start(VALIDATES, NAMES)
    more = ("privacy.epsilon=4", "privacy.measurements=3", "privacy.participations=3")
    store = deployment.create_run("run", *SETTINGS, *WAYS[0], *EVALUATES, *more)
    again = await killed_before_its_commit(deployment, store, 1)
    cut_before_the_evaluation(again)
    with pytest.raises(LedgerDamaged, match="the last ones were removed"):
        Coordinator(RunParts.of(again, deployment.link))


async def test_rounds_do_not_use_what_is_reserved_for_evaluations(deployment):
    """Noise that the job gives ends the run by its budget, with all evaluations until then.

    A fifth of the budget is for rounds, 20 evaluations have the rest. Without the reserve there
    would be 8 rounds, and nothing left for the last evaluation.
    """
    await deployment.start(VALIDATES, NAMES)
    way = ("privacy.mechanism=gaussian", "federated.secure_aggregation=false")
    limits = ("privacy.epsilon=4", "privacy.noise=2.26", "rounds=20", "privacy.measurements=20")
    share = "privacy.measurement_share=0.8"
    store, _ = await run(deployment, "run", *way, *EVALUATES, *limits, share)
    report = read_report(store)
    assert 1 < len(report.rounds) < 20
    assert all(row.evaluation.devices == 4 for row in report.rounds)
    assert report.privacy.epsilon <= 4


async def test_more_devices_than_delta_allows_are_not_asked_for_a_measurement(deployment):
    await deployment.start(names=NAMES)
    store = deployment.create_run(
        "run", *SETTINGS, *WAYS[0], "privacy.epsilon=4", "privacy.measurements=1"
    )
    budget = Coordinator(RunParts.of(store, deployment.link)).parts.budgets.devices
    too_many = [f"device-{number}" for number in range(100)]
    charged = budget.charged_measurement("comparison", 1, 1, too_many)
    with pytest.raises(JobError, match="is not below 1 / 100 devices"), charged:
        pytest.fail("devices would be asked")
    assert charges(store, "comparison") == []


@pytest.mark.parametrize("way", WAYS)
async def test_a_comparison_is_charged_and_its_errors_contain_the_noise(deployment, tmp_path, way):
    await deployment.start(names=NAMES)
    source = COMPARES_MODELS.format(devices=4, models=("initial", "current"))
    compares = write_policy(tmp_path, "compares", source)
    figures = {}
    for name, epsilon in (("quiet", "1e12"), ("loud", "4")):
        limits = (f"privacy.epsilon={epsilon}", "privacy.measurements=1", f"seed={len(figures)}")
        store, _ = await run(deployment, name, *way, *limits, compares)
        (comparison,) = read_report(store).rounds[1].comparisons
        figures[name] = comparison.result
        (entry,) = charges(store, "comparison")
        assert entry.charge.devices == NAMES
    quiet, loud = figures["quiet"], figures["loud"]
    assert quiet.difference["current"] == pytest.approx(
        quiet.score["current"] - quiet.score["initial"], abs=1e-3
    )
    assert quiet.standard_error["initial"] == 0
    assert quiet.standard_error["current"] < 0.1 < loud.standard_error["current"]
    assert read_report(store).privacy.epsilon <= 4


async def test_without_measurements_nothing_is_compared_and_the_policy_knows_why(
    deployment, tmp_path
):
    await deployment.start(names=NAMES)
    source = COMPARES_MODELS.format(devices=4, models=("initial", "current"))
    compares = write_policy(tmp_path, "compares", source)
    store, _ = await run(deployment, "run", *WAYS[0], "privacy.epsilon=4", compares)
    assert "privacy.measurements says how many" in read_report(store).rounds[1].reason
    assert charges(store, "comparison") == []


async def test_a_task_without_a_metric_in_bounds_is_refused(deployment):
    await deployment.start(
        VALIDATES.replace('"loss": isthmus.Mean(0, 4),', "").replace(
            '"accuracy": isthmus.Mean(),', ""
        ),
        NAMES,
    )
    store = deployment.create_run("run", *SETTINGS, *WAYS[0], *EVALUATES, "privacy.epsilon=4")
    with pytest.raises(TaskError, match="metrics that have bounds, and Learn declares none"):
        Coordinator(RunParts.of(store, deployment.link))
