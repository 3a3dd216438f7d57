"""In which sums owners let counts of their data be, in whole runs with real agents."""

import pytest
import torch

from isthmus.job.measurements import evaluations_run_id
from isthmus.task import Participant, load_task
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.cohort_selection import SameDevicesMissing
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundCommitted

NAMES = tuple("abcdefgh")
VALIDATES = """
def validation_data(self, participant):
    return rows(9 + 4 * (ord(participant.name) - ord("a")), seed=ord(participant.name))

def device_metrics(self):
    def classes(output, target):
        return output.argmax(-1), target

    return {"confusion": isthmus.Confusion(3, of=classes)}
"""
ROTATING = (
    "federated.cohort=8",
    "federated.quorum=8",
    "federated.local_steps=1",
    "evaluation.devices=5",
    "evaluation.quorum=5",
    "rounds=12",
)
SAME = "evaluation.same_devices=true"
SHARES = """
def metrics(self, output, target):
    return {"first_class": (target == 0).float()}

def device_metrics(self):
    return {"first_class": isthmus.Mean()}
"""
BY_SERVER = ("privacy.mechanism=gaussian", "privacy.epsilon=100", "privacy.delta=1e-5")
with_exact_figures = pytest.mark.parametrize(
    ("methods", "settings"),
    [(VALIDATES, ()), (VALIDATES + SHARES, BY_SERVER)],
    ids=["counts", "means to which the server adds noise"],
)
"""The server that adds noise to means has them without: they are as exact as counts."""


def policy(counts):
    return f'[privacy]\ncounts = "{counts}"'


async def run(deployment, name, *overrides):
    """The report of a run, and the devices of each evaluation's sum."""
    store = deployment.create_run(name, *ROTATING, *overrides)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    entries = reversed(store.unmaskings.of_run(evaluations_run_id(store.run_id)))
    return read_report(store), [entry.devices for entry in entries if not entry.refused]


def labels(folder):
    """How many validation examples of each class a device has, int64 (devices, 3)."""
    task = load_task("task.py:Learn", {}, base=folder)
    data = [task.validation_data(Participant(name=name, regime="federated")) for name in NAMES]
    return torch.stack([torch.bincount(each.tensors[1], minlength=3) for each in data])


def solved(report, cohorts):
    """Each device's labels by class from the sums of all evaluations, and what is known of them.

    Returns:
        The solution of least norm, float64 (devices, 3), and the rank of the equations.
    """
    members = [[float(name in cohort) for name in NAMES] for cohort in cohorts]
    matrix = torch.tensor(members, dtype=torch.float64)
    # The rows of a confusion matrix are the labels, whatever the model predicts.
    counts = [record.evaluation.sums["confusion"] for record in report.rounds]
    sums = torch.tensor(counts, dtype=torch.float64).view(len(counts), 3, 3).sum(2)
    found = torch.linalg.pinv(matrix) @ sums
    assert torch.allclose(matrix @ found, sums, atol=1e-6)
    return found, int(torch.linalg.matrix_rank(matrix))


async def test_evaluations_on_rotating_devices_tell_each_devices_labels(deployment, tmp_path):
    await deployment.start(VALIDATES, NAMES)
    report, cohorts = await run(deployment, "run")
    found, rank = solved(report, cohorts)
    assert rank == len(NAMES)
    assert torch.equal(found.round().long(), labels(tmp_path))


async def test_evaluations_on_the_same_devices_tell_only_their_sum(deployment, tmp_path):
    deployment.policies = dict.fromkeys(NAMES, policy("same-devices"))
    await deployment.start(VALIDATES, NAMES)
    report, cohorts = await run(deployment, "run", SAME)
    assert [record.evaluation.devices for record in report.rounds] == [5] * 12
    assert len(set(cohorts)) == 1
    found, rank = solved(report, cohorts)
    assert rank == 1
    assert not (found.round().long() == labels(tmp_path)).all(1).any()
    # The only thing that is known: the same share for each.
    inside = found[found.sum(1) > 0]
    assert len(inside) == 5
    torch.testing.assert_close(inside, inside[:1].expand(5, 3))


