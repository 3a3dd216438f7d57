"""Epsilon of compositions, against published figures and a second library."""

import dp_accounting
import pytest
from dp_accounting import rdp
from hypothesis import given
from hypothesis import strategies as st

from isthmus_privacy.dp.accounting import (
    Composition,
    CorrelatedGaussian,
    Gaussian,
    SampledGaussian,
    ZeroConcentrated,
    epsilon_of_rho,
    event_from_json,
    event_to_json,
)

# Noise multiplier, sampling probability, steps, delta, and epsilon by privacy loss distributions.
VECTORS = [
    (1, 1, 1, 1e-5, 4.3772),
    (2, 1, 10, 1e-5, 7.5113),
    (5, 1, 100, 1e-6, 10.9972),
    (10, 1, 100, 1e-6, 4.8866),
    (1.1, 0.004266666, 14062, 1e-5, 2.3817),
    (1, 0.01, 1000, 1e-5, 1.8282),
    (0.8, 0.01, 1000, 1e-5, 3.1410),
    (1, 0.1, 100, 1e-6, 8.0586),
    (2, 0.02, 2000, 1e-6, 2.1958),
    (0.6, 0.001, 1000, 1e-6, 2.1067),
    (4, 0.5, 200, 1e-6, 9.7492),
]


def composed(noise, probability, steps):
    if probability == 1:
        return Composition().plus(Gaussian(noise), steps)
    return Composition().plus(SampledGaussian(noise, probability, steps))


@pytest.mark.parametrize(("noise", "probability", "steps", "delta", "epsilon"), VECTORS)
def test_known_compositions(noise, probability, steps, delta, epsilon):
    assert composed(noise, probability, steps).epsilon(delta) == pytest.approx(epsilon, abs=1e-3)


@pytest.mark.parametrize(("noise", "probability", "steps", "delta", "epsilon"), VECTORS)
@pytest.mark.filterwarnings("ignore")
def test_a_second_library_agrees_within_one_per_cent(noise, probability, steps, delta, epsilon):
    """Opacus: its accountant adds 0.01 for its numerical error, which is allowed for."""
    from opacus.accountants import PRVAccountant

    other = PRVAccountant()
    other.history = [(noise, probability, steps)]
    theirs = other.get_epsilon(delta=delta, eps_error=0.01)
    assert composed(noise, probability, steps).epsilon(delta) == pytest.approx(
        theirs - 0.01, rel=0.01
    )


# The first four columns of `VECTORS`, and epsilon by Renyi differential privacy.
RENYI = [
    (1, 1, 1, 1e-5, 4.7285),
    (10, 1, 100, 1e-6, 5.2215),
    (1.1, 0.004266666, 14062, 1e-5, 2.5966),
    (0.6, 0.001, 1000, 1e-6, 3.1410),
    (4, 0.5, 200, 1e-6, 10.4623),
    (1.09387, 0.01, 1000, 1e-6, 2.0),
]


@pytest.mark.parametrize(("noise", "probability", "steps", "delta", "epsilon"), RENYI)
def test_the_library_gives_the_known_bounds_by_renyi_divergence(
    noise, probability, steps, delta, epsilon
):
    """Ours is never above them: it takes the smaller of two bounds."""
    step = dp_accounting.GaussianDpEvent(noise)
    if probability < 1:
        step = dp_accounting.PoissonSampledDpEvent(probability, step)
    accountant = rdp.RdpAccountant()
    accountant.compose(step, steps)
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, abs=1e-3)
    assert composed(noise, probability, steps).epsilon(delta) <= epsilon + 1e-3


def test_the_library_gives_the_known_bound_of_tree_aggregation():
    """Correlated noise of the older kind, which is not used here: a second look at the library."""
    tree = dp_accounting.SingleEpochTreeAggregationDpEvent(noise_multiplier=10.0, step_counts=100)
    accountant = rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    )
    accountant.compose(tree)
    assert accountant.get_epsilon(1e-6) == pytest.approx(1.21488, abs=1e-4)


# Noise multiplier, sums of one device, and epsilon at 1e-6 by Renyi differential privacy. With its
# own list of orders, which has few small ones, the library gives 71.2161 for 1,000 sums with 4.
DISTRIBUTED = [
    (1, 1, 5.2215),
    (4, 1, 1.1432),
    (4, 10, 4.0104),
    (4, 100, 15.3280),
    (4, 1000, 71.1149),
    (8, 1, 0.5451),
    (8, 10, 1.8731),
    (8, 100, 6.7346),
    (8, 1000, 27.3848),
]


@pytest.mark.parametrize(("noise", "sums", "epsilon"), DISTRIBUTED)
def test_distributed_noise_is_accounted_by_concentration(noise, sums, epsilon):
    event = ZeroConcentrated(1 / (2 * noise**2))
    ours = Composition().plus(event, sums).epsilon(1e-6)
    assert ours == pytest.approx(epsilon, abs=1e-3)
    assert epsilon_of_rho(sums * event.rho, 1e-6) == pytest.approx(epsilon, abs=1e-3)


@given(st.floats(1e-4, 200), st.floats(1e-12, 0.1))
def test_a_device_computes_the_epsilon_that_the_library_does(rho, delta):
    """Never less than it by more than what the library's list of orders costs."""
    theirs = Composition(rho=rho).epsilon(delta)
    assert epsilon_of_rho(rho, delta) <= theirs + 1e-9
    assert epsilon_of_rho(rho, delta) == pytest.approx(theirs, rel=1e-3, abs=1e-4)


def test_correlated_noise_is_charged_once_for_all_rounds_of_a_run():
    row = CorrelatedGaussian(5.0, "run")
    once = Composition().plus(row)
    assert once.plus(row, 20) == once
    assert once.epsilon(1e-5) == pytest.approx(Composition().plus(Gaussian(5.0)).epsilon(1e-5))
    other = once.plus(CorrelatedGaussian(5.0, "another run"))
    assert other.epsilon(1e-5) > once.epsilon(1e-5)


EVENTS = st.sampled_from(
    [
        ZeroConcentrated(0.01),
        Gaussian(10.0),
        SampledGaussian(1.0, 0.01, 5),
        SampledGaussian(2.0, 0.01, 5),
        CorrelatedGaussian(5.0, "run"),
    ]
)


@given(st.lists(EVENTS, max_size=8), st.lists(EVENTS, max_size=3))
def test_more_events_cover_fewer_in_any_order(events, more):
    def total(each):
        composition = Composition()
        for event in each:
            composition = composition.plus(event)
        return composition

    ours, turned = total(events), total(reversed(events))
    assert total(events + more).covers(ours)
    assert (ours.correlated, ours.sampled) == (turned.correlated, turned.sampled)
    assert (ours.rho, ours.gaussian) == pytest.approx((turned.rho, turned.gaussian))


@given(EVENTS)
def test_events_survive_a_file(event):
    assert event_from_json(event_to_json(event)) == event


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"kind": "magic", "rho": 1.0},
        {"kind": "zero-concentrated"},
        {"kind": "zero-concentrated", "rho": 0.0},
        {"kind": "zero-concentrated", "rho": float("nan")},
        {"kind": "zero-concentrated", "rho": True},
        {"kind": "gaussian", "noise_multiplier": 1.0, "extra": 1},
        {"kind": "sampled-gaussian", "noise_multiplier": 1, "sampling_probability": 2, "steps": 1},
        {"kind": "correlated", "noise_multiplier": 1.0, "run": 3},
    ],
)
def test_what_is_no_event_is_refused(table):
    with pytest.raises(ValueError, match=r"is not an event|out of its range"):
        event_from_json(table)
