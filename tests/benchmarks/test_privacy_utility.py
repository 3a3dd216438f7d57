"""The benchmark of privacy and accuracy: its schedule, and the order of its mechanisms."""

import privacy_utility
import pytest
import torch
from regime_simulation.readers import Rows

from isthmus_privacy.dp.calibration import NoisePlan


@pytest.fixture
def digits(monkeypatch):
    """Made-up digits: each class is a bright row of pixels, with noise."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(0, 7, (10_000,), generator=generator)
    images = torch.randn(10_000, 1, 14, 14, generator=generator)
    images[torch.arange(10_000), 0, 2 * target] += 1
    rows = Rows(images, target, target)
    split = rows.at(slice(None, -1000)), rows.at(slice(-1000, None))
    monkeypatch.setattr(privacy_utility, "mnist", lambda folder: split)
    return privacy_utility.Digits(None, seed=0)


def test_all_mechanisms_are_for_the_same_participations():
    plans = [
        NoisePlan.of(privacy_utility.section(mechanism, 4.0, 60), 60)
        for mechanism in privacy_utility.MECHANISMS
    ]
    assert {plan.participations for plan in plans} == {6}
    for plan in plans:
        assert 3.8 < plan.epsilon(6) <= 4.0


def test_noise_costs_accuracy_and_correlated_noise_less(digits):
    def accuracy(mechanism, epsilon):
        privacy = None if mechanism is None else privacy_utility.section(mechanism, epsilon, 40)
        return privacy_utility.train(digits, 0, 40, privacy)[0]

    without = accuracy(None, 0)
    assert without > 0.8
    assert accuracy("gaussian", 1e6) == pytest.approx(without, abs=0.02)
    # The noise has no seed. Here the two differ by 0.25, with a standard deviation of 0.03 each.
    independent = accuracy("gaussian", 0.4)
    assert independent < without - 0.05
    assert accuracy("correlated", 0.4) > independent + 0.02
