"""What has to hold under every fault, read from the files of a deployment."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus_chaos.deployment import ChaosDeployment
from isthmus_chaos.plan import device_names
from isthmus_privacy.dp.ledger import LEDGER_FILE, Ledger, LedgerDamaged
from isthmus_server.budgets.budget import ROUND
from isthmus_server.storage.store import Store

_ALIVE = ("queued", "running", "paused")
_TRIES = 5
_TEMPORARY = ("*.tmp", "*.draft")


@dataclasses.dataclass(frozen=True)
class SeenRound:
    """A committed round as it was first read."""

    sha256: str | None
    """The model's; None while it stays in the datacenter."""
    regime: str
    accepted: tuple[str, ...]


class InvariantChecker:
    """Checks a deployment again and again, and remembers what was committed.

    The invariants:
      * a committed round stays committed, with the same model and participants, and round numbers
        have no gaps;
      * each invited participant of an ended attempt has exactly one receipt; in a buffered run,
        where a device may still train when its round ends, none has one before it was invited;
      * the checkpoints that the last commit names exist and have their digests;
      * no job fails, and no process ends for good;
      * with `[privacy]`, whom an attempt or an evaluation has asked is charged in the ledgers of
        the run and of the population, and no charge is ever lost;
      * no device has helped to unmask two different sums for one model, or for one round, and none
        has forgotten a sum.
    """

    def __init__(self, deployment: ChaosDeployment) -> None:
        self.deployment = deployment
        self.rounds: dict[str, dict[int, SeenRound]] = {}
        """By job and number."""
        self.cancelled: set[str] = set()
        """Jobs that the injector cancelled."""
        self.attempts: dict[str, int] = {}
        """Attempts of each job, failed ones included."""
        self._reported: set[str] = set()
        self._sums: dict[str, dict[tuple[str, ...], list[str]]] = {}
        """By device: survivors and vector of each sum that it has helped to unmask."""
        self._charges: dict[Path, int] = {}
        """Lines of each ledger when it was last read."""

    def check(self) -> list[str]:
        """The violations that were not reported before."""
        found = [*self._jobs(), *self._processes(), *self._histories()]
        for directory in sorted(self.deployment.runs.glob("*")):
            if (directory / "job.json").exists():
                found += self._run(directory)
        new = [violation for violation in found if violation not in self._reported]
        self._reported.update(new)
        return new

    def check_end(self) -> list[str]:
        """The violations after all processes have ended: files that were left, bad models."""
        found = self.check()
        for name in (*self.deployment.processes, "operator"):
            folder = self.deployment.participant_state(name)
            for pattern in _TEMPORARY:
                left = [path for path in sorted(folder.rglob(pattern)) if not self._is_task(path)]
                found += [f"{path} was left" for path in left]
        for id_, (state, reason) in self.deployment.jobs().items():
            if state != "finished" and id_ not in self.cancelled:
                found.append(f"{id_} has not finished: it is {state} {reason}".rstrip())
            elif state == "finished":
                found += self._final(id_)
        return found

    def model(self, id_: str) -> str:
        """The SHA-256 of the final model of a finished job."""
        final = self._final_record(id_)
        return str(final["model_sha256"])

    def model_bytes(self, id_: str) -> int:
        """The size of the final model of a finished job."""
        return Path(self._final_record(id_)["model_path"]).stat().st_size

    @property
    def repeatable(self) -> bool:
        """Whether two runs of the job have the same model; noise differs in every run."""
        job = self.deployment.job
        tables = (job.privacy, job.datacenter.privacy, job.federated.privacy)
        return all(table is None for table in tables)

    def differing_round(self, id_: str, other: str) -> int | None:
        """The first round of a job that another did not have with the same participants."""
        rounds = self.rounds[other]
        for number, row in self.rounds[id_].items():
            same = rounds.get(number)
            if same is None or (same.regime, same.accepted) != (row.regime, row.accepted):
                return number
        return None

    def _is_task(self, path: Path) -> bool:
        return path.is_relative_to(self.deployment.tasks)

    # -- the parts ---------------------------------------------------------------------------------

    def _jobs(self) -> Iterator[str]:
        for id_, (state, reason) in self.deployment.jobs().items():
            if state not in (*_ALIVE, "finished") and id_ not in self.cancelled:
                yield f"{id_} is {state}: {reason}"

    def _processes(self) -> Iterator[str]:
        for name, process in self.deployment.processes.items():
            if process.failed:
                yield f"{name} {process.failed}: see {process.log}"

    def _histories(self) -> Iterator[str]:
        """Compare the sums that each device has helped to unmask, from its history.

        The history has one line for each entry: the hash of the chain, and a JSON list, such as
        `["unmasked", run, round, model, survivors, vector, trained]`.
        """
        for name in device_names(self.deployment.devices):
            path = self.deployment.participant_state(name) / "history.log"
            text = path.read_bytes() if path.exists() else b""
            sums: dict[tuple[str, ...], list[str]] = {}
            for line in text.split(b"\n")[:-1]:  # what follows the last line end is incomplete
                kind, *values = json.loads(line.partition(b" ")[2])
                if kind != "unmasked":
                    continue
                run, round_, model, survivors, vector, _ = values
                # A round that is trained again from another model has another vector.
                for key, summed in (
                    ((model,), [survivors, vector]),
                    ((run, str(round_)), [survivors]),
                ):
                    if sums.setdefault(key, summed) != summed:
                        yield f"{name} has unmasked two sums for {' round '.join(key)}"
            earlier = self._sums.setdefault(name, {})
            if not earlier.items() <= sums.items():
                yield f"{name} has forgotten a sum that it has helped to unmask"
            earlier.update(sums)

    def _run(self, directory: Path) -> list[str]:
        id_ = directory.name
        problem = ""
        for _ in range(_TRIES):
            try:
                rows, newest = _read(directory / "run.sqlite")
            except sqlite3.Error as error:
                problem = f"{id_}: the round log cannot be read: {error}"
                continue
            missing = [
                *_damaged(directory / "checkpoints", newest),
                *self._uncharged(directory, rows),
            ]
            if not missing or _read(directory / "run.sqlite")[1] == newest:
                found = [f"{id_}: {what}" for what in missing]
                return found + [f"{id_}: {what}" for what in self._log(id_, rows)]
        return [problem] if problem else []  # else it commits faster than files can be read

    def _uncharged(self, directory: Path, rows: list[tuple[Any, ...]]) -> Iterator[str]:
        """Compare the ledgers with the attempts that were planned before they are read."""
        privacy = self.deployment.job.privacy
        asked = [(round_, attempt, json.loads(planned)) for round_, attempt, _, planned, _ in rows]
        evaluated = {
            round_: found["devices"]
            for round_, _, state, _, record in rows
            if state == "committed" and (found := json.loads(record).get("evaluation"))
        }
        if privacy is None or not any(planned["invited"] for _, _, planned in asked):
            return
        with contextlib.closing(Store.open(directory)) as store:
            run = store.run_id
        shared = self.deployment.server_state / "privacy" / f"{privacy.population}.ledger"
        for path in (directory / LEDGER_FILE, shared):
            try:
                ledger = Ledger.read(path)
            except LedgerDamaged as error:
                yield str(error)
                continue
            if ledger.head.number < self._charges.get(path, 0):
                yield f"{path} has lost charges"
            self._charges[path] = ledger.head.number
            charged: dict[tuple[int, int], set[str]] = {}
            measured: dict[int, set[str]] = {}
            for entry in ledger.of_run(run):
                charge = entry.charge
                if charge.what == ROUND:
                    about = (charge.round, charge.attempt)
                    charged.setdefault(about, set()).update(charge.devices)
                elif charge.what == "evaluation":
                    measured.setdefault(charge.round, set()).update(charge.devices)
            for round_, devices in evaluated.items():
                if len(measured.get(round_, ())) < devices:
                    yield f"the evaluation of round {round_} is not charged to {devices} devices"
            for round_, attempt, planned in asked:
                free = set(planned["invited"]) - charged.get((round_, attempt), set())
                if free:
                    yield f"round {round_} attempt {attempt} is not charged to {sorted(free)}"

    def _log(self, id_: str, rows: list[tuple[Any, ...]]) -> Iterator[str]:
        seen = self.rounds.setdefault(id_, {})
        committed: dict[int, SeenRound] = {}
        self.attempts[id_] = len(rows)
        is_buffered = self._is_buffered(id_)
        invited_so_far: set[str] = set()
        for round_, attempt, state, planned, record in rows:
            if record is None:
                continue
            receipts = json.loads(record)["receipts"]
            names = sorted(receipt["participant"] for receipt in receipts)
            plan = json.loads(planned)
            invited = sorted([*plan["invited"], *plan["datacenters"]])
            invited_so_far.update(invited)
            about = f"round {round_} attempt {attempt}"
            if not is_buffered and names != invited:
                yield f"{about} invited {invited} and has receipts of {names}"
            elif len(set(names)) < len(names) or not invited_so_far.issuperset(names):
                yield f"{about} has receipts of {names}, and {sorted(invited_so_far)} were invited"
            if state == "committed":
                if round_ in committed:
                    yield f"round {round_} is committed twice"
                table = json.loads(record)
                accepted = [r["participant"] for r in receipts if r["status"] == "accepted"]
                committed[round_] = SeenRound(
                    table["model_sha256"], table["regime"], tuple(sorted(accepted))
                )
        if sorted(committed) != list(range(1, len(committed) + 1)):
            yield f"the committed rounds have gaps: {sorted(committed)}"
        for round_, earlier in seen.items():
            if committed.get(round_) != earlier:
                yield f"round {round_} was {earlier} and is now {committed.get(round_)}"
        seen.update({number: row for number, row in committed.items() if number not in seen})

    def _final_record(self, id_: str) -> Any:
        log = self.deployment.runs / id_ / "run.sqlite"
        with _reading(log) as db:
            return json.loads(db.execute("SELECT final FROM run").fetchone()[0])

    def _is_buffered(self, id_: str) -> bool:
        description = json.loads((self.deployment.runs / id_ / "job.json").read_text())
        return bool(description["job"]["federated"]["mode"] == "buffered")

    def _final(self, id_: str) -> Iterator[str]:
        import torch
        from safetensors.torch import load_file

        final = self._final_record(id_)
        path = Path(final["model_path"])
        if hashlib.sha256(path.read_bytes()).hexdigest() != final["model_sha256"]:
            yield f"{id_}: the final model has another digest"
        if not all(torch.isfinite(tensor).all() for tensor in load_file(path).values()):
            yield f"{id_}: the final model is not finite"
        if not all(math.isfinite(figure) for figure in final["metrics"].values()):
            yield f"{id_}: its evaluation is {final['metrics']}"
        rounds = self.deployment.job.rounds
        if self.deployment.job.budget is None and len(self.rounds[id_]) != rounds:
            yield f"{id_}: finished with {len(self.rounds[id_])} of {rounds} rounds"


