"""A task's optimizers follow PyTorch's own schedulers at every position, however they get there."""

import copy
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as schedulers

from isthmus.errors import TaskError
from isthmus.job import parse_job
from isthmus.job.learning_rate import RoundPosition
from isthmus.task.optimizers import TaskOptimizers, job_schedule


def parameters():
    return [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]


def sgd(given, **options):
    groups = [{"params": given[:1], "lr": 0.3}, {"params": given[1:], "lr": 0.7}]
    return torch.optim.SGD(groups, momentum=0.9, **options)


def in_sequence(optimizer):
    warm = schedulers.LinearLR(optimizer, 0.1, 1.0, 5)
    cosine = schedulers.CosineAnnealingLR(optimizer, 20, 0.01)
    return schedulers.SequentialLR(optimizer, [warm, cosine], [5])


SCHEDULES = {
    "step": lambda optimizer: schedulers.StepLR(optimizer, 7, 0.3),
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 25),
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, [lambda s: 1 / (1 + s)] * 2),
    "sequence": in_sequence,
    "chained": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.5, 4), schedulers.ExponentialLR(optimizer, 0.9)]
    ),
    "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.5, total_steps=40),
    "cyclic": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.5, step_size_up=6),
    "restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 9),
}
STEPS = 39


def options(optimizer):
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in copy.deepcopy(optimizer.param_groups)
    ]


def pytorchs_own(make):
    """The options of all groups at each step of an uninterrupted run in plain PyTorch."""
    optimizer = sgd(parameters())
    scheduler, seen = make(optimizer), []
    for _ in range(STEPS):
        seen.append(options(optimizer))
        optimizer.step()
        scheduler.step()
    return seen


def made(make, earlier=None, given=None):
    given = given or parameters()
    optimizer = sgd(given)
    return TaskOptimizers((optimizer, make(optimizer)), given, earlier=earlier)


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=list(SCHEDULES))
def test_rates_are_those_of_pytorch_over_new_optimizers_and_ways_back(make):
    expected, earlier = pytorchs_own(make), None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for first in (0, 8, 4, 20):
            optimizers = made(make, earlier)
            for position in range(first, first + 8):
                optimizers.go_to(position)
                assert options(optimizers.named[""]) == expected[position]
                optimizers.step()
            earlier = optimizers.schedules


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=list(SCHEDULES))
def test_a_restored_or_split_optimizer_has_the_rates_of_its_schedule(make):
    expected = pytorchs_own(make)
    optimizers = made(make)
    inner = optimizers.named[""]
    first, second = inner.param_groups
    inner.param_groups[:] = [first, {**second}, second]
    optimizers.groups_split("", [0, 1, 1])
    optimizers.go_to(12)
    for group in inner.param_groups:
        group.update(lr=99.0, initial_lr=99.0)
    optimizers.restored()
    assert options(inner) == [expected[12][part] for part in (0, 1, 1)]
    optimizers.go_to(13)
    assert options(inner) == [expected[13][part] for part in (0, 1, 1)]


def test_schedules_that_were_made_in_another_way_are_not_continued():
    earlier = made(SCHEDULES["step"])
    earlier.go_to(30)
    optimizers = made(lambda each: schedulers.StepLR(each, 7, 0.5), earlier.schedules)
    optimizers.go_to(7)
    assert optimizers.rates() == {"": 0.15}


def test_without_a_schedule_options_are_left_as_they_are():
    given = parameters()
    optimizers = TaskOptimizers(sgd(given), given)
    optimizers.named[""].param_groups[0]["lr"] = 5.0
    optimizers.go_to(10)
    optimizers.restored()
    assert optimizers.rates() == {"": 5.0}
    assert optimizers.scheduled_rate is None
    assert optimizers.schedules == {}


class NeedsLoss(schedulers.StepLR):
    def step(self, loss):
        super().step()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (schedulers.ReduceLROnPlateau, "ReduceLROnPlateau, whose step"),
        (lambda each: NeedsLoss.__new__(NeedsLoss), r"NeedsLoss, whose step\(\) needs loss"),
        (lambda each: SCHEDULES["step"](sgd(parameters())), "StepLR of another optimizer"),
        (lambda each: "cosine", r"returned \(SGD, str\)"),
    ],
)
def test_schedules_that_cannot_be_followed_are_refused(make, sentence):
    with pytest.raises(TaskError, match=sentence):
        made(make)


