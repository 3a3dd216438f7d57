"""Every error Isthmus raises on purpose.

The tree::

    IsthmusError
    ├── UserError (also a ValueError)   what somebody wrote or gave is wrong; shown as one sentence
    │   ├── JobError                    a job file, or a key of one
    │   ├── TaskError                   the user's task: cannot be loaded, or raised while it ran
    │   └── UpdateError                 an update or a model that does not fit
    ├── RoundFailed                     one attempt at a round did not reach its quorum or its end
    │   └── AggregationAborted          too few are left for secure aggregation to give a sum
    ├── PeerMisbehaved                  a message that honest software never sends
    └── LinkError                       the link to a participant
        ├── ParticipantLost             gone for longer than its lease, or started anew
        └── AdmissionRefused                     the other side said no, and why

A `UserError` reaches a person as its message alone: what was wrong, where, what to do.

>>> raise JobError("federated.quorum=9 is above federated.cohort=8; lower one of them")
Traceback (most recent call last):
    ...
isthmus.errors.JobError: federated.quorum=9 is above federated.cohort=8; lower one of them
"""

from __future__ import annotations


class IsthmusError(Exception):
    """Base of all errors raised on purpose."""

    code: str = ""
    """A short stable name of the reason where a program may need one, as in `roster-unsorted`."""


class UserError(IsthmusError, ValueError):
    """Bad input; the message is all a person needs to see."""


class JobError(UserError):
    """A job file that cannot be used."""


class TaskError(UserError):
    """A task that cannot be loaded, or that failed while it ran."""


class UpdateError(UserError):
    """An update or a model whose shape, size or values do not fit."""


class RoundFailed(IsthmusError):
    """An attempt at a round that ended without a result; the round is tried again."""


class AggregationAborted(RoundFailed):
    """Secure aggregation that cannot give a sum any more; the round needs a new attempt."""


class PeerMisbehaved(IsthmusError):
    """A message of secure aggregation that honest software never sends; it is refused."""

    peer: str | None = None
    """Who sent it, if it is known; None is the server."""


class LinkError(IsthmusError):
    """The connection between the server and a participant."""


class ParticipantLost(LinkError):
    """A participant that was silent for longer than its lease, or came back as a new process."""

    def __init__(self, reason: str, *, reached: bool = True) -> None:
        """`reached`: it was here when it was asked."""
        super().__init__(reason)
        self.reached = reached


class AdmissionRefused(LinkError):
    """The other side answered, and the answer was no."""
