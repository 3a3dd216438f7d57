"""docs/chat.md, from an empty folder to answers, and the options of the project's job."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator

import pytest
from tests.docs.test_commands import ROOT, Terminal, blocks
from tests.forked_commands import ForkedCommands

PAGE = "docs/chat.md"
QUESTION = '"Can I take a dog?"'
ANSWER = b"Yes, a dog travels free."


@pytest.fixture(scope="module")
def walked(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Terminal, dict[str, bytes]]]:
    """A folder in which all commands of the page were typed, and what each has printed.

    The project's five scripts would take half of the time to import PyTorch and transformers.
    """
    with ForkedCommands("python") as commands:
        # Threads of such small models wait for each other, next to other tests for very long.
        environment = {**commands.environment(), "OMP_NUM_THREADS": "1"}
        terminal = Terminal(tmp_path_factory.mktemp("chat"), environment)
        said = {}
        for block in blocks(PAGE):
            for line in block.strip().splitlines():
                said[line] = terminal.read(line)
        yield terminal, said
        terminal.close()


def test_the_model_answers_as_the_private_dialogues_after_the_run_and_not_before(
    walked: tuple[Terminal, dict[str, bytes]],
) -> None:
    _, said = walked
    answers = {line.split()[2]: text.strip() for line, text in said.items() if QUESTION in line}
    before = answers.pop("ferry/base")
    assert answers == {"runs/ferry": ANSWER, "runs/ferry/huggingface": ANSWER}
    assert b"dog" not in before
    assert f"`{ANSWER.decode()}`" in (ROOT / PAGE).read_text()


def test_figures_of_each_round_are_losses_per_answer_token(
    walked: tuple[Terminal, dict[str, bytes]],
) -> None:
    terminal, said = walked
    report = json.loads(terminal.read("isthmus report runs/ferry --json"))
    assert report["status"] == "finished"
    assert report["job"]["federated"]["secure_aggregation"]
    lines = said["python ferry/figures.py runs/ferry"].decode().splitlines()
    assert len(lines) == len(report["rounds"])
    for line, record in zip(lines, report["rounds"], strict=True):
        shown = re.findall(r"dialogues ([\d.]+) \(perplexity ([\d.]+)\)", line)
        expected = [record["metrics"][name] for name in ("devices_loss", "public_loss")]
        assert [float(loss) for loss, _ in shown] == pytest.approx(expected, abs=1e-3)
        assert [float(each) for _, each in shown] == pytest.approx(
            [math.exp(loss) for loss in expected], rel=1e-2
        )
    first, *_, last = (record["metrics"]["devices_loss"] for record in report["rounds"])
    assert last < first / 3
    regimes = {record["regime"] for record in report["rounds"]}
    assert "hybrid" in regimes  # devices take the gradient of the datacenter's public dialogues


def uncommented(job: str, table: str) -> str:
    """The job with a table that is in its comments."""
    block = re.search(rf"^# \[{table}\]\n(?:# .*\n?)+", job, re.MULTILINE)
    assert block is not None
    text = re.sub("^# ", "", block.group(), flags=re.MULTILINE)
    changed = job.replace(block.group(), text)
    assert table in tomllib.loads(changed)
    assert table not in tomllib.loads(job)
    return changed


@pytest.mark.parametrize("table", ["privacy", "exchange"])
def test_tables_in_comments_of_the_job_work(
    table: str, walked: tuple[Terminal, dict[str, bytes]]
) -> None:
    terminal, _ = walked
    job = terminal.folder / "ferry/job.toml"
    changed = job.with_name(f"{table}.toml")
    changed.write_text(uncommented(job.read_text(), table))
    terminal.type(
        f"isthmus run ferry/{table}.toml --run-dir runs/{table} --set rounds=2"
        " --set federated.local_epochs=1"
    )
    report = json.loads(terminal.read(f"isthmus report runs/{table} --json"))
    assert report["status"] == "finished"
    for record in report["rounds"]:
        assert record["participants"]["accepted"] >= 4
        assert math.isfinite(record["metrics"]["devices_loss"])
    if table == "privacy":
        assert 0 < report["privacy"]["epsilon"] <= 8
        assert b"epsilon" in terminal.read("isthmus privacy ledger runs/privacy")
    else:
        states = list((terminal.folder / "runs/exchange/devices").rglob("personal/*"))
        assert len(states) >= 4