def test_a_schedule_that_fails_is_a_sentence():
    optimizers = made(lambda each: schedulers.OneCycleLR(each, 0.5, total_steps=3))
    with pytest.raises(TaskError, match=r"the step of the LRScheduler failed"):
        optimizers.go_to(9)


# -- the job's own schedule ------------------------------------------------------------------------


def job(**table):
    keys = ["federated.local_steps=10", *(f"learning_rate.{k}={v!r}" for k, v in table.items())]
    return parse_job('name = "a"\n[task]\nsource = "a.py:A"\n', keys)


def from_job(batch=1, rate=0.5, **table):
    given = parameters()
    optimizer = torch.optim.SGD(given, lr=rate)
    return TaskOptimizers(optimizer, given, job_schedule(job(**table), batch))


def warm(optimizer, after, *ends):
    warming = schedulers.LinearLR(optimizer, 1 / 5, 1.0, 4)
    return schedulers.SequentialLR(optimizer, [warming, *after], [4, *ends])


def forever(optimizer, factor):
    return schedulers.ConstantLR(optimizer, factor, 1 << 40)


NAMED = [
    ({"warmup_steps": 4}, lambda o: warm(o, [forever(o, 1.0)])),
    (
        {"schedule": "cosine", "total_steps": 20},
        lambda o: schedulers.SequentialLR(
            o, [schedulers.CosineAnnealingLR(o, 20), forever(o, 0)], [20]
        ),
    ),
    (
        {"schedule": "cosine", "warmup_steps": 4, "total_steps": 20, "end_factor": 0.1},
        lambda o: warm(o, [schedulers.CosineAnnealingLR(o, 16, 0.5 * 0.1), forever(o, 0.1)], 20),
    ),
    (
        {"schedule": "linear", "total_steps": 20, "end_factor": 0.2},
        lambda o: schedulers.LinearLR(o, 1.0, 0.2, 20),
    ),
    (
        {"schedule": "step", "step_size": 5, "factor": 0.5, "warmup_steps": 4},
        lambda o: warm(o, [schedulers.StepLR(o, 5, 0.5)]),
    ),
    (
        {"schedule": "inverse_sqrt", "warmup_steps": 4},
        lambda o: warm(o, [schedulers.LambdaLR(o, lambda s: (4 / (4 + s)) ** 0.5)]),
    ),
]


@pytest.mark.parametrize(("table", "own"), NAMED)
def test_the_schedules_of_a_job_are_those_of_pytorch(table, own):
    optimizer = torch.optim.SGD(parameters(), lr=0.5)
    scheduler, optimizers = own(optimizer), from_job(**table)
    for position in range(30):
        optimizers.go_to(position)
        assert optimizers.rates() == {"": optimizer.param_groups[0]["lr"]}
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(("scaling", "expected"), [("none", 0.5), ("linear", 2.0), ("sqrt", 1.0)])
def test_the_rate_is_scaled_for_the_effective_batch(scaling, expected):
    optimizers = from_job(batch=128, scaling=scaling, reference_batch=32)
    optimizers.go_to(5)
    optimizers.restored()
    assert optimizers.rates() == {"": expected}


def test_a_job_and_a_task_cannot_both_have_a_schedule():
    given = parameters()
    optimizer = sgd(given)
    pair = optimizer, SCHEDULES["step"](optimizer)
    with pytest.raises(TaskError, match=r"returned its own StepLR, and the job's table"):
        TaskOptimizers(pair, given, job_schedule(job(warmup_steps=3), 1))


def test_a_last_value_of_several_rates_is_refused():
    given = parameters()
    schedule = job_schedule(job(schedule="cosine", total_steps=9, end_factor=0.1), 1)
    with pytest.raises(TaskError, match=r"needs one rate for all parameter groups"):
        TaskOptimizers(sgd(given), given, schedule)


# -- positions -------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 40), st.integers(0, 10_000), st.integers(1, 10_000))
def test_the_steps_of_a_participant_pass_through_the_round_in_order(start, steps, count):
    position = RoundPosition(start, steps)
    last = max(count - 1, 0)
    seen = [position.of_step(index, count) for index in sorted({0, 1 % count, last // 2, last})]
    assert seen[0] == start
    assert seen == sorted(seen)
    assert all(start <= each < start + max(steps, 1) for each in seen)
    if steps == count:
        assert seen[-1] == start + last
