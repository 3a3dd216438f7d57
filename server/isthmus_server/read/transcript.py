"""The transcript of a run: what was planned, done, signed and charged, in one chain of hashes.

`isthmus-verify` checks it without Isthmus, and its `chain` module describes the form. The entries
are, in this order:

    run       the job, and its texts as devices have opened it
    charge    each line of the privacy ledger
    sum       what the devices of each secure sum of updates have signed
    plan      an attempt at a round, with the model that it starts from
    round     how it ended: its record, and the digests of the models that were committed
    failed    or that it failed
    end       how the run ended, and the final model

What is only about speed is left out (profiles, figures of steps), and so are what policies have
observed, and their states.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

from isthmus.errors import UserError
from isthmus.job import write_job
from isthmus_privacy.dp.ledger import LEDGER_FILE, Ledger, last_known
from isthmus_server.storage.records import CommittedState, FailedAttempt, PlannedAttempt
from isthmus_server.storage.signed_sums import config_of, read_signed_sums
from isthmus_server.storage.store import Store
from isthmus_server.strategy.policy import CURRENT, SERVED, Plan

FORMAT = 1
MAX_LINE = 16 << 20
"""Bytes of an entry; the verifier reads no longer ones."""

_BEFORE_FIRST = "0" * 64
_LEFT_OUT_OF_RECORDS = ("profile", "step_figures")
_LEFT_OUT_OF_DECISIONS = ("observation",)


class Transcript:
    """Writes the entries of one run, one in memory at a time; the run is only read.

    A run that has ended always has the same transcript.
    """

    def __init__(self, store: Store) -> None:
        """`store`: of the run, open to read."""
        self._store = store
        self.head = _BEFORE_FIRST
        """Hash of the last entry so far; of the last one it names the transcript."""
        self.entries = 0

    def lines(self) -> Iterator[bytes]:
        """The lines of the file, each with its end.

        Raises:
            UserError: the run is damaged, or has an entry that is too long.
        """
        # The log first: another process may go on, and what a round of the log has been charged and
        # signed is on disk by then.
        with self._store.snapshot():
            for kind, content in self._contents():
                yield self._line(kind, content)

    def _line(self, kind: str, content: dict[str, Any]) -> bytes:
        self.entries += 1
        table = {"content": content, "kind": kind, "number": self.entries}
        hashed = hashlib.sha256(bytes.fromhex(self.head) + _canonical(table))
        self.head = hashed.hexdigest()
        line = _canonical({**table, "hash": self.head}) + b"\n"
        if len(line) > MAX_LINE:
            raise UserError(
                f"entry {self.entries} of the transcript ({kind}) would have {len(line)} bytes, "
                f"and {MAX_LINE} is the most"
            )
        return line

    def _contents(self) -> Iterator[tuple[str, dict[str, Any]]]:
        store = self._store
        opened = list(dict.fromkeys(self._opened()))
        yield (
            "run",
            {
                "format": FORMAT,
                "job": store.job.model_dump(mode="json"),
                "opened": opened,
                "run": store.run_id,
            },
        )
        for line in self._ledger():
            yield "charge", {"line": line}
        for signed in self._signed_sums():
            yield "sum", signed
        state = CommittedState()
        for logged, committed in store.proved_attempts():
            yield "plan", _plan(logged.planned, state)
            if logged.record is None:
                continue
            record = logged.record.to_json()
            for key in _LEFT_OUT_OF_RECORDS:
                record.pop(key, None)
            for comparison in record.get("comparisons", ()):
                del comparison["policy_state"]
            if isinstance(logged.record, FailedAttempt) or committed is None:
                yield "failed", {"record": _finite(record)}
                continue
            state = committed
            yield "round", {"record": _finite(record), **_commit(state)}
        status, _, final = store.status()
        # What is said about the end of a run may have paths, and the digest is enough.
        ended = None
        if final is not None:
            ended = final.to_json()
            del ended["model_path"]
        end = {"status": status, "final": _finite(ended), "entries": self.entries + 1}
        yield "end", end

    def _opened(self) -> Iterator[str]:
        """The job as devices have opened it; of a run without signed sums as they would."""
        texts = [line["job"] for line in self._lines_of_sums() if "job" in line]
        yield from texts or [write_job(self._store.job)]

    def _lines_of_sums(self) -> Iterator[dict[str, str]]:
        """What is kept of the signed sums.

        Raises:
            UserError: it cannot be read, or is damaged.
        """
        try:
            yield from read_signed_sums(self._store.directory)
        except OSError as error:
            raise self._store.unusable(error) from error

    def _signed_sums(self) -> Iterator[dict[str, str]]:
        """The sums of attempts that the log has; a run under way may have signed another one."""
        store = self._store
        ended = store.status()[0] == "finished"
        planned = store.planned_attempts()
        for line in self._lines_of_sums():
            if "job" in line:
                continue
            if not ended:
                config = config_of(line, store.directory)
                if config.run_id == store.run_id and (config.round, config.attempt) not in planned:
                    continue
            yield line

    def _ledger(self) -> Iterator[str]:
        """The lines of the run's privacy ledger, if it has one.

        Raises:
            LedgerDamaged: it is not the one that was written.
        """
        path = self._store.directory / LEDGER_FILE
        head = self._store.run_state().ledger_head
        if not (head or path.exists()):
            return
        end = Ledger.read(path, last_known(self._store.directory, head)).head.number
        with path.open("rb") as file:
            for _ in range(end):
                yield file.readline().decode()[:-1]


def head_of(store: Store) -> str:
    """The head of the transcript of a run, which names all that is in it.

    Raises:
        UserError: the run is damaged.
    """
    transcript = Transcript(store)
    for _ in transcript.lines():
        pass
    return transcript.head


def _plan(planned: PlannedAttempt, state: CommittedState) -> dict[str, Any]:
    """A plan, and the model of the last commit that it starts from."""
    answer = planned.decision.answer
    start = answer.start if isinstance(answer, Plan) else CURRENT
    saved = state.models.get(start)
    if start in (CURRENT, SERVED) and state.model_in_datacenter:
        saved = None  # what is on disk is older
    table = planned.to_json()
    for key in _LEFT_OUT_OF_DECISIONS:
        del table["decision"][key]
    table["decision"]["answer"].pop("state", None)
    table["start"] = {"name": start, "sha256": None if saved is None else saved.sha256}
    plan: dict[str, Any] = _finite(table)
    return plan


def _commit(state: CommittedState) -> dict[str, Any]:
    """What a commit says of its models, and which line of the ledger it remembers."""
    return {
        "ledger_head": state.ledger_head,
        "model_in_datacenter": state.model_in_datacenter,
        "models": {name: saved.sha256 for name, saved in state.models.items()},
        "optimizer": None if state.optimizer is None else state.optimizer.sha256,
    }


def _finite(value: Any) -> Any:
    """JSON data in which numbers that are not finite are texts, as JSON has none for them."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _canonical(value: Any) -> bytes:
    """Keys in order, no spaces, ASCII: each value has one form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()
