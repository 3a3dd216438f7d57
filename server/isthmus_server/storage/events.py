"""Events of a run, and the stream that views, exporters and tests subscribe to."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator

from isthmus.job import RegimeName
from isthmus.job.promises import Deployment
from isthmus.printable import in_a_line
from isthmus.wire import link_pb2
from isthmus_server.storage.records import (
    ComparisonRecord,
    EndedAttempt,
    FailedAttempt,
    FinalModel,
    Record,
    RoundRecord,
    StepFigures,
    validated,
)
from isthmus_server.strategy.decision import Decision

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event(Record):
    """Something that happened in a run."""

    kind: str
    at: float = dataclasses.field(default_factory=time.time, compare=False)
    """Seconds since 1970-01-01 UTC, by the machine's clock."""


class ReportedEvent(Event):
    """An event that the run's log keeps, and that the report lists."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunServed(ReportedEvent):
    """A server begins to work on the run, or goes on with it."""

    kind: Literal["served"] = "served"
    deployment: Deployment
    """Who runs the authority that enrols its devices: `separate`, another person than the server's;
    `one`, the server itself; `local`, nobody, as they are processes of the server's user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerTakenOver(ReportedEvent):
    """A standby took over from the server that had the run; `at` is when it did."""

    kind: Literal["taken_over"] = "taken_over"
    by: str
    """The server that has the run from then on."""
    before: str
    """The one that had it before."""
    why: str
    """Why, in words that follow after its name."""
    round: int
    """The round that was under way; without an attempt, the last one that was committed."""
    attempt: int = 0
    """The attempt at it that was cut short; 0 if none was under way."""

    @property
    def sentence(self) -> str:
        """What happened, for people."""
        when = f"after round {self.round}" if self.round else "before the first round"
        if self.attempt:
            when = f"in round {self.round}, attempt {self.attempt}"
        return f"{self.by} took over from {self.before}, which {self.why}, {when}"


# -- participants ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class WaitingForParticipants(Event):
    """The run waits until enough participants are ready."""

    kind: Literal["waiting"] = "waiting"
    clients: int
    """Devices that are needed."""
    datacenters: int
    ready: int = 0
    """Devices that may be invited now."""
    missing: Sequence[str] = ()
    """Names of the participants that are awaited, where they are known."""
    reason: str = ""
    """Why enough are ready and may not be invited; empty if too few are."""
    downloads: Sequence[str] = ()
    """Progress of devices that get the files which the model starts from: how far each of them
    is."""
    away: int = 0
    """Devices that are away until they check in."""
    check_ins: Sequence[float] = ()
    """When the next of these do, in Unix seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParticipantJoined(ReportedEvent):
    """A participant connected; the run is being opened on it."""

    kind: Literal["joined"] = "joined"
    participant: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParticipantReady(ReportedEvent):
    """A participant opened the run and can be invited."""

    kind: Literal["ready"] = "ready"
    participant: str
    examples: int
    """Size of its own training data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParticipantLate(ReportedEvent):
    """A device was ready after the quorum of a round, or at the end of the run is not ready yet."""

    kind: Literal["late"] = "late"
    participant: str
    seconds: float
    """From the first quorum without it until it was ready."""
    rounds_missed: int
    """Rounds that began meanwhile; 0 if the first one waited for it."""
    rounds_full: int = 0
    """Rounds among them for which as many others were ready as they invite."""
    was_ready: bool = True
    """False for a device that was still opening the run when it ended."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CohortAwaited(ReportedEvent):
    """A round has waited for the rest of its cohort when its quorum was ready."""

    kind: Literal["awaited"] = "awaited"
    round: int
    seconds: float
    given_up: Sequence[str] = ()
    """Devices that did not come in the time that they had."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParticipantUnready(ReportedEvent):
    """What rounds do from now on about a device that did not deliver, or has delivered again."""

    kind: Literal["unready"] = "unready"
    participant: str
    limit: float = 0.0
    """Seconds of the next round that is longer for it; 0 for one that has delivered again."""
    in_vain: int = 0
    """Rounds that were longer for it, or that it held up, since it delivered last."""
    rests: int = 0
    """Next rounds that are not longer for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParticipantDeclined(ReportedEvent):
    """A participant cannot take part in the run."""

    kind: Literal["declined"] = "declined"
    participant: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParticipantLeft(ReportedEvent):
    """A participant that was ready disconnected, or its lease ended."""

    kind: Literal["left"] = "left"
    participant: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParticipantProgress(Event):
    """A participant reported how far its work is."""

    kind: Literal["progress"] = "progress"
    participant: str
    note: str = ""
    """A sentence to show once."""
    steps: int = 0
    """Optimizer steps made so far."""
    total_steps: int = 0
    """0: the participant reports no progress by steps."""
    loss: float = 0.0
    examples_per_second: float = 0.0
    units_per_second: float = 0.0
    """Scored units per second, such as tokens."""
    step_figures: Sequence[StepFigures] = ()
    """Figures of the last steps that have some."""

    @classmethod
    def from_message(cls, participant: str, message: link_pb2.Progress) -> ParticipantProgress:
        """Create the event from a participant's message."""
        return cls(
            participant=participant,
            note=in_a_line(message.note),
            steps=message.steps,
            total_steps=message.total_steps,
            loss=message.loss,
            examples_per_second=message.examples_per_second,
            units_per_second=message.units_per_second,
            step_figures=[StepFigures.of(each) for each in message.step_figures],
        )


