"""What is said of a round while it runs, and what it cost."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isthmus_datacenter.training.profile
from isthmus.wire import link_pb2
from isthmus_datacenter.service.logs import delete_old_logs
from isthmus_datacenter.service.messages import ProgressReport
from isthmus_datacenter.training.profile import ProgressReporter, RoundProfile, count_flops

CPU = torch.device("cpu")


class Clock:
    """Tells the time when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(isthmus_datacenter.training.profile, "time", clock)
    return clock


def test_reports_are_of_what_came_since_the_last(clock: Clock) -> None:
    told: list[ProgressReport] = []
    reporter = ProgressReporter(told.append, 100, 8, CPU)
    total = torch.zeros((), dtype=torch.float64)
    for step in range(1, 9):
        clock.now += 0.125
        total += 20.0 * step  # ten units are scored here, of twenty
        reporter.step(total, 10, 20)
    assert [(each.steps, each.total_steps) for each in told] == [(4, 100), (8, 100)]
    assert [each.loss for each in told] == [2 * (1 + 2 + 3 + 4) / 4, 2 * (5 + 6 + 7 + 8) / 4]
    assert {each.examples_per_second for each in told} == {8 * 8.0}
    assert {each.units_per_second for each in told} == {8 * 20.0}


def test_a_round_that_goes_on_reports_the_whole(clock: Clock) -> None:
    told: list[ProgressReport] = []
    reporter = ProgressReporter(told.append, 100, 8, CPU, steps_before=40, loss_sum_before=1000.0)
    clock.now += 1.0
    reporter.step(torch.tensor(1030.0, dtype=torch.float64), 10, 10)
    assert told == [
        ProgressReport(
            steps=41, total_steps=100, loss=3.0, examples_per_second=8.0, units_per_second=10.0
        )
    ]


def test_what_a_service_says_while_it_works(warm: Any, setup: Any) -> None:
    heard: list[link_pb2.Progress] = []
    made = setup("Table", layout="auto")
    opening = link_pb2.Request(id="live-open", open=made.opening("live"))
    warm.run(warm.service.work(opening, None, heard.append))
    reason = r"layout: zero_stage=0: 3\.11e\+02 parameters take 0\.0 GiB .* on each of 2 ranks"
    assert [bool(re.fullmatch(reason, each.note)) for each in heard] == [True]

    train = link_pb2.TrainSteps(run_id="live", from_step=0, until_step=10**6)
    request = link_pb2.Request(id="live-train", train_steps=train)

    async def listen() -> None:
        several = asyncio.Event()

        def hear(progress: link_pb2.Progress) -> None:
            heard.append(progress)
            if len(heard) == 3:
                several.set()

        work = asyncio.create_task(warm.service.work(request, None, hear))
        await several.wait()
        warm.service.cancel(request, "enough was heard")
        await asyncio.gather(work, return_exceptions=True)

    warm.run(listen())
    first, second = heard[1:3]
    assert 0 < first.steps < second.steps < first.total_steps == 10**6
    assert 0 < second.loss < 3
    # An example is a unit here, and a step takes eight.
    assert second.examples_per_second == pytest.approx(second.units_per_second)
    assert second.examples_per_second > 0


def test_the_figures_of_a_round() -> None:
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
    found = profile.step_figures(2, 16, 160, flops=1000.0)
    shares = [found[f"{part}_share"] for part in ("reading", "forward_backward", "optimizer")]
    assert all(0 < share < 1 for share in shares)
    assert sum(shares) < 1
    assert found["step_seconds"] * 2 == pytest.approx(profile.seconds)
    assert found["examples_per_second"] * profile.seconds == pytest.approx(16)
    assert found["units_per_second"] * profile.seconds == pytest.approx(160)
    assert found["model_flops_per_second"] * profile.seconds == pytest.approx(2000)
    assert found["peak_memory_gib"] > 0.01
    assert "mfu" not in found
    assert profile.round_figures().keys() == {"checkpoint_seconds"}


def test_operations_are_counted_without_being_noticed() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    drawn = torch.get_rng_state()
    assert count_flops(model, lambda: model(torch.ones(3, 6))) == 3 * 2 * 3 * (6 * 4 + 4 * 2)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.training


def test_the_output_of_the_last_ten_generations_is_kept(tmp_path: Path) -> None:
    for number in range(8, 20):
        (tmp_path / f"agent-{number}.log").touch()
        (tmp_path / f"generation-{number}_x1y2" / "attempt_0").mkdir(parents=True)
    (tmp_path / "notes.txt").touch()
    delete_old_logs(tmp_path, starting_generation=8)
    expected = {f"agent-{number}.log" for number in (8, *range(10, 20))}
    expected |= {f"generation-{number}_x1y2" for number in (8, *range(10, 20))}
    assert {path.name for path in tmp_path.iterdir()} == expected | {"notes.txt"}
