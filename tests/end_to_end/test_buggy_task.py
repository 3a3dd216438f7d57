"""A newcomer's task has a bug: `isthmus run` names the file with the traceback, in one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

BUGS = {
    "opening": "return self.rows(participant.shard[0] if participant.shard else 50, 64)",
    "training": "return torch.optim.SGD(parameters, lr=0.2)",
}
"""The line that is replaced by a mistake."""


@pytest.mark.parametrize("where", BUGS)
def test_the_sentence_at_the_end_leads_to_the_traceback(
    folder: Path, start: Any, where: str
) -> None:
    task = folder / "task.py"
    mended = task.read_text()
    lines = mended.replace(BUGS[where], "return undefined_name").splitlines()
    task.write_text("\n".join(lines))
    number = lines.index("        return undefined_name") + 1
    changes = ("strategy.policy=federated", "datacenter.ranks=0", "attempts=1", "rounds=1")
    run = start("job.toml", "--run-dir", "run", *(p for c in changes for p in ("--set", c)))
    assert run.finish() == 1
    last = run.output.strip().splitlines()[-1]
    log = re.search(r"\S+/client-0\.log", last)
    assert log is not None, run.output
    text = (folder / log[0]).read_text()
    assert "Traceback" in text
    assert f"{task}:{number}: NameError: name 'undefined_name' is not defined" in text
    if where == "training":
        assert "; mend the task, in the same way on the server and on each device" in last
        task.write_text(mended)
        again = start("--resume", "--run-dir", "run")
        assert again.finish() == 0, again.output


@pytest.mark.parametrize("where", BUGS)
def test_the_exit_status_of_a_device_that_a_task_ends_is_named(
    folder: Path, start: Any, where: str
) -> None:
    """Its log ends with something else, and a device that trained is still listed for a while."""
    task = folder / "task.py"
    ends = "os._exit(1)"  # also in the server, which makes an optimizer too, and goes on
    task.write_text(task.read_text().replace(BUGS[where], ends))
    changes = ("strategy.policy=federated", "datacenter.ranks=0", "time.lease_seconds=2")
    run = start("job.toml", "--run-dir", "run", *(p for c in changes for p in ("--set", c)))
    assert run.finish() == 1
    last = run.output.strip().splitlines()[-1]
    assert "declined: its process ended with exit status 1; see " in last, run.output
    assert re.search(r"/logs/client-\d\.log", last)
    assert "time.join_seconds" not in last
