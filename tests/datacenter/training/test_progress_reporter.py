"""Progress reports of a training command."""

from __future__ import annotations

import pytest
import torch

import isthmus_datacenter.training.profile
from isthmus_datacenter.messages import ProgressReport
from isthmus_datacenter.training.profile import ProgressReporter

CPU = torch.device("cpu")


class Clock:
    """A clock whose time the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(isthmus_datacenter.training.profile, "time", clock)
    return clock


def test_a_report_covers_the_steps_since_the_last(clock: Clock) -> None:
    reports: list[ProgressReport] = []
    reporter = ProgressReporter(reports.append, 100, 8, CPU)
    total = torch.zeros((), dtype=torch.float64)
    for step in range(1, 9):
        clock.now += 0.125
        total += 20.0 * step  # ten units of twenty are scored on this rank
        reporter.step(total, 10, 20)
    assert [(each.steps, each.total_steps) for each in reports] == [(4, 100), (8, 100)]
    assert [each.loss for each in reports] == [2 * (1 + 2 + 3 + 4) / 4, 2 * (5 + 6 + 7 + 8) / 4]
    assert {each.examples_per_second for each in reports} == {8 * 8.0}
    assert {each.units_per_second for each in reports} == {8 * 20.0}


def test_a_resumed_round_reports_all_its_steps(clock: Clock) -> None:
    reports: list[ProgressReport] = []
    reporter = ProgressReporter(
        reports.append, 100, 8, CPU, steps_before=40, loss_sum_before=1000.0
    )
    clock.now += 1.0
    reporter.step(torch.tensor(1030.0, dtype=torch.float64), 10, 10)
    assert reports == [
        ProgressReport(
            steps=41, total_steps=100, loss=3.0, examples_per_second=8.0, units_per_second=10.0
        )
    ]
