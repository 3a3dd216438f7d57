"""One command trains a model on real ranks and devices, and survives the loss of any process."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file


def test_uninterrupted_and_killed_runs_end_with_the_same_bytes(
    folder: Path, start: Any, report_of: Any
) -> None:
    """Kill the coordinator after a datacenter and a hybrid round, and interrupt it in a round."""
    whole = start("job.toml", "--run-dir", "whole")
    assert whole.finish() == 0, whole.output

    gate = folder / "gate"
    hold = ("--set", "task.settings.hold=client-0", "--set", f"task.settings.gate={gate}")
    run = start("job.toml", "--run-dir", "killed", *hold)
    for round_ in (1, 3):
        run.wait_for_line(rf"round +{round_} ")
        run.kill()
        run = start("--resume", "--run-dir", "killed")
    os.mkfifo(gate)
    with gate.open("w"):  # as soon as client-0 waits in round 4 or 5
        gate.unlink()
        run.interrupt()
        run.wait_for_line(r"stopping: a running round has 30 s to end")
    run.wait_for_line(r"round +[45] ")
    assert run.finish() == 130
    assert "stopped; continue with  isthmus run --resume --run-dir killed" in run.output
    run = start("--resume", "--run-dir", "killed")
    assert run.finish() == 0, run.output

    uninterrupted, resumed = report_of("whole"), report_of("killed")
    assert resumed["final"]["model_sha256"] == uninterrupted["final"]["model_sha256"]
    assert resumed["final"]["metrics"] == uninterrupted["final"]["metrics"]
    for row, expected in zip(resumed["rounds"], uninterrupted["rounds"], strict=True):
        for key in ("round", "regime", "reason", "metrics", "model_sha256", "training"):
            assert row[key] == expected[key]
    assert {row["regime"] for row in uninterrupted["rounds"]} == {
        "datacenter",
        "hybrid",
        "federated",
    }
    assert set(load_file(uninterrupted["final"]["model_path"])) == {
        "0.bias",
        "0.weight",
        "2.bias",
        "2.weight",
    }


def test_an_interrupted_comparison_is_continued_by_the_same_command(
    folder: Path, start: Any
) -> None:
    """It is interrupted in its first round, and gives the figures of one that was not.

    Its second variant has one device more, and processes of its own.
    """
    gate = folder / "gate"
    keys = ("budget=8", "strategy.policy=federated", "strategy.schedule=[]", "datacenter.ranks=0")
    keys += ("task.settings.hold=client-0", f"task.settings.gate={gate}")
    sets = [word for key in keys for word in ("--set", key)]
    vary = ("--vary", "federated.clients=4,5", "--seeds", "1")
    arguments = ("job.toml", *vary, *sets)

    def compare(name: str) -> Any:
        where = ("--run-dir", name, "--json", f"{name}.json")
        return start(*arguments, *where, command="compare")

    whole = compare("whole")
    assert whole.finish() == 0, whole.output
    variants = json.loads((folder / "whole.json").read_text())["variants"]
    assert [variant["changes"] for variant in variants] == [
        {"federated.clients": 4},
        {"federated.clients": 5},
    ]
    assert [row["rounds"] for variant in variants for row in variant["runs"]] == [2, 2]
    assert "┃ federated.clients ┃ rounds ┃ cost ┃" in whole.output
    os.mkfifo(gate)
    parked = compare("parked")
    with gate.open("w"):  # as soon as client-0 waits in round 1
        gate.unlink()
        parked.interrupt()
        parked.wait_for_line(r"stopping: a running round has 30 s to end")
    assert parked.finish() == 130
    assert "stopped; the same command with  --run-dir parked  continues" in parked.output
    again = compare("parked")
    assert again.finish() == 0, again.output
    parked_results, whole_results = (
        # The ids and times in messages have different lengths.
        re.sub(r'"(seconds|device_bytes)": .*', "", (folder / f"{name}.json").read_text())
        for name in ("parked", "whole")
    )
    assert parked_results == whole_results
    other = start(*arguments, "--set", "budget=4", "--run-dir", "parked", command="compare")
    assert other.finish() == 1
    assert "has a run of another job; give another directory with --run-dir" in other.output


def test_a_device_killed_during_a_round_is_reported_and_rejoins(
    folder: Path, start: Any, report_of: Any
) -> None:
    marker, gate = folder / "marker", folder / "gate"
    os.mkfifo(marker)
    os.mkfifo(gate)
    run = start(
        *("job.toml", "--run-dir", "run", "--set", "strategy.policy=federated"),
        *("--set", "rounds=3", "--set", "datacenter.ranks=0"),
        *("--set", "task.settings.block=client-1", "--set", f"task.settings.marker={marker}"),
        *("--set", "task.settings.hold=client-0", "--set", f"task.settings.gate={gate}"),
    )
    os.kill(run.wait_for_blocked(marker), signal.SIGKILL)
    run.wait_for_opens(folder / "run/logs/client-1.log", times=2)
    with gate.open("w"):
        gate.unlink()
    assert run.finish() == 0, run.output

    report = report_of("run")
    receipts = {row["participant"]: row for row in report["rounds"][0]["receipts"]}
    assert receipts["client-1"]["status"] == "dropped"
    assert "a new one has come back" in receipts["client-1"]["reason"]
    assert report["rounds"][0]["participants"] == {
        "invited": 4,
        "started": 4,
        "sent": 3,
        "accepted": 3,
        "rejected": 0,
        "dropped": 1,
    }
    assert report["rounds"][2]["participants"]["accepted"] == 4
    assert "client-1" in run.output


def test_a_rank_killed_during_a_round_is_replaced_without_changing_the_result(
    folder: Path, start: Any, report_of: Any
) -> None:
    marker = folder / "marker"
    os.mkfifo(marker)
    settings = ("--set", "strategy.policy=datacenter", "--set", "federated.clients=0")
    settings += ("--set", "rounds=2")
    run = start(
        *("job.toml", "--run-dir", "run", *settings),
        *("--set", "task.settings.block=rank-1", "--set", f"task.settings.marker={marker}"),
    )
    os.kill(run.wait_for_blocked(marker), signal.SIGKILL)
    assert run.finish() == 0, run.output
    undisturbed = start("job.toml", "--run-dir", "undisturbed", *settings)
    assert undisturbed.finish() == 0, undisturbed.output

    report = report_of("run")
    assert "rank 1" in report["rounds"][0]["receipts"][0]["reason"]
    assert report["final"]["model_sha256"] == report_of("undisturbed")["final"]["model_sha256"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["federated.chort=3"], "unknown key federated.chort; did you mean cohort?"),
        (["task.source=nowhere.py:Table"], "there is no file"),
        (["strategy.server_optimizer.name=Best"], "is not an optimizer of torch.optim"),
    ],
)
def test_a_mistake_in_the_job_is_one_sentence(
    start: Any, settings: list[str], sentence: str
) -> None:
    run = start("job.toml", *[part for setting in settings for part in ("--set", setting)])
    assert run.finish() == 1
    assert sentence in run.output
    assert run.output.count("\n") == 1
    assert "Traceback" not in run.output
