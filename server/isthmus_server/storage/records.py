"""Typed records of a run.

Records are frozen dataclasses. `to_json` gives the document that the round log stores and that
``isthmus report --json`` prints; `from_json` validates such a document and reads it back.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from isthmus.errors import DamagedError
from isthmus.wire import link_pb2
from isthmus_privacy.slots import LOSS, OTHER_WEIGHT, OVER_RANGE, OVER_WEIGHT
from isthmus_server.model.summed_evaluation import SummedEvaluation
from isthmus_server.storage.checkpoints import Saved
from isthmus_server.strategy.decision import Decision
from isthmus_server.strategy.gradients import GradientMeasurement, GroupSum
from isthmus_server.strategy.policy import Comparison, Kind, PastRound

Status = Literal["accepted", "rejected", "dropped"]

_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def adapter(type_: Any) -> TypeAdapter[Any]:
    """The converter between a type and JSON data, made once; it also provides the JSON schema."""
    if type_ not in _ADAPTERS:
        _ADAPTERS[type_] = TypeAdapter(type_)
    return _ADAPTERS[type_]


def validated(type_: Any, data: Mapping[str, Any]) -> Any:
    """The value of a type that JSON data describe.

    Raises:
        DamagedError: a key is missing or its value has another type.
    """
    try:
        return adapter(type_).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DamagedError(
            f"a stored record is damaged ({where}: {first['msg']}); `isthmus runs verify` says more"
        ) from None


def parsed(text: Any) -> Any:
    """The JSON of a column of a database.

    Raises:
        DamagedError: it is not JSON.
    """
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        sentence = "a row of the round log is damaged; `isthmus runs verify` says more"
        raise DamagedError(sentence) from error


class Record:
    """Base of the frozen dataclasses that are stored and printed as JSON."""

    def to_json(self) -> dict[str, Any]:
        """JSON data with one key per field."""
        # A type adapter would write null for infinite figures and nan in lists.
        data: dict[str, Any] = to_jsonable_python(self, inf_nan_mode="constants")
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Restore a record from the data that `to_json` returned.

        Raises:
            DamagedError: a key is missing or its value has another type.
        """
        record: Self = validated(cls, data)
        return record


# -- participants ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Moved:
    """Bytes from and to a participant."""

    bytes_in: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    messages_out: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.bytes_in + other.bytes_in,
            self.bytes_out + other.bytes_out,
            self.messages_in + other.messages_in,
            self.messages_out + other.messages_out,
        )

    @property
    def up(self) -> int:
        """Bytes from the participant, blobs and messages."""
        return self.bytes_in + self.messages_in

    @property
    def down(self) -> int:
        """Bytes to the participant, blobs and messages."""
        return self.bytes_out + self.messages_out

    @property
    def total(self) -> int:
        """Bytes in both directions."""
        return self.up + self.down


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt(Record):
    """The outcome of one participant in one attempt at a round."""

    participant: str
    regime: Literal["datacenter", "federated"]
    status: Status
    """`accepted`: its result is part of the model, or of the sum of a group that a robust rule has
    left out, which `reason` names. `rejected`: it sent a result that was not used.
    `dropped`: it sent no result, or not in time."""
    reason: str = ""
    """Why it was rejected or dropped; empty for an accepted participant without incident."""
    started: bool = True
    """Whether it was reachable and had its model in time; otherwise it is not paid for."""
    sent: bool = False
    """Whether it sent a result."""
    late: bool = False
    """Whether it was dropped while at work: the round ended without its result."""
    examples: int = 0
    """Weight of its update in the mean."""
    steps: int = 0
    """Optimizer steps it made."""
    seconds: float = 0.0
    """Wall time of its work: its own measurement, or the server's with secure aggregation."""
    group: str = ""
    """The random group that it was summed in, in a round with robust sums."""
    loss: float | None = None
    """Mean training loss, where the update is plain; selection by utility uses it."""
    staleness: int = 0
    """Rounds between its invitation and this one, with federated.mode = "buffered"."""
    bytes_in: int = 0
    """Bytes of blobs received from it."""
    bytes_out: int = 0
    """Bytes of blobs sent to it."""
    messages_in: int = 0
    """Bytes of the messages received from it: replies, such as keys, shares and masks of secure
    aggregation, and what encloses blobs."""
    messages_out: int = 0
    """Bytes of the messages sent to it: requests, and what encloses blobs."""

    @property
    def moved(self) -> Moved:
        """All bytes from and to it."""
        return Moved(self.bytes_in, self.bytes_out, self.messages_in, self.messages_out)

    def with_moved(self, moved: Moved) -> Receipt:
        """The receipt with other numbers of bytes."""
        return dataclasses.replace(self, **dataclasses.asdict(moved))

    @property
    def outcome(self) -> str:
        """The participant's status, or `late`."""
        return "late" if self.late else self.status


