"""What a job costs, and how long it takes, is finite for every job that is accepted."""

import math
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import JobError
from isthmus.job import parse_job
from isthmus.job.section import MAX_AMOUNT, MAX_COUNT, MAX_REAL, MAX_SECONDS, MIN_REAL
from isthmus_server.budgets.shared_budget import _known_rounds
from isthmus_server.rounds.attempt_log import AttemptLog
from isthmus_simulation.devices.profiles import DeviceProfile

SMALLEST = 'name = "digits"\n[task]\nsource = "task.py:Digits"\n'
EDGES = [0.0, MIN_REAL, 1.0, MAX_SECONDS, MAX_REAL, 1e19, 1e150, 1e308, 1e-39, 1e-150, 5e-324]
REAL = st.sampled_from(EDGES) | st.floats(0)
"""Real numbers; a setting that is none of the accepted ones makes the job a refused one."""
ACCEPTED = st.sampled_from([MIN_REAL, 1.0, MAX_REAL])
WHOLE = st.integers(1, MAX_COUNT) | st.sampled_from([1, MAX_COUNT])


@st.composite
def settings_of_jobs(draw):
    """Settings of which about half are accepted."""
    real = draw(st.sampled_from([REAL, ACCEPTED]))
    settings = {
        "strategy.policy": draw(st.sampled_from(["federated", "datacenter", "alternate"])),
        "rounds": draw(WHOLE),
        "datacenter.steps": draw(WHOLE),
        "budget": draw(real),
        **{f"prices.{name}": draw(real) for name in ("client_update", "datacenter_step")},
        "prices.client_evaluation": draw(real),
        "simulation.down_mbit": draw(real),
        "simulation.up_mbit": draw(real),
        "simulation.step_seconds": min(draw(real), draw(st.sampled_from([MAX_SECONDS, 1e308]))),
        "simulation.speed_spread": 5.0,
        "simulation.bandwidth_spread": 5.0,
    }
    return [f"{key}={value}" for key, value in settings.items()]


@given(settings_of_jobs(), st.integers(0, 1000))
def test_no_accepted_job_has_an_infinite_cost_or_duration(settings, device):
    try:
        job = parse_job(SMALLEST, settings)
    except JobError:  # each bound has a test of its own
        return
    log = SimpleNamespace(_store=SimpleNamespace(job=job))
    most = AttemptLog._price(log, MAX_COUNT, job.datacenter.steps)
    evaluation = MAX_COUNT * job.prices.client_evaluation
    assert math.isfinite(job.rounds * (most + evaluation))
    assert all(0 <= rounds <= MAX_COUNT for rounds in _known_rounds(job))
    profile = DeviceProfile.drawn(job.simulation, job.seed, device)
    seconds = profile.seconds(received=MAX_AMOUNT, steps=MAX_COUNT, sent=MAX_AMOUNT)
    assert math.isfinite(job.rounds * seconds)


def test_jobs_at_the_edges_are_accepted():
    prices = ("client_update", "datacenter_step", "client_evaluation")
    job = parse_job(SMALLEST, [*(f"prices.{name}=1e18" for name in prices), "budget=1e-38"])
    assert job.prices.client_update == 1e18
