"""Epsilon of DP-SGD without a library, against two libraries."""

import dp_accounting
import pytest
from dp_accounting import rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_privacy.dp.accounting import Composition, SampledGaussian
from isthmus_privacy.dp_sgd.renyi import ORDERS, epsilon_of_steps

# Noise multiplier, sampling probability, steps and delta: usual ones, a certain sample, very little
# of everything, and so much that exp() of the terms is no float64.
EVENTS = [
    (1.1, 0.01, 1000, 1e-5),
    (1.1, 0.004266666, 14062, 1e-5),
    (0.6, 0.001, 1000, 1e-6),
    (4.0, 0.5, 200, 1e-6),
    (2.0, 1.0, 10, 1e-5),
    (50.0, 1e-4, 100_000, 1e-6),
    (0.05, 0.3, 3, 1e-4),
]


def of_library(events, delta):
    accountant = rdp.RdpAccountant(orders=ORDERS)
    for noise, probability, steps in events:
        step = dp_accounting.GaussianDpEvent(noise)
        if probability < 1:
            step = dp_accounting.PoissonSampledDpEvent(probability, step)
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize(("noise", "probability", "steps", "delta"), EVENTS)
def test_dp_accounting_gives_the_same(noise, probability, steps, delta):
    own = epsilon_of_steps([SampledGaussian(noise, probability, steps)], delta)
    assert own == pytest.approx(of_library([(noise, probability, steps)], delta), rel=1e-6)


@pytest.mark.parametrize(("noise", "probability", "steps", "delta"), EVENTS)
@pytest.mark.filterwarnings("ignore")
def test_opacus_gives_the_same(noise, probability, steps, delta):
    from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent

    orders = list(ORDERS)
    divergences = compute_rdp(q=probability, noise_multiplier=noise, steps=steps, orders=orders)
    theirs, _ = get_privacy_spent(orders=orders, rdp=divergences, delta=delta)
    own = epsilon_of_steps([SampledGaussian(noise, probability, steps)], delta)
    assert own == pytest.approx(theirs, rel=1e-6)


@settings(max_examples=20)
@given(
    events=st.lists(
        st.tuples(st.floats(0.4, 20), st.floats(1e-4, 0.9), st.integers(1, 500)),
        min_size=1,
        max_size=3,
    ),
    delta=st.floats(1e-9, 1e-2),
)
def test_compositions_of_different_steps_agree_too(events, delta):
    own = epsilon_of_steps([SampledGaussian(*each) for each in events], delta)
    theirs = of_library(events, delta)
    # Where delta alone allows so little divergence, dp-accounting says 0.
    assert own == pytest.approx(theirs, rel=1e-6, abs=1e-9) or own > theirs == 0


@pytest.mark.parametrize(("noise", "probability", "steps", "delta"), EVENTS[:4])
def test_the_ledger_of_a_server_never_says_more(noise, probability, steps, delta):
    event = SampledGaussian(noise, probability, steps)
    own, ledgers = epsilon_of_steps([event], delta), Composition().plus(event).epsilon(delta)
    assert 0.6 * own < ledgers <= own


def test_nothing_costs_nothing():
    assert epsilon_of_steps([], 1e-5) == 0