# -- rounds ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paused(Event):
    """The run waits before a round, as required by the policy or a limit of the job."""

    kind: Literal["paused"] = "paused"
    round: int
    seconds: float
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelsCompared(Event):
    """An attempt at a model comparison ended, with a result or without."""

    kind: Literal["compared"] = "compared"
    record: ComparisonRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundPlanned(Event):
    """An attempt at a round begins."""

    kind: Literal["planned"] = "planned"
    round: int
    attempt: int
    regime: RegimeName
    reason: str
    invited: int
    """Invited participants of both regimes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCommitted(Event):
    """A round is committed."""

    kind: Literal["committed"] = "committed"
    record: RoundRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundAttemptFailed(Event):
    """An attempt at a round failed."""

    kind: Literal["attempt_failed"] = "attempt_failed"
    record: FailedAttempt


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunAdopted(ReportedEvent):
    """An operator has stated that this copy of the run takes the place of the original."""

    kind: Literal["adopted"] = "adopted"
    original: str
    """Directory of the original."""
    by: str
    """User of the machine."""
    stated: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunBranched(ReportedEvent):
    """The run begins with the model of another one; the rounds before are those of that one."""

    kind: Literal["branched"] = "branched"
    round: int
    """The last round of the other run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutChanged(ReportedEvent):
    """Ranks train in another layout from a round on; the job of the run stays what it was."""

    kind: Literal["layout"] = "layout"
    round: int
    """The first round in this layout."""
    changes: Mapping[str, Any]
    """All that is different from the job, by dotted key."""


# -- the end ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStopped(ReportedEvent):
    """The policy or a limit of the job ends the run before all rounds are done."""

    kind: Literal["stopped"] = "stopped"
    round: int
    """The round that is not trained."""
    reason: str
    decision: Decision
    """The decision on that round."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """The final model is written, or a ServerApp has returned."""

    kind: Literal["finished"] = "finished"
    reason: str
    spent: float
    """Price of the whole run."""
    final: FinalModel | None
    """None for a run that a ServerApp directed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFailed(Event):
    """The run cannot go on."""

    kind: Literal["failed"] = "failed"
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobEnded(Event):
    """A job that a server had queued has ended."""

    kind: Literal["ended"] = "ended"
    state: str
    """`finished`, `failed` or `cancelled`."""
    reason: str
    """Empty for a job that finished."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobPaused(Event):
    """A job of a server cannot go on now; it is tried again."""

    kind: Literal["job_paused"] = "job_paused"
    reason: str
    next_try: float
    """Unix seconds."""


LoggedEvent = Annotated[
    ParticipantJoined
    | ParticipantReady
    | ParticipantLate
    | ParticipantUnready
    | CohortAwaited
    | ParticipantDeclined
    | ParticipantLeft
    | RunAdopted
    | RunBranched
    | RunServed
    | ServerTakenOver
    | RunStopped
    | LayoutChanged,
    Discriminator("kind"),
]
"""Every `ReportedEvent`."""

AnyEvent = Annotated[
    LoggedEvent
    | WaitingForParticipants
    | ParticipantProgress
    | Paused
    | ModelsCompared
    | RoundPlanned
    | RoundCommitted
    | RoundAttemptFailed
    | RunFinished
    | RunFailed
    | JobEnded
    | JobPaused,
    Discriminator("kind"),
]


def logged_event_from_json(data: Mapping[str, Any]) -> LoggedEvent:
    """Read a logged event.

    Raises:
        UserError: the kind is unknown, or another key is wrong.
    """
    event: LoggedEvent = validated(LoggedEvent, data)
    return event


def event_from_json(data: Mapping[str, Any]) -> Event:
    """Restore an event from the data that its `to_json` returned.

    Raises:
        UserError: the kind is unknown, or another key is wrong.
    """
    event: Event = validated(AnyEvent, data)
    return event


def attempt_event(record: EndedAttempt) -> RoundCommitted | RoundAttemptFailed:
    """The event that was published when an attempt ended."""
    if isinstance(record, RoundRecord):
        return RoundCommitted(record=record)
    return RoundAttemptFailed(record=record)


Subscriber = Callable[[Event], None]


class EventStream:
    """Passes the events of a run to its subscribers, in order of subscription.

    A subscriber that raises is dropped with a warning: no view can end a run.
    """

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with every event from now on; returns a function that ends that."""
        self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

        return unsubscribe

    def publish(self, event: Event) -> None:
        """Pass an event to every subscriber."""
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(event)
            except Exception:  # one that only watches, of whatever kind, ends no run
                log.warning("%r is unsubscribed: it failed on %r", subscriber, event, exc_info=True)
                if subscriber in self._subscribers:
                    self._subscribers.remove(subscriber)
