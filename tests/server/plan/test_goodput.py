"""`isthmus plan --mtbf-hours`: the share of a run's time that trains, where ranks fail."""

import random

import pytest

from isthmus_server.plan.goodput import Failures
from isthmus_server.plan.options import PlanOptions
from isthmus_server.plan.plan import plan_of

TASK = """
    def model(self):
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
"""


def failures(**changes):
    given = {
        "rank_mtbf_seconds": 64 * 3600.0,
        "ranks": 64,
        "checkpoint_seconds": 60.0,
        "restart_seconds": 120.0,
    }
    return Failures(**{**given, **changes})


def simulated(given, interval, segments):
    """The share of the time that trains in a run with failures drawn at random."""
    draw = random.Random(5)
    rate = given.ranks / given.rank_mtbf_seconds
    spent = 0.0
    next_failure = draw.expovariate(rate)
    for _ in range(segments):
        needs = interval + given.checkpoint_seconds
        while next_failure < spent + needs:
            spent = next_failure
            next_failure = spent + draw.expovariate(rate)
            while next_failure < spent + given.restart_seconds:  # it fails again while it restarts
                spent = next_failure
                next_failure = spent + draw.expovariate(rate)
            spent += given.restart_seconds
        spent += needs
    return segments * interval / spent


@pytest.mark.parametrize("interval", [100.0, 600.0, 3000.0])
@pytest.mark.parametrize("changes", [{}, {"checkpoint_seconds": 5.0}, {"restart_seconds": 900.0}])
def test_it_is_that_of_a_simulated_run(interval, changes):
    given = failures(**changes)
    assert given.goodput(interval) == pytest.approx(simulated(given, interval, 20_000), rel=0.03)


@pytest.mark.parametrize("checkpoint", [0.1, 5.0, 60.0, 1800.0])
def test_no_interval_is_better_than_the_best(checkpoint):
    given = failures(checkpoint_seconds=checkpoint)
    best = given.best_interval()
    most = given.goodput(best)
    assert all(given.goodput(best * factor) < most for factor in (0.25, 0.8, 0.98, 1.02, 1.2, 4.0))
    young = (2 * checkpoint * given.mtbf_seconds) ** 0.5
    if checkpoint < 1:
        assert best == pytest.approx(young, rel=0.01)


def test_ranks_that_hardly_ever_fail_train_nearly_all_the_time():
    given = failures(rank_mtbf_seconds=1e18, checkpoint_seconds=1.0)
    young = (2 * given.mtbf_seconds) ** 0.5
    assert given.best_interval() == pytest.approx(young, rel=1e-3)
    assert given.goodput(given.best_interval()) == pytest.approx(1.0)


def test_a_run_that_never_finishes_a_part_has_none():
    assert failures(rank_mtbf_seconds=64.0).goodput(3600.0) == 0.0


def test_a_plan_says_it(write_task, tmp_path):
    write_task(TASK)
    path = tmp_path / "job.toml"
    path.write_text(
        'name = "table"\nrounds = 7\n[task]\nsource = "task.py:Learn"\n[strategy]\n'
        'policy = "datacenter"\n'
        "[datacenter]\nranks = 2\nbatch_size = 4\nsteps = 100\ncheckpoint_steps = 20\n"
    )
    options = PlanOptions(tflops=1e-9, mtbf_hours=50.0, checkpoint_seconds=3.0)
    plan = plan_of(path, (), options)
    ranks = plan.sides.datacenter
    step = {each.name: each.value for each in plan.step(ranks)}
    found = {each.name: each.value for each in plan.goodput(ranks)}
    given = failures(
        rank_mtbf_seconds=50 * 3600.0, ranks=2, checkpoint_seconds=3.0, restart_seconds=60.0
    )
    assert found["time between failures of any rank"] == 25 * 3600
    assert found["best time between checkpoints"] == given.best_interval()
    interval = 20 * step["time of a step"]
    assert found["time between checkpoints of the job"] == interval
    assert found["goodput at the job's time between checkpoints"] == given.goodput(interval)
    whole = step["time of the run"] / given.goodput(interval)
    assert found["time of the run with failures"] == pytest.approx(whole)
    assert any("best time between checkpoints" in each for each in plan.lines())
    assert "goodput at the best time between checkpoints" in plan.html()
    # Without a time of a step, the best is still known.
    unknown = plan_of(path, (), PlanOptions(mtbf_hours=50.0, checkpoint_seconds=3.0))
    names = [each.name for each in unknown.goodput(unknown.sides.datacenter)]
    assert names == [
        "time between failures of any rank",
        "best time between checkpoints",
        "goodput at the best time between checkpoints",
    ]