async def test_without_one_of_the_same_devices_no_others_are_asked(deployment):
    await deployment.start(VALIDATES, NAMES)
    store = deployment.create_run("run", *ROTATING, SAME, "rounds=1")
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    settings = store.job.evaluation.on_devices(store.job.federated)
    refusals = []

    def select_again(event):
        """For another model in a later round: with all devices, and without one of the first."""
        if not isinstance(event, RoundCommitted):
            return
        (entry,) = store.unmaskings.of_run(evaluations_run_id(store.run_id))
        select = coordinator.parts.cohorts.select_for_evaluation
        again = select(2, settings, bytes(32), [])
        assert (again.examples.keys(), again.exact) == (entry.devices, True)
        with pytest.raises(SameDevicesMissing) as caught:
            select(3, settings, bytes(32), [min(entry.devices)])
        assert caught.value.missing == (min(entry.devices),)
        refusals.append(str(caught.value))

    coordinator.events.subscribe(select_again)
    await coordinator.run()
    (sentence,) = refusals
    assert sentence.startswith("all evaluations of this run are on the 5 devices of its first one")


@with_exact_figures
async def test_an_owner_who_wants_the_same_devices_refuses_other_evaluations(
    deployment, methods, settings
):
    deployment.policies = {"a": policy("same-devices")}
    await deployment.start(methods, NAMES)
    report, _ = await run(deployment, "rotating", "evaluation.devices=8", "rounds=1", *settings)
    (record,) = report.rounds
    assert (record.participants.accepted, record.evaluation.devices) == (8, 7)


@with_exact_figures
async def test_an_owner_binds_the_devices_of_evaluations_in_all_runs_of_a_task(
    deployment, methods, settings
):
    """The server of another run does not know of the first one's devices."""
    deployment.policies = {"a": policy("same-devices")}
    await deployment.start(methods, NAMES)
    noise = settings
    settings = (SAME, "evaluation.devices=8", "rounds=1", *noise)
    report, cohorts = await run(deployment, "first", *settings)
    assert cohorts == [frozenset(NAMES)]
    again, cohorts = await run(deployment, "again", *settings, "seed=1")
    assert cohorts == [frozenset(NAMES)]  # the same ones, and another model
    assert (report.rounds[0].evaluation.devices, again.rounds[0].evaluation.devices) == (8, 8)
    sizes = []
    fewer = (SAME, "evaluation.devices=7", "rounds=1", *noise)
    for seed in (2, 3):  # seven of the eight devices each time, and not the same ones
        other, cohorts = await run(deployment, f"other-{seed}", *fewer, f"seed={seed}")
        assert other.rounds[0].evaluation.asked == 7
        assert all("a" not in cohort for cohort in cohorts)
        sizes.append(len(cohorts[0]))
    assert 6 in sizes  # it was asked, and refused


@with_exact_figures
async def test_an_owner_who_gives_no_counts_takes_part_in_training_only(
    deployment, methods, settings
):
    deployment.policies = {"a": policy("none")}
    await deployment.start(methods, NAMES)
    evaluations = (SAME, "evaluation.devices=8", "rounds=2")
    report, cohorts = await run(deployment, "run", *evaluations, *settings)
    for record in report.rounds:
        assert (record.participants.accepted, record.evaluation.devices) == (8, 7)
    assert set(cohorts) == {frozenset(NAMES) - {"a"}}


ONE_HAS_THE_LAST_CLASS = """
def validation_data(self, participant):
    inputs, target = rows(9, seed=ord(participant.name)).tensors
    return TensorDataset(inputs, target if participant.name == "h" else target.clamp(max=1))

def device_metrics(self):
    classes = self.settings.get("classes", 3)

    def of(output, target):
        return output.argmax(-1).clamp(max=classes - 1), target

    return {"confusion": isthmus.Confusion(classes, of=of)}
"""


async def test_no_report_has_sums_of_the_same_devices_without_one_whose_task_fails(deployment):
    """The difference to another job's, in which none fails, would be one device's counts."""
    deployment.policies = dict.fromkeys(NAMES, policy("same-devices"))
    await deployment.start(ONE_HAS_THE_LAST_CLASS, NAMES)
    settings = (SAME, "evaluation.devices=8", "rounds=1", "attempts=2")
    whole, _ = await run(deployment, "whole", *settings)
    assert whole.rounds[0].evaluation.devices == 8
    fails, cohorts = await run(deployment, "fails", *settings, "seed=1", "task.settings.classes=2")
    (record,) = fails.rounds
    assert cohorts == [frozenset(NAMES)] * 2
    assert (record.evaluation.devices, record.evaluation.sums) == (0, {})
    assert record.metrics.keys() == {"loss", "accuracy"}  # on central data
    said = "the task of 1 of 8 devices failed, and with evaluation.same_devices"
    assert record.evaluation.error.startswith(said)
