"""The clipping bound that follows a quantile of the norms."""

import math

import pytest
import torch

from isthmus.job.privacy import PrivacySection
from isthmus_privacy.dp.accounting import Composition, Gaussian
from isthmus_privacy.dp.adaptive_clipping import AdaptiveBound
from isthmus_privacy.dp.calibration import NoisePlan
from isthmus_privacy.dp.clipping import clip_to_norm


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("first", [0.01, 100.0])
def test_the_bound_moves_to_the_quantile_of_the_norms(quantile, first):
    """Bounds of the mean: the noise of the count is 3.5 % of 1000 devices, 12 % of a step."""
    torch.manual_seed(0)
    norms = torch.rand(1000) * 2
    bound = AdaptiveBound(quantile, multiplier=5.0, bound=first, first=first)
    passed = []
    for _ in range(400):
        within = int((norms <= bound.bound).sum())
        noise = float(torch.randn(())) * bound.count_deviation
        bound = bound.moved((within + noise) / 1000)
        passed.append(bound.bound)
    assert sum(passed[-100:]) / 100 == pytest.approx(2 * quantile, rel=0.15)


def test_the_updates_and_the_count_together_cost_what_the_round_is_charged_for():
    """Zeros in place of a long update change the sum by the bound, and the count by one device."""
    within = [not clip_to_norm(torch.full((4,), value), 1.0) for value in (0.0, 100.0)]
    change = within[0] - within[1]
    assert change == 1
    privacy = {"mechanism": "gaussian", "epsilon": 2, "delta": 1e-6}
    plan = NoisePlan.of(PrivacySection(**privacy, clip_quantile=0.5), rounds=10)
    bound = plan.first_bound
    updates = Gaussian(plan.deviation)
    count = Gaussian(bound.count_deviation / change)
    both = Composition().plus(updates, 10).plus(count, 10).epsilon(1e-6)
    assert both == pytest.approx(plan.epsilon(10), rel=1e-9)
    assert both <= 2
    fixed = NoisePlan.of(PrivacySection(**privacy), rounds=10)
    assert 1 < plan.deviation / fixed.deviation < 1.011


def test_one_round_cannot_move_the_bound_far_whatever_its_noise():
    bound = AdaptiveBound(0.5, multiplier=1.0, bound=1.0, first=1.0)
    for share in (-1e9, 1e9):
        assert abs(math.log(bound.moved(share).bound)) <= 0.1 + 1e-12
    for _ in range(1000):
        bound = bound.moved(1.0)
    assert bound.bound == 2.0**-20
