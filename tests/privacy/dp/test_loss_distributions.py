"""Privacy loss distributions are those of dp-accounting, point by point."""

import math

import dp_accounting
import pytest
from dp_accounting import pld

from isthmus_privacy.dp.loss_distributions import LossDistribution

COARSE = 1e-3
# Noise multiplier, sampling probability and steps of what is composed: one of each kind, members
# that are nearly never and nearly always sampled, a few and many steps, and sums of all of them.
COMPOSITIONS = [
    [(2.0, None, 1)],
    [(0.3, None, 1)],
    [(4.0, 0.04, 1)],
    [(0.7, 0.5, 3)],
    [(1.0, 1e-4, 1000)],
    [(3.0, 0.999, 20)],
    [(5.0, 1.0, 20)],
    [(3.0, None, 1), (1.5, 0.01, 100), (2.0, 0.1, 10)],
]


@pytest.mark.parametrize("parts", COMPOSITIONS)
@pytest.mark.parametrize("step", [COARSE, COARSE / 3])
def test_epsilon_is_that_of_the_library(parts, step):
    """The accuracy does not decide this, so the steps are larger than those of the ledger."""
    theirs = pld.PLDAccountant(value_discretization_interval=step)
    ours = LossDistribution(step)
    for noise, probability, steps in parts:
        event = dp_accounting.GaussianDpEvent(noise)
        if probability is None:
            ours.add(noise)
        else:
            sampled = dp_accounting.PoissonSampledDpEvent(probability, event)
            event = dp_accounting.SelfComposedDpEvent(sampled, steps)
            ours.add_sampled(noise, probability, steps)
        theirs.compose(event)
    for delta in (1e-2, 1e-6, 1e-10):
        assert ours.epsilon(delta) == pytest.approx(theirs.get_epsilon(delta), rel=1e-12)


def test_nothing_costs_nothing_and_no_delta_has_no_epsilon():
    distribution = LossDistribution(COARSE)
    assert distribution.epsilon(1e-6) == 0
    distribution.add(1.0)
    assert distribution.epsilon(1e-30) == math.inf
