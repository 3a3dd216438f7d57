"""Call one participant: send a request, check and use the reply, acknowledge it, write a receipt.

    receipts = ReceiptBook(cohort, "federated")
    with suppress(CallFailed):
        async with call(link, name, request, "trained", receipts) as reply:
            ...  # check the reply and fetch its blobs
            receipts.record(name, "accepted", examples=reply.trained.examples)

Whatever happens in between, the participant learns whether its reply was used, so that it can free
the memory of its result, and the book has a receipt of every failure.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Literal

from isthmus.errors import (
    AdmissionRefused,
    ParticipantLost,
    PeerMisbehaved,
    StorageError,
    TaskError,
    TransferStalled,
    UpdateError,
)
from isthmus.printable import in_a_line
from isthmus.transport.requests import blob_of, blobs_of
from isthmus.wire import link_pb2
from isthmus_server.regimes.reasons import anonymous
from isthmus_server.regimes.transfer_allowance import TransferAllowance
from isthmus_server.storage.records import Moved, Receipt, Status
from isthmus_server.transport.link import Link
from isthmus_server.transport.peer import MovedBytes, Peer
from isthmus_server.transport.sanitize import reason_of

ROUND_OVER = "the round is over"
"""Reason for refusing a late reply: no call waits for it any more."""


SERVER_FAILED = "the server could not use it: it failed itself"
"""Reason for refusing a reply that is not at fault, after an error such as a full disk."""

_AFTER_WORK = ("", TaskError.code, StorageError.code)
"""Codes of failures that a participant may have after it has begun to work."""

ANSWER_SECONDS = 2.0
"""Time for the others to answer, when the first devices of an attempt have refused all work and the
quorum cannot be reached any more: if all refuse it is certain that nobody has accepted, and then
nothing is charged."""

PRIVACY_REFUSALS = frozenset(
    {"unmasked-for-model", "unmasked-for-data", "another-vector-for-model"}
)
"""Codes with which a device refuses a sum because of one that it has helped to unmask."""

CLOCK_REFUSALS = frozenset({"draw-not-now", "draw-before-last"})
"""Codes with which a device refuses a draw: a clock is wrong, or was, here or on the device."""


class NotUsed(UpdateError):
    """A reply that is not used, for a reason that is no fault of what its participant has sent."""


class CallFailed(Exception):
    """A call without a usable reply."""

    def __init__(
        self,
        status: Status,
        reason: str,
        *,
        reached: bool,
        timed_out: bool = False,
        code: str = "",
    ) -> None:
        """`status` is `dropped` without a complete reply, else `rejected`."""
        super().__init__(reason)
        self.code = code
        """Code of the participant's refusal, if it gave one."""
        self.timed_out = timed_out
        self.status = status
        self.reason = reason
        self.reached = reached
        """The participant was connected when the request was sent."""


