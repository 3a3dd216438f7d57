"""Two datacenters with and without compressed updates, for `compression.py`.

A server and two datacenters of one rank, each a process, train the transformer of
examples/shakespeare over mutual TLS. Both datacenters have the lines of the same 24 speakers in
orders of their own; the last lines of four others are held out. Both jobs have the same tokens,
but for a round or two in which the job without compression has one datacenter.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from device_fleet.server import run_status
from harness.processes import ISTHMUS, Program, free_port, isthmus, started

EXAMPLE = Path(__file__).parent.parent / "examples" / "shakespeare"
TASK = Path(__file__).with_name("compression_shakespeare.py")
NAMES = ("east", "west")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
ROUNDS, STEPS, LAST, LATE = 240, 30, 3, 2
COMPRESSED = ("datacenter.compression={keep=144}",)
SPEAKERS = (
    "GLOUCESTER, DUKE VINCENTIO, KING RICHARD II, LEONTES, CORIOLANUS, ROMEO, PETRUCHIO, JULIET, "
    "MENENIUS, QUEEN MARGARET, WARWICK, KING RICHARD III, HENRY BOLINGBROKE, ISABELLA, "
    "KING EDWARD IV, KING HENRY VI, BUCKINGHAM, FRIAR LAURENCE, QUEEN ELIZABETH, PROSPERO, "
    "VOLUMNIA, PAULINA, ANGELO, AUTOLYCUS"
)

JOB = f"""
name = "shakespeare"

[task]
source = "shakespeare/compression_shakespeare.py:OwnOrder"
data = "shakespeare/tinyshakespeare.txt"

[task.settings]
public_speakers = {json.dumps(SPEAKERS.split(", "))}
public_held_out = []
speakers = 4
minimum_characters = 2000
context = 64
model = {{ width = 64, head_width = 16, depth = 2 }}
datacenter_lr = 0.003

[strategy]
policy = "datacenter"
server_optimizer = {{ name = "SGD", options = {{ lr = 1.0 }} }}

[datacenter]
steps = {STEPS}
batch_size = 16
optimizer_on_load = "keep"

[learning_rate]
schedule = "cosine"
warmup_steps = 100
"""


@dataclass(frozen=True)
class Outcome:
    """Bytes of a datacenter in a round, and the perplexity of a character at the end."""

    up: float
    perplexity: float


def compare(
    data: Path, seeds: int, rounds: int, changes: tuple[str, ...] = ()
) -> tuple[Outcome, Outcome]:
    """Means over seeds, without and with compression."""
    plain, small = [], []
    with deployment(data) as folder:
        for seed in range(1, 1 + seeds):
            plain.append(measure(folder, seed, rounds, changes))
            small.append(measure(folder, seed, rounds, (*changes, *COMPRESSED)))
    return _mean(plain), _mean(small)


def _mean(outcomes: list[Outcome]) -> Outcome:
    return Outcome(
        statistics.mean(each.up for each in outcomes),
        statistics.mean(each.perplexity for each in outcomes),
    )


@contextlib.contextmanager
def deployment(data: Path) -> Iterator[Path]:
    """A server and two connected datacenters; yields their directory."""
    with tempfile.TemporaryDirectory(prefix="datacenters-") as scratch:
        folder, port = Path(scratch), free_port()
        _isthmus("server", "init", "fleet", "--host", "localhost", folder=folder)
        tasks = folder / "fleet" / "tasks"
        shutil.copytree(
            EXAMPLE, tasks / "shakespeare", ignore=shutil.ignore_patterns("runs", "__*")
        )
        shutil.copy(data / "tinyshakespeare.txt", tasks / "shakespeare")
        shutil.copy(TASK, tasks / "shakespeare")
        with contextlib.ExitStack() as running:
            address = ("--address", f"127.0.0.1:{port}")
            running.enter_context(_serving("server", "start", "fleet", *address, folder=folder))
            for name in NAMES:
                join("datacenter", name, port, folder)
                launch = ("launch", "--state", name, "--ranks", "1", "--tasks", str(tasks))
                text = ("--data", str(tasks / "shakespeare" / "tinyshakespeare.txt"))
                running.enter_context(_serving("datacenter", *launch, *text, folder=folder))
            join("operator", "operator", port, folder)
            wait_for(lambda: online(folder) == set(NAMES))
            yield folder


def measure(folder: Path, seed: int, rounds: int, changes: tuple[str, ...]) -> Outcome:
    """Run one job on the server, and read its report."""
    (folder / "job.toml").write_text(JOB, encoding="utf-8")
    settings = [f"seed={seed}", f"rounds={rounds}", *changes]
    arguments = [part for change in settings for part in ("--set", change)]
    submitted = _isthmus("submit", "job.toml", "--state", "operator", *arguments, folder=folder)
    job = submitted.split()[0]
    ended = ("finished", "failed", "cancelled")
    wait_for(lambda: run_status(folder / "fleet/runs" / job) in ended)
    report = json.loads(_isthmus("report", f"fleet/runs/{job}", "--json", folder=folder))
    assert report["status"] == "finished", report["status"]
    return outcome_of(report)


def outcome_of(report: dict[str, Any]) -> Outcome:
    """Bytes of rounds with both datacenters, and perplexity.

    Without compression a job begins as soon as one is ready; both must be in all but `LATE` rounds.
    """
    bytes_in, alone = [], 0
    for row in report["rounds"]:
        accepted = [each for each in row["receipts"] if each["status"] == "accepted"]
        if len(accepted) == len(NAMES):
            bytes_in += [receipt["bytes_in"] for receipt in accepted]
        else:
            alone += 1
    assert alone <= LATE, f"{alone} rounds had one datacenter"
    loss = statistics.mean(row["metrics"]["loss"] for row in report["rounds"][-LAST:])
    return Outcome(statistics.mean(bytes_in), math.exp(loss))


def online(folder: Path) -> set[str]:
    """Connected datacenters."""
    rows = json.loads(_isthmus("server", "participants", "fleet", "--json", folder=folder))
    return {row["name"] for row in rows["participants"] if row["state"] == "online"} & set(NAMES)


def join(kind: str, name: str, port: int, folder: Path) -> None:
    """Let a participant join the server with a token."""
    create = ("server", "token", "create", "fleet", "--name", name, "--kind", kind)
    token = _isthmus(*create, folder=folder).split()[-1]
    address = f"localhost:{port + 1}"
    wait_for(lambda: succeeds(kind, "join", address, token, "--state", name, folder=folder))


def wait_for(holds: Callable[[], bool], seconds: float = 3600, pause: float = 0.2) -> None:
    """Ask again and again until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(pause)


def succeeds(*arguments: str, folder: Path) -> bool:
    """Whether a command ends without an error."""
    try:
        _isthmus(*arguments, folder=folder)
    except RuntimeError:
        return False
    return True


def _serving(*arguments: str, folder: Path) -> AbstractContextManager[Program]:
    """A process that is ended again; its log is named after its first arguments."""
    log = folder / f"{'-'.join(arguments[:4]).replace('/', '-')}.log"
    return started([ISTHMUS, *arguments], log, environment=ENVIRONMENT, directory=folder)


def _isthmus(*arguments: str, folder: Path) -> str:
    return isthmus(*arguments, environment=ENVIRONMENT, directory=folder)
