"""Check a whole transcript."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from io import BufferedReader, BytesIO
from typing import Any, BinaryIO

from isthmus_verify.chain import Entry, canonical, entries
from isthmus_verify.charges import Charges
from isthmus_verify.fields import Fields
from isthmus_verify.rounds import JobFacts, Rounds
from isthmus_verify.sums import SignedSums
from isthmus_verify.violation import Violation, shown

FORMAT = 1
_DEFAULTS: dict[tuple[str, ...], object] = {
    ("federated", "secure_aggregation"): True,
    ("federated", "mode"): "rounds",
    ("federated", "quorum"): None,
    ("federated", "privacy"): None,
    ("federated", "robust"): None,
    ("federated", "robust_settings"): {},
    ("federated", "robust_groups"): 12,
    ("federated", "robust_minimum"): 10,
    ("datacenter", "privacy"): None,
    ("prices", "client_update"): 1.0,
    ("privacy",): None,
    ("privacy", "clip"): 1.0,
    ("privacy", "noise"): None,
    ("privacy", "participations"): None,
    ("privacy", "population"): "devices",
    ("exchange", "buffers"): "average",
    ("strategy", "policy"): "alternate",
    ("strategy", "served_average"): 0.0,
    ("evaluation", "keep_best"): None,
    ("evaluation", "keep_best", "min_change"): 0.0,
    ("evaluation", "deliver"): "last",
}
"""Defaults of the values of a job on which checks depend."""
_REQUIRED_TABLES = {
    (name,) for name in ("federated", "datacenter", "prices", "exchange", "strategy", "evaluation")
}
"""Tables that each job has, also one that devices have opened without."""
_FOUND_BY_SERVER = ["datacenter", "privacy", "noise"]
"""The value that the job of a run has and devices need not have opened."""
_PHASES = {"run": 0, "charge": 1, "sum": 2, "plan": 3, "round": 3, "failed": 3, "end": 4}
"""Kinds of entries, and in which part of a transcript they are."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found."""

    head: str
    holds: list[str]
    """What holds, one sentence each."""
    unknown: list[str]
    """What a transcript, or this one, cannot show."""


def check(
    transcript: BinaryIO,
    *,
    head: str | None = None,
    authority: bytes | None = None,
    model: BufferedReader | BytesIO | None = None,
) -> Verdict:
    """Check a transcript, in one pass.

    Args:
        transcript: with one entry in each line.
        head: hash of the last entry, from a model card for example; None if it is not known.
        authority: Ed25519 key of the fleet's authority; None if it is not known.
        model: the final model; None if it is not here.

    Raises:
        Violation: with the first thing that does not hold.
        OSError: a file cannot be read.
    """
    pass_ = _Pass(head, authority)
    try:
        last = None
        for last in entries(transcript):
            pass_.take(last)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        number = 1 if last is None else last.number
        raise Violation(
            f"entry {number} or the next one has a value that none can have ({shown(str(error))})"
        ) from error
    return pass_.verdict(model)