class ReceiptBook:
    """The receipts of one attempt: one for each invited participant.

    Each has the bytes that moved in the participant's calls, whatever became of them.
    """

    def __init__(self, names: Iterable[str], regime: Literal["datacenter", "federated"]) -> None:
        self.names = tuple(names)
        self.regime = regime
        self._receipts: dict[str, Receipt] = {}
        self.accepted = 0
        """Number of accepted participants."""
        self._details: dict[str, dict[str, Any]] = {}
        self._moved: dict[str, Moved] = {}
        """Bytes from and to participants that were called."""
        self._blamed: set[str] = set()
        self.task_failures: set[str] = set()
        """How the tasks of participants failed, without the participants' names."""

    def __contains__(self, name: str) -> bool:
        return name in self._receipts

    def __len__(self) -> int:
        return len(self._receipts)

    @property
    def recorded(self) -> list[Receipt]:
        """The receipts so far."""
        return [self._with_bytes(receipt) for receipt in self._receipts.values()]

    def is_accepted(self, name: str) -> bool:
        """Whether the participant has an accepted receipt."""
        return name in self._receipts and self._receipts[name].status == "accepted"

    def get(self, name: str) -> Receipt | None:
        """The participant's receipt so far."""
        return self._receipts.get(name)

    def remember(self, name: str, **details: Any) -> None:
        """Fields for the participant's receipt, known before its outcome is."""
        self._details.setdefault(name, {}).update(details)

    @property
    def is_refused(self) -> bool:
        """Whether all so far were not connected, or have refused before they began to work."""
        return not any(each.started for each in self._receipts.values())

    def was_reached(self, name: str) -> bool:
        """Whether the participant has replied to an earlier call of this attempt."""
        return name in self._details

    def record(self, name: str, status: Status, reason: str = "", **details: Any) -> None:
        """Write the participant's receipt; a later one replaces it.

        A participant that is dropped was late, unless `details` says that it was lost.
        """
        self.accepted += (status == "accepted") - self.is_accepted(name)
        late = status == "dropped" and details.get("started", True)
        self._receipts[name] = Receipt(
            participant=name,
            regime=self.regime,
            status=status,
            reason=reason,
            **{**self._details.get(name, {}), "late": late, **details},
        )

    def amend(self, name: str, reason: str) -> None:
        """Replace the reason of a participant that has a receipt."""
        self._receipts[name] = dataclasses.replace(self._receipts[name], reason=reason)

    def blame(self, name: str) -> None:
        """Note that the participant failed at its work, or was too slow."""
        self._blamed.add(name)

    @property
    def excused(self) -> bool:
        """Whether participants failed only because they were lost, or refused for privacy."""
        return len(self._receipts) > self.accepted and not self._blamed

    def complete(self, reason: str) -> list[Receipt]:
        """All receipts, in the order of `names`; those without one were dropped for `reason`."""
        for name in self.names:
            if name not in self._receipts:
                self.record(name, "dropped", reason)
        return [self._with_bytes(self._receipts[name]) for name in self.names]

    def add_bytes(self, name: str, moved: Moved) -> None:
        """Count bytes from and to a participant."""
        self._moved[name] = self._moved.get(name, Moved()) + moved

    def take_bytes(self, name: str) -> Moved:
        """The bytes of a participant, which its receipt here then lacks."""
        return self._moved.pop(name, Moved())

    def _with_bytes(self, receipt: Receipt) -> Receipt:
        moved = self._moved.get(receipt.participant)
        return receipt if moved is None else receipt.with_moved(moved)


def _moved(peer: Peer, request: link_pb2.Request, reply: link_pb2.Reply | None) -> Moved:
    """The bytes of a call that has ended, its messages included.

    With what arrived late of calls of the participant that were cancelled before.
    """
    results = [] if reply is None else [blob_of(reply).sha256]
    models = [blob.sha256 for blob in blobs_of(request)]
    about = [request.id.encode(), *results, *models]
    sent = peer.sent.take(models)
    messages_sent = peer.messages_sent.take(about)
    if request.HasField("secure_step"):  # a roster is no model
        messages_sent += sent
        sent = 0
    return Moved(
        peer.received.take([*results, MovedBytes.LATE]),
        sent,
        peer.messages_received.take(about),
        messages_sent,
    )


def _noted(peer: Peer | None, request: link_pb2.Request) -> str:
    """What a datacenter noted last about its work, as a clause; empty if it has got on since.

    Devices say nothing in words of their own.
    """
    if peer is None or peer.role != link_pb2.DATACENTER:
        return ""
    about, note = peer.note
    return f"; its last note: {in_a_line(note)}" if note and about == request.id else ""


def _or_its_aggregator(peer: Peer | None, error: Exception) -> str:
    """Who else may be to blame for a reply that cannot be used, as a clause; empty if nobody.

    An aggregator can change what its devices send, or say of a vector what is not so.
    """
    if peer is None or peer.place is None or isinstance(error, NotUsed):
        return ""
    return f"; the device or its aggregator {peer.place.aggregator.name} sent that"