@dataclasses.dataclass(frozen=True, kw_only=True)
class Participants(Record):
    """Numbers of participants that reached each stage of an attempt."""

    invited: int
    started: int
    sent: int
    accepted: int
    rejected: int
    dropped: int

    @classmethod
    def of(cls, receipts: Sequence[Receipt]) -> Participants:
        """Count receipts, one per invited participant."""

        def having(status: Status) -> int:
            return sum(receipt.status == status for receipt in receipts)

        return cls(
            invited=len(receipts),
            started=sum(receipt.started for receipt in receipts),
            sent=sum(receipt.sent for receipt in receipts),
            accepted=having("accepted"),
            rejected=having("rejected"),
            dropped=having("dropped"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonRecord(Record):
    """One attempt at a model comparison on devices."""

    number: int
    """Number of the comparison in the run, from 1; all attempts at it have the same."""
    attempt: int
    round: int
    """The round it was made for."""
    ended: bool
    """No further attempt is made: it has a result, or was given up."""
    reason: str
    """Reason that the policy gave for the comparison."""
    models: tuple[str, ...]
    """Names of the compared models."""
    result: Comparison | None
    """None if the attempt failed."""
    error: str | None
    """Why it failed; None if it did not."""
    price: float
    device_bytes: int
    """Bytes to and from devices."""
    seconds: float
    receipts: Sequence[Receipt]
    policy_state: Mapping[str, Any]
    """The policy's state after the attempt."""

    @property
    def bytes_down(self) -> int:
        """Bytes sent to devices."""
        return sum(receipt.moved.down for receipt in self.receipts)

    @property
    def bytes_up(self) -> int:
        """Bytes received from devices."""
        return sum(receipt.moved.up for receipt in self.receipts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost(Record):
    """What an attempt cost, with the comparisons and the evaluation made for it."""

    price: float
    """In the job's unit of price."""
    bytes_up: int
    """Bytes received from participants, blobs and messages."""
    bytes_down: int
    """Bytes sent to them."""
    device_bytes: int
    """Bytes to and from devices."""
    device_seconds: float
    datacenter_seconds: float

    @classmethod
    def of(
        cls,
        receipts: Sequence[Receipt],
        price: float,
        comparisons: Sequence[ComparisonRecord] = (),
        evaluation: SummedEvaluation | None = None,
    ) -> Cost:
        """Add up receipts, comparisons and an evaluation; `price` is that of the attempt alone."""
        devices = [receipt for receipt in receipts if receipt.regime == "federated"]
        ranks = [receipt for receipt in receipts if receipt.regime == "datacenter"]
        measured: list[ComparisonRecord | SummedEvaluation] = [*comparisons]
        if evaluation is not None:
            measured.append(evaluation)
        moved = sum(receipt.moved.total for receipt in devices)
        up = sum(receipt.moved.up for receipt in receipts)
        down = sum(receipt.moved.down for receipt in receipts)
        return cls(
            price=price + sum(each.price for each in measured),
            bytes_up=up + sum(each.bytes_up for each in measured),
            bytes_down=down + sum(each.bytes_down for each in measured),
            device_bytes=moved + sum(each.device_bytes for each in measured),
            device_seconds=sum((receipt.seconds for receipt in devices), 0.0),
            datacenter_seconds=sum((receipt.seconds for receipt in ranks), 0.0),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFigures(Record):
    """Figures of one optimizer step of a datacenter."""

    step: int
    """Steps of the run so far, this one included."""
    loss: float
    """Mean over the units of all replicas."""
    gradient_norm: float
    """2-norm of the whole gradient, before it is clipped."""
    learning_rate: float | None
    """Learning rate of the first group of parameters, if it has one."""
    units_per_second: float
    """Scored units per second, such as tokens, since the step before that has figures."""

    @classmethod
    def of(cls, message: link_pb2.StepFigures) -> StepFigures:
        """The figures of a message."""
        return cls(
            step=message.step,
            loss=message.loss,
            gradient_norm=message.gradient_norm,
            learning_rate=message.learning_rate if message.HasField("learning_rate") else None,
            units_per_second=message.units_per_second,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptRecord(Record):
    """One ended attempt at a round: what committed rounds and failed attempts have in common."""

    round: int
    attempt: int
    """Number from 1; attempts that a crash cut short are numbered too."""
    regime: Kind
    reason: str
    """Why the policy chose the regime."""
    started_at: float
    """Seconds since 1970-01-01 UTC."""
    seconds: float
    """Wall time."""
    elapsed: float
    """Seconds that the run had lasted when the attempt ended, without the time it was stopped."""
    participants: Participants
    receipts: Sequence[Receipt]
    cost: Cost
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Figures of the evaluation; empty where the round was not evaluated, or failed."""
    epsilon: float | None = None
    """Privacy spent so far by the device that was asked most, at `privacy.delta`; None without."""
    model_sha256: str | None = None
    """SHA-256 of the served model in hexadecimal; None while the model stays in the datacenter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateNoise(Record):
    """The noise in a mean of devices' updates."""

    deviation: float
    """Standard deviation of the noise of an element."""
    elements: int
    """Number of elements of the vector whose norm is in `RoundRecord.norms`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundRecord(AttemptRecord):
    """A committed round."""

    comparisons: Sequence[ComparisonRecord] = ()
    """Attempts at comparisons that the policy requested before it planned the round."""
    training: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """Figures of the training itself, by regime."""
    norms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """2-norm of each regime's pseudo-gradient, where the server received it."""
    noise: UpdateNoise | None = None
    """What is noise in that of devices, in a job with `[privacy]`."""
    cosine: float | None = None
    """Cosine between the two pseudo-gradients of a hybrid round."""
    gradients: GradientMeasurement | None = None
    """Gradients at the model that the round started from, if the plan requested them."""
    groups: Mapping[str, GroupSum] = dataclasses.field(default_factory=dict)
    """The sum of each group of devices, if the round was summed by group."""
    evaluation: SummedEvaluation | None = None
    """The evaluation of the model on devices, if the job has one."""
    profile: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """Rates and memory of each datacenter's ranks."""
    step_figures: Mapping[str, Sequence[StepFigures]] = dataclasses.field(default_factory=dict)
    """Figures of some steps of each datacenter, with `datacenter.log_steps`."""

    @property
    def unusable(self) -> str:
        """How many devices had no usable update with secure aggregation; empty for none."""
        count = self.unusable_devices
        if not count:
            return ""
        return (
            f"{count} of {self.summed_devices} devices had no usable update; their own logs say why"
        )

    @property
    def unusable_devices(self) -> int:
        """Devices without a usable update in a secure sum; 0 if that is not known."""
        return int(self.training.get("federated", {}).get("unusable", 0))

    @property
    def summed_devices(self) -> int:
        """Devices whose updates were accepted, whatever they weigh."""
        return sum(
            receipt.regime == "federated" and receipt.status == "accepted"
            for receipt in self.receipts
        )

    @property
    def clipped(self) -> str:
        """Which share of the devices' updates was clipped, with secure aggregation; or empty."""
        share = self.training.get("federated", {}).get("clipped", 0.0)
        if not share:
            return ""
        shown = f"{share:.2%}" if share >= 1e-4 else "less than 0.01%"
        return f"{shown} of the elements of the devices' updates were out of range and were clipped"

    @property
    def clipped_losses(self) -> str:
        """How many devices' losses were clipped, with secure aggregation; empty for none."""
        count = int(self.training.get("federated", {}).get(OVER_RANGE.name, 0))
        if not count:
            return ""
        return (
            f"{count} of {self.summed_devices} devices had a training loss outside of "
            f"-{LOSS.maximum:g} to {LOSS.maximum:g}, which counts as the end of that range in the "
            "mean loss; their updates are not affected"
        )

    @property
    def clipped_weights(self) -> str:
        """How many devices had more examples than they count as, in a range that was found."""
        count = int(self.training.get("federated", {}).get(OVER_WEIGHT.name, 0))
        if not count:
            return ""
        largest = self.training["federated"].get("weight_max", 0.0)
        return (
            f"{count} of {self.summed_devices} devices have more examples than the largest weight "
            f"of this sum, which was found without them, and counted as {largest:,.0f}; "
            "federated.max_examples sets it for all"
        )

    @property
    def other_weights(self) -> str:
        """How many devices do not count with their numbers of examples; empty for none."""
        count = int(self.training.get("federated", {}).get(OTHER_WEIGHT.name, 0))
        if not count:
            return ""
        return (
            f"{count} of {self.summed_devices} devices gave coarse or equal weights, by their "
            "owners' choice: the mean is not weighted by numbers of examples; federated.weights "
            "sets one kind for all"
        )

    @property
    def incidents(self) -> list[str]:
        """What changes what the sum of a round says, as sentences."""
        sentences = (
            self.unusable,
            self.clipped,
            self.clipped_losses,
            self.clipped_weights,
            self.other_weights,
        )
        return [sentence for sentence in sentences if sentence]

    def as_past_round(self) -> PastRound:
        """The totals and means that policies receive, without data on single participants."""
        devices = [receipt for receipt in self.receipts if receipt.regime == "federated"]
        ranks = [receipt for receipt in self.receipts if receipt.regime == "datacenter"]
        return PastRound(
            round=self.round,
            regime=self.regime,
            metrics=dict(self.metrics),
            seconds=self.seconds,
            price=self.cost.price,
            accepted=self.participants.accepted,
            bytes_up=self.cost.bytes_up,
            bytes_down=self.cost.bytes_down,
            bytes_each=max((receipt.moved.total for receipt in devices), default=0),
            device_seconds=self.cost.device_seconds,
            datacenter_seconds=self.cost.datacenter_seconds,
            datacenter_steps=sum(receipt.steps for receipt in ranks),
            training={name: dict(figures) for name, figures in self.training.items()},
            norms=dict(self.norms),
            cosine=self.cosine,
            gradients=self.gradients,
            groups=dict(self.groups),
            comparisons=[
                comparison.result
                for comparison in self.comparisons
                if comparison.result is not None
            ],
            elapsed=self.elapsed,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailedAttempt(AttemptRecord):
    """An attempt that ended without a model."""

    error: str
    """Why it failed."""
    given_up: bool = False
    """Whether the plan is not tried again, because the job's attempts are used up."""


EndedAttempt = RoundRecord | FailedAttempt


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedAttempt(Record):
    """An attempt at a round that is about to begin."""

    round: int
    attempt: int
    decision: Decision
    """Equal in all attempts at a round, unless the run was given up in between."""
    invited: Sequence[str]
    """Names of the devices."""
    datacenters: Sequence[str]
    draw: int = 0
    """Draw of the lottery in which the devices were selected; 0 without one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggedAttempt(Record):
    """An attempt in the round log, and its outcome."""

    planned: PlannedAttempt
    record: EndedAttempt | None
    """None for an attempt that is under way or was cut short."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalModel(Record):
    """The model of a finished run."""

    metrics: Mapping[str, float]
    """Figures of its evaluation."""
    model_sha256: str
    """SHA-256 of the file, in hexadecimal."""
    model_path: str
    round: int
    """The round after which it was the served model; 0 before the first one."""
    best: bool = False
    """Whether it was chosen by `evaluation.keep_best`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommittedState(Record):
    """Training state that is committed together with a round; the defaults are those before it."""

    models: Mapping[str, Saved] = dataclasses.field(default_factory=dict)
    """Checkpoints by name: `current`, `served` if it differs, `best`, and those of plans."""
    averaged: int = 0
    """Models in the served average."""
    optimizer: Saved | None = None
    """The server optimizer's tensors."""
    optimizer_numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    datacenter_step: int = 0
    """Optimizer steps the datacenter has made in committed rounds."""
    schedule_step: int = 0
    """Position of the run in the schedules of the learning rate, in optimizer steps."""
    gradient_step: int = 0
    """Steps whose batches went into gradients that were transferred to devices."""
    holder: str | None = None
    """The datacenter that holds the committed model at `datacenter_step`, if one does."""
    model_in_datacenter: bool = False
    """Only the holder has the committed model: the checkpoint of `current` is older."""
    policy_state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ledger_head: str = ""
    """Number and SHA-256 of a line that the run's privacy ledger must have; empty without one."""
    clip: float = 0.0
    """Bound on updates that adaptive clipping has moved to; 0 without it."""

    @property
    def files(self) -> list[Saved]:
        """The checkpoints that the commit names."""
        named = [saved for saved in (*self.models.values(), self.optimizer) if saved is not None]
        return list(dict.fromkeys(named))