class _Pass:
    """One pass over a transcript."""

    def __init__(self, head: str | None, authority: bytes | None) -> None:
        self._head = head
        self._authority = authority
        self._last: Entry | None = None
        self._phase = -1
        self._count = 0
        self._job: Fields
        self._charges: Charges
        self._sums: SignedSums
        self._rounds: Rounds
        self._final = ""
        self._status = ""
        self._run_id = ""

    def take(self, entry: Entry) -> None:
        """Check the next entry."""
        phase = _PHASES.get(entry.kind)
        if phase is None:
            raise Violation(
                f"entry {entry.number} is of the kind {shown(entry.kind)}, not known here"
            )
        in_order = (
            phase == self._phase + 1 if phase == 0 or self._phase < 0 else phase >= self._phase
        )
        if not in_order or (phase in (0, 4) and phase == self._phase):
            raise Violation(f"entry {entry.number}, {entry.kind!r}, is not in its place")
        self._phase = phase
        self._last = entry
        self._count += 1
        match entry.kind:
            case "run":
                self._begin(entry.content)
            case "charge":
                self._charges.add(entry.content)
            case "sum":
                self._sums.add(entry.content)
            case "plan":
                self._rounds.plan(entry.content)
            case "round":
                self._rounds.round(entry.content)
            case "failed":
                self._rounds.failed(entry.content)
            case _:
                self._end(entry.content)

    def _begin(self, content: Fields) -> None:
        content.only("format", "job", "opened", "run")
        if content.count("format") != FORMAT:
            raise Violation(
                f"the transcript has the format {content.count('format')}, and this program knows "
                f"{FORMAT}"
            )
        self._job = content.table("job")
        self._run_id = content.text("run")
        jobs = set()
        opened = content.texts("opened")
        if not opened:
            raise Violation("the transcript has no job that devices have opened")
        for text in opened:
            self._check_opened(text)
            jobs.add(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        self._charges = Charges(self._run_id)
        self._sums = SignedSums(self._run_id, jobs, self._authority)
        self._rounds = Rounds(JobFacts.of(self._job), self._sums, self._charges)

    def _check_opened(self, text: str) -> None:
        """Check that the job is what devices have opened, which has no values that are defaults.

        Raises:
            Violation: a value is another one.
        """
        try:
            opened = json.loads(text, object_pairs_hook=_without_repeated)
        except (ValueError, RecursionError):
            opened = None
        fields = Fields(opened, "the job that devices have opened")
        self._check_defaults(fields.values)
        _check_same(fields.values, self._job.values, [])

    def _check_defaults(self, opened: dict[str, Any]) -> None:
        """Check that what devices have not opened is what this program knows as its default.

        Raises:
            Violation: it is something else.
        """
        for key, default in _DEFAULTS.items():
            given: object = opened
            found: object = self._job.values
            for part in key:
                given = _part(given, part)
                found = _part(found, part)
            table: object = opened
            for part in key[:-1]:
                table = _part(table, part)
            within = key[:-1] in _REQUIRED_TABLES or table is not None
            if given is None and within and canonical(found) != canonical(default):
                raise Violation(
                    f"{shown('.'.join(key))} is {shown(found)} in the job of the run, and devices "
                    f"have opened the job without it, which means {shown(default)}"
                )

    def _end(self, content: Fields) -> None:
        content.only("entries", "final", "status")
        if content.count("entries") != self._count:
            raise Violation(
                f"the transcript ends after {self._count} entries, and says that it has "
                f"{content.count('entries')}"
            )
        self._status = content.text("status")
        self._rounds.end()
        if self._job.has("privacy"):
            self._charges.check_budget(self._job.table("privacy"))
        final = content.optional("final")
        if final is not None:
            if self._status != "finished":
                raise Violation(f"a run that is {shown(self._status)} has no final model")
            self._final = self._rounds.models.final(final)

    def verdict(self, model: BufferedReader | BytesIO | None) -> Verdict:
        """The outcome, if nothing was found that does not hold."""
        if self._last is None:
            raise Violation("the transcript is empty")
        if self._last.kind != "end":
            raise Violation(f"the transcript was cut short after entry {self._last.number}")
        if self._head not in (None, self._last.hash):
            raise Violation(
                f"the transcript has the head {self._last.hash}, and not "
                f"{shown(self._head)}: it is of "
                "another run, or all of it was written anew"
            )
        if model is not None:
            if not self._final:
                raise Violation("the run has no final model, so the given one is not of it")
            found = hashlib.file_digest(model, "sha256").hexdigest()
            if found != self._final:
                raise Violation(
                    f"the given model has the digest {found}, and the run's final model "
                    f"{self._final}"
                )
        holds = list(self._holds(with_model=model is not None))
        return Verdict(self._last.hash, holds, list(self._unknown(with_model=model is not None)))

    def _holds(self, *, with_model: bool) -> Iterator[str]:
        rounds = self._rounds
        yield f"The {self._count} entries are one chain, and none is missing or repeated."
        if self._head is not None:
            yield "Its head is the given one: this is the transcript that the head was taken from."
        failed = rounds.counts["failed"]
        yield (
            f"The run {shown(self._run_id)} has {rounds.committed} committed rounds and "
            f"{failed} failed attempts; each begins with the model of the last commit, or one that "
            "it has kept."
        )
        yield (
            f"The {rounds.receipts} receipts belong to their plans, none is there twice, and "
            "counts, bytes and seconds add up."
        )
        if self._sums.count:
            yield (
                f"{self._sums.count} sums of this run are signed by enough of the devices that "
                "are in them, each with a certificate of its authority"
                + (", which is the given one; " if self._authority is not None else "; ")
                + "the signatures cover the job."
            )
        if rounds.signed_rounds:
            yield (
                f"In {rounds.signed_rounds} of {rounds.secure_rounds} rounds with secure sums, the "
                "accepted devices are exactly those of the signed sums; in "
                f"{rounds.signed_starts} of them the devices have signed the model of the last "
                "commit, or one that the run has kept, as the one that they start from"
                + _first_starts(rounds.first_starts)
            )
        if self._charges.count:
            yield f"The privacy ledger of {self._charges.count} lines is one chain."
        if self._charges.count and self._job.has("privacy"):
            yield "Each attempt that asked devices was charged for just these."
        if self._job.has("privacy"):
            by = " by this run" if self._charges.of_others else ""
            yield (
                f"No device was asked{by} for more than the epsilon of the job, computed here "
                "again."
            )
        if self._final and rounds.models.final_is_best:
            yield (
                "The final model is the best of those that were evaluated, by what the records "
                f"say of them: {self._final}."
            )
        elif self._final and rounds.models.final_is_known:
            yield f"The final model is the last committed one: {self._final}."
        if with_model:
            yield "The given file is the final model of this run."

    def _unknown(self, *, with_model: bool) -> Iterator[str]:
        rounds = self._rounds
        if self._head is None:
            yield (
                "Without --head: whether all of the transcript was written anew. Compare the "
                "head with the model card."
            )
        if self._sums.count and self._authority is None:
            yield (
                "Without --authority: whether the authority that signed the certificates is "
                "that of your fleet. An `isthmus run` makes one of its own, so of it there is none "
                "to compare with."
            )
            if len(self._sums.authorities) > 1:
                yield f"Why the certificates are of {len(self._sums.authorities)} authorities."
        for run_id, count in sorted(self._sums.of_others.items()):
            yield (
                f"What {count} sums of another run, {shown(run_id)}, have to do with this one: a "
                "branch has those of the run that it began with."
            )
        if missing := rounds.secure_rounds - rounds.signed_rounds:
            yield (
                f"Which devices were in {missing} secure rounds: there are no signed sums of them. "
                "Simulated devices sign nothing, and of others what they signed was not kept."
            )
        if rounds.unknown_starts:
            yield (
                f"From which model the devices of {rounds.unknown_starts} rounds started: only a "
                "datacenter had it, it is a mean of several, or a gradient follows it in a buffer."
            )
        if self._status != "finished":
            yield f"How the run ends: it is {shown(self._status)}."
        elif self._final and not rounds.models.final_is_known:
            yield "Whether a datacenter handed over the model that it had trained last."
        if self._charges.of_others:
            yield (
                f"What {self._charges.of_others} attempts that another run was charged for have to "
                "do with this one: a branch has those of the run that it began with."
            )
        if self._charges.of_examples:
            yield "What epsilon of a datacenter's examples is: `isthmus privacy ledger` says it."
        if not with_model:
            yield "Without --model: whether you have the final model."
        yield (
            "Whether a model is what training from the one before gives: this program trains "
            "nothing."
        )
        yield "What plain devices and datacenters have sent: only devices of secure sums sign."


def _first_starts(rounds: int) -> str:
    """The end of a sentence about start models: those that no commit has.

    >>> _first_starts(0), _first_starts(1)
    ('.', '; in 1, before any commit, the first model.')
    """
    return f"; in {rounds}, before any commit, the first model." if rounds else "."


def _without_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, of which no key is there twice: devices may take the other value.

    Raises:
        Violation: one is.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        times = Counter(key for key, _ in pairs)
        twice = min(key for key, count in times.items() if count > 1)
        raise Violation(f"the job that devices have opened has {shown(twice)} twice")
    return found


def _check_same(opened: object, found: object, path: list[str]) -> None:
    """Check that the job of the run has each value of the job that devices have opened.

    In one walk through both: a path that is followed anew for each of the values of a deep job
    takes minutes.

    Args:
        opened: a part of what devices have opened.
        found: what the job of the run has in its place.
        path: names of the part; as it was when this returns.

    Raises:
        Violation: it has another value.
    """
    # Found by the server from the budget of the job, for all ranks.
    if path == _FOUND_BY_SERVER:
        return
    if isinstance(opened, dict) and (opened or isinstance(found, dict)):
        for name, part in opened.items():
            path.append(name)
            _check_same(part, _part(found, name), path)
            path.pop()
    elif isinstance(opened, list) and opened:
        # Objects in a list, such as the parts of a schedule, are without their defaults, too.
        others = found if isinstance(found, list) else []
        _check_value(len(opened), len(others), [*path, "length"])
        for index, (part, other) in enumerate(zip(opened, others, strict=True)):
            path.append(str(index))
            _check_same(part, other, path)
            path.pop()
    else:
        _check_value(opened, found, path)


def _check_value(opened: object, found: object, path: list[str]) -> None:
    # Most values are text and numbers, which need no canonical form to be compared.
    same = type(opened) is type(found) and isinstance(opened, str | int) and opened == found
    if not same and canonical(found) != canonical(opened):
        raise Violation(
            f"{shown('.'.join(path))} is {shown(opened)} in the job that devices have opened, and "
            f"{shown(found)} in that of the run"
        )


def _part(value: object, name: str) -> object:
    """What an object has under a name; None if it has nothing there."""
    return value.get(name) if isinstance(value, dict) else None