@asynccontextmanager
async def call(
    link: Link,
    name: str,
    request: link_pb2.Request,
    outcome: str,
    receipts: ReceiptBook | None = None,
    *,
    seconds: float | None = None,
    least_rate: float = math.inf,
    between_steps: bool = False,
    reply: link_pb2.Reply | None = None,
    late: str = ROUND_OVER,
) -> AsyncIterator[link_pb2.Reply]:
    """Send a request; the block checks and uses its reply, which is acknowledged at the end.

    Args:
        link: the server's link.
        name: the participant.
        request: what to ask; it gets an id if it has none.
        outcome: name of the expected outcome in `link_pb2.Reply`.
        receipts: where a failure is recorded; an accepted receipt is for the block to record.
        seconds: limit for the reply and the block together; None for no limit.
        least_rate: bytes per second of transfers whose time is added to that limit.
        between_steps: whether the limit begins again with each training step that is reported.
        reply: the reply, if the request was sent earlier.
        late: why the reply is refused if the call is cancelled.

    Raises:
        CallFailed: no reply, another outcome, or the block found the reply unusable (it raised
            `UpdateError`, `PeerMisbehaved`, `AdmissionRefused` or `ParticipantLost`).
    """
    # In buffered mode it was sent in an earlier round, and has its id from then.
    request.id = request.id or link.new_id()
    accepted = False
    reason = late
    failure: CallFailed | None = None
    peer = link.peers.get(name)  # another process of the name may follow it before the call ends
    allowance = TransferAllowance(link, [name], least_rate)
    begun = time.monotonic()

    def later() -> float:
        """Seconds from the request to the last step that was reported."""
        worker = link.peers.get(name)
        if worker is None or worker.last_step.request != request.id:
            return 0.0
        return max(0.0, worker.last_step.at - begun)

    # A failure is raised at the very end: the book and the participant learn of it first.
    try:
        async with asyncio.timeout(seconds) as limit:
            with allowance.extending(limit, lambda: [name], later if between_steps else None):
                if reply is None:
                    reply = await link.ask(name, request)
                # A refusal, or a reply to something else: both are handled like an update that
                # cannot be used.
                if reply.WhichOneof("outcome") != outcome:
                    refused = UpdateError(reason_of(reply))
                    refused.code = in_a_line(reply.failure.code)
                    raise refused
                yield reply
        accepted = True
        reason = ""
    except TimeoutError:
        if not limit.expired():
            reason = SERVER_FAILED
            raise  # of another origin, such as a network file system
        missed = "reported no other step" if between_steps and later() else "did not answer"
        reason = f"it {missed} within {seconds:g} s{_noted(peer, request)}"
        failure = CallFailed("dropped", reason, reached=True, timed_out=True)
    except ParticipantLost as lost:
        reached = lost.reached or reply is not None
        failure = CallFailed("dropped", str(lost), reached=reached)
        failure.__cause__ = lost
    except TransferStalled as error:
        failure = CallFailed("dropped", str(error), reached=True, timed_out=True)
        failure.__cause__ = error
    except (UpdateError, PeerMisbehaved, AdmissionRefused) as error:
        why = str(error)
        if reply is not None and reply.WhichOneof("outcome") == outcome:
            why += _or_its_aggregator(link.peers.get(name) or peer, error)  # it may have left
        failure = CallFailed("rejected", why, reached=True, code=error.code)
        failure.__cause__ = error
    except Exception:
        # Not the participant's fault: it gets no receipt, and is told that its reply was not used.
        reason = SERVER_FAILED
        raise
    finally:
        if failure is not None:
            reason = failure.reason
            if receipts is not None:
                # With another code, the first reply is a refusal: no work was done for it. A disk
                # may be full after the work, and a code of the server's own check of an answer
                # says nothing of the work.
                answered = reply is not None and reply.WhichOneof("outcome") == outcome
                worked = failure.reached and (answered or failure.code in _AFTER_WORK)
                reached = worked or receipts.was_reached(name)
                sent = failure.status == "rejected"
                receipts.record(
                    name,
                    failure.status,
                    reason,
                    started=reached,
                    sent=sent,
                    late=failure.timed_out,
                )
                # Repeating helps against lost devices, against refusals for privacy with other
                # devices, and against a wrong clock once it is set: these attempts do not count
                # towards the job's `attempts`. For clocks see also `StatedDraw.excuses`.
                was_lost = isinstance(failure.__cause__, ParticipantLost)
                if failure.code == TaskError.code:
                    receipts.task_failures.add(anonymous(failure.reason, name))
                if not was_lost and failure.code not in PRIVACY_REFUSALS | CLOCK_REFUSALS:
                    receipts.blame(name)
        if reply is not None:
            # An update that was complete when the call was cancelled stays in the sum.
            used = accepted or (receipts is not None and receipts.is_accepted(name))
            link.acknowledge(name, request.id, used, "" if used else reason)
        if peer is not None:
            moved = _moved(peer, request, reply)
            if receipts is not None:
                receipts.add_bytes(name, moved)
    if failure is not None:
        raise failure