def attempts_of(directory: Path) -> int:
    """How many attempts at rounds a run has begun.

    Raises:
        sqlite3.Error: its log cannot be read, or is not there yet.
    """
    return len(_read(directory / "run.sqlite")[0])


def _damaged(folder: Path, state: str | None) -> list[str]:
    """The checkpoints that a committed state names and that are missing or have other bytes."""
    table = {} if state is None else json.loads(state)
    saved = [*table.get("models", {}).values(), table.get("optimizer")]
    found = []
    for entry in saved:
        if entry is None:
            continue
        try:
            digest = hashlib.sha256((folder / entry["file"]).read_bytes()).hexdigest()
        except FileNotFoundError:
            found.append(f"the checkpoint {entry['file']} of the last commit is missing")
        else:
            if digest != entry["sha256"]:
                found.append(f"the checkpoint {entry['file']} of the last commit is damaged")
    return found


@contextlib.contextmanager
def _reading(log: Path) -> Iterator[sqlite3.Connection]:
    """Open a log that another process writes; a read-only connection changes nothing in it."""
    with contextlib.closing(sqlite3.connect(f"{log.as_uri()}?mode=ro", uri=True, timeout=10)) as db:
        yield db


def _read(log: Path) -> tuple[list[tuple[Any, ...]], str | None]:
    """All attempts, and the state after the last commit."""
    with _reading(log) as db:
        db.execute("BEGIN")
        rows = db.execute(
            "SELECT round, attempt, state, planned, record FROM attempts ORDER BY round, attempt"
        ).fetchall()
        newest = db.execute(
            "SELECT run_state FROM attempts WHERE state='committed' ORDER BY round DESC LIMIT 1"
        ).fetchone()
    return rows, None if newest is None else newest[0]
