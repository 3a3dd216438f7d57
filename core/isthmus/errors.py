"""The exceptions that Isthmus raises deliberately.

The hierarchy::

    IsthmusError
    ├── UserError (also a ValueError)   wrong input; its message is shown as one sentence
    │   ├── JobError                    an invalid job file or key
    │   ├── StorageError                a disk that is full or fails
    │   ├── CannotContinue              a run that cannot continue now, and can later
    │   │   ├── ParticipantsMissing     too few participants are ready
    │   │   └── TakenOver               another server has taken the place of this one
    │   ├── TaskError                   the user's task cannot be loaded, or its code failed
    │   ├── DamagedError                stored data was changed, cut short or lost
    │   └── UpdateError                 an update or a model with wrong shapes or values
    ├── RoundFailed                     an attempt at a round without a result
    │   └── AggregationAborted          too few devices remain for a secure sum
    ├── PeerMisbehaved                  a message that violates secure aggregation
    └── LinkError                       the connection to a participant
        ├── ParticipantLost             silent for longer than its lease, or restarted
        └── AdmissionRefused            the request was refused, with the reason
            └── AdmissionDelayed        for now: worth another try
                └── CertificateExpired  by a clock, which may be wrong

Users see only the message of a `UserError`: what is wrong, where, and what to do.

>>> raise JobError("federated.quorum=9 is above federated.cohort=8; lower one of them")
Traceback (most recent call last):
    ...
isthmus.errors.JobError: federated.quorum=9 is above federated.cohort=8; lower one of them
"""

from __future__ import annotations

from collections.abc import Collection, Iterator


def cause_of(error: Exception) -> str:
    """What an exception says; of an `OSError` without its number and path, for a sentence with one.

    >>> cause_of(FileNotFoundError(2, "No such file or directory", "job.toml"))
    'No such file or directory'
    """
    return (isinstance(error, OSError) and error.strerror) or str(error)


def causes(error: BaseException, *, hidden: bool = False) -> Iterator[BaseException]:
    """An error, what it was raised from, what that was raised from, and so on; each once.

    Args:
        error: the one to begin with.
        hidden: also those that one hides (`from None`, or in an `except` that raises another), and
            those of a group.

    >>> error = ValueError("raised from itself")
    >>> error.__cause__ = error
    >>> [str(each) for each in causes(error)]
    ['raised from itself']
    """
    left = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        behind = (each.__cause__, each.__context__ if hidden else None)
        left += [other for other in behind if other is not None]
        if hidden and isinstance(each, BaseExceptionGroup):  # of tasks that ran at the same time
            left += each.exceptions


class IsthmusError(Exception):
    """Base class of all deliberate errors."""

    code: str = ""
    """A short stable identifier of the reason for programs, e.g. `roster-unsorted`, or empty."""


class UserError(IsthmusError, ValueError):
    """Invalid input; users see the message without a traceback."""


class JobError(UserError):
    """A job file that cannot be used."""


class StorageError(UserError):
    """A file could not be written or read because a disk is full or fails; worth another try."""

    code = "storage-failed"


class CannotContinue(UserError):
    """A run that cannot continue now; it can later, from its last committed round."""


class TakenOver(CannotContinue):
    """Another server has taken the place of this one, and continues what this one did."""

    code = "taken-over"


class ParticipantsMissing(CannotContinue):
    """A run that cannot continue because too few participants are ready."""

    def __init__(
        self,
        reason: str,
        *,
        roles: Collection[int],
        ready: Collection[str],
        declined: Collection[str],
    ) -> None:
        """Say who is missing.

        Args:
            reason: the sentence for users.
            roles: of the participants that are missing, as the link numbers them.
            ready: names of those that were ready.
            declined: names of those that were connected, and could not take part.
        """
        super().__init__(reason)
        self.roles = frozenset(roles)
        self.ready = frozenset(ready)
        self.declined = frozenset(declined)


class TaskError(UserError):
    """A task that cannot be loaded, or that failed while it ran, as it does again if repeated."""

    code = "task-failed"


class TaskInterrupted(TaskError):
    """Work of a task that others may have ended: by cancelling it, or by using up the memory."""

    GIVEN_UP = "the server no longer wants the update of this round"
    """The sentence for work that was cancelled, also where it comes from another process."""

    @property
    def is_given_up(self) -> bool:
        """Whether the server has cancelled the work, of which the task is not to blame."""
        return str(self) == self.GIVEN_UP


class TaskProcessEnded(TaskInterrupted):
    """The process of a task ended."""

    code = ""


class DamagedError(UserError):
    """Stored data that is not what was written: it was changed, cut short or lost."""


class UpdateError(UserError):
    """An update or a model whose shape, size or values do not fit."""


class TransferStalled(UpdateError):
    """A result of which nothing came any more, although its participant was connected."""


class RoundFailed(IsthmusError):
    """An attempt at a round that ended without a result; the round is tried again."""

    def all_refused(self, participants: Collection[str]) -> bool:
        """Whether it is certain that none of these has accepted what the attempt asked it for."""
        return False


class AggregationAborted(RoundFailed):
    """Secure aggregation that can no longer compute a sum; the round needs a new attempt."""


class PeerMisbehaved(IsthmusError):
    """A refused message that violates the protocol of secure aggregation."""

    peer: str | None = None
    """The participant that sent it, if known; None for the server."""


class LinkError(IsthmusError):
    """The connection between the server and a participant."""


class ParticipantLost(LinkError):
    """A participant was silent for longer than its lease, or was restarted as a new process."""

    def __init__(self, reason: str, *, reached: bool = True) -> None:
        """`reached`: whether it was connected when the request was made."""
        super().__init__(reason)
        self.reached = reached


class AdmissionRefused(LinkError):
    """The other side received the request and refused it."""


class AdmissionDelayed(AdmissionRefused):
    """The other side cannot tell now whether it will refuse; it is worth another try."""


class CertificateExpired(AdmissionDelayed):
    """A certificate is over by the clock of this machine or of the server, which may be wrong."""
