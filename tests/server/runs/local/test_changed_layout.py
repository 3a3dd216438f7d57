"""Ranks get another layout in a run that has begun only if each step stays what it is."""

import pytest

from isthmus.errors import JobError
from isthmus_server.runs.local.session import LocalRun

RANKS = (
    'strategy.policy="datacenter"',
    "datacenter.ranks=2",
    "datacenter.batch_size=8",
    "datacenter.global_batch=16",
)
NORMALISES = """
def model(self):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
"""
COMPARES = """
def training_step(self, model, batch):
    return model(batch[0]).var()
"""
FEWER_AT_ONCE = {"datacenter.ranks": 4}
IN_PARTS = {"datacenter.accumulate": 2}
UNKNOWN = {"datacenter.layout": "auto"}
SHARDED = {"datacenter.zero_stage": 3}
AS_MANY_AT_ONCE = {"datacenter.ranks": 4, "datacenter.tensor_parallel": 2}


@pytest.fixture
def change(tmp_path, make_job, write_task):
    """Begin a run of a task, and continue it in another layout; returns that."""

    def change(methods, changes, *overrides):
        write_task(methods)
        directory = tmp_path / "run"
        LocalRun.new(make_job(*RANKS, *overrides), tmp_path, directory).store.close()
        try:
            LocalRun.resumed(directory, changes).store.close()
        finally:
            again = LocalRun.resumed(directory)
            found = again.store.layout_changes()
            again.store.close()
            events.append(found)
        return found

    events = []
    change.stored = events
    return change


@pytest.mark.parametrize(
    ("methods", "who"),
    [
        (NORMALISES, r"the model normalises by the examples .* \('1.running_mean'\)"),
        (COMPARES, r"training_step\(\) gets the examples"),
    ],
    ids=["BatchNorm", "training_step"],
)
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (FEWER_AT_ONCE, "these are 4 in place of 8"),
        (IN_PARTS, "these are 4 in place of 8"),
        (UNKNOWN, "follows from ranks that are not known here"),
    ],
)
def test_other_numbers_at_once_are_refused_where_the_task_depends_on_them(
    change, methods, who, changes, why
):
    with pytest.raises(JobError, match=f"{who}.*{why}.*, which changes the training; keep"):
        change(methods, changes)
    assert change.stored == [{}]


@pytest.mark.parametrize("methods", [NORMALISES, COMPARES], ids=["BatchNorm", "training_step"])
@pytest.mark.parametrize("changes", [SHARDED, AS_MANY_AT_ONCE], ids=["sharded", "tensor"])
def test_as_many_at_once_are_accepted(change, methods, changes):
    assert change(methods, changes) == changes


def test_what_says_nothing_of_examples_is_accepted_where_their_number_is_not_known(change):
    changes = {"datacenter.hang_seconds": 60.0, "datacenter.readers": 1}
    assert change(NORMALISES, changes, 'datacenter.layout="auto"') == changes


@pytest.mark.parametrize("changes", [FEWER_AT_ONCE, IN_PARTS, UNKNOWN])
def test_other_tasks_take_any_number(change, changes):
    assert change("pass", changes) == changes


def test_a_model_that_normalises_by_its_own_statistics_takes_any_number(change):
    assert change(NORMALISES, FEWER_AT_ONCE, 'exchange.buffers="frozen"') == FEWER_AT_ONCE


def test_batches_of_another_size_are_refused_where_the_task_orders_them(
    tmp_path, make_job, write_task
):
    write_task("""
def order(self, dataset, batch_size, generator):
    return torch.randperm(len(dataset), generator=generator)
""")
    directory = tmp_path / "run"
    ranks = [each for each in RANKS if "global_batch" not in each]
    LocalRun.new(make_job(*ranks), tmp_path, directory).store.close()
    smaller = {"datacenter.ranks": 4, "datacenter.batch_size": 4}
    with pytest.raises(
        JobError, match=r"^order\(\) orders an epoch for batches of 8 examples, and"
    ):
        LocalRun.resumed(directory, smaller)
    LocalRun.resumed(directory, AS_MANY_AT_ONCE).store.close()
