"""Measurements of a training command."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isthmus_datacenter.training.profile import RoundProfile, count_flops

CPU = torch.device("cpu")


def test_figures_add_up_to_the_time_of_a_round() -> None:
    profile = RoundProfile(CPU)
    assert profile.step_figures(0, 0, 0, 0) == {}
    profile.begin()
    for _ in profile.timed_reads(iter([1, 2])):
        with profile.device_time("forward_backward"):
            torch.randn(100, 100) @ torch.randn(100, 100)
        with profile.device_time("optimizer"):
            pass
    profile.end()
    with profile.host_time("checkpoint"):
        pass
    figures = profile.step_figures(2, 16, 160, flops=1000.0)
    shares = [figures[f"{part}_share"] for part in ("reading", "forward_backward", "optimizer")]
    assert all(0 < share < 1 for share in shares)
    assert sum(shares) < 1
    assert figures["step_seconds"] * 2 == pytest.approx(profile.seconds)
    assert figures["examples_per_second"] * profile.seconds == pytest.approx(16)
    assert figures["units_per_second"] * profile.seconds == pytest.approx(160)
    assert figures["model_flops_per_second"] * profile.seconds == pytest.approx(2000)
    assert figures["peak_memory_gib"] > 0.01
    assert "mfu" not in figures
    assert profile.round_figures().keys() == {"checkpoint_seconds"}


def test_counting_operations_has_no_side_effects() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    state = torch.get_rng_state()
    assert count_flops(model, lambda: model(torch.ones(3, 6))) == 3 * 2 * 3 * (6 * 4 + 4 * 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
