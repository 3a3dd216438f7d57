"""Participants whose return ends the pause of a job early."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from isthmus.errors import ParticipantsMissing
from isthmus_server.transport.peer import ParticipantListener, Peer


class EarlyReturns(ParticipantListener):
    """Notices that a participant has come which a paused job was missing.

    Guarantees:
      * one pause is ended early once, and only by a participant of a missing role that was not
        ready when the pause began;
      * a participant that comes and goes ends one pause of a job, not all of them, until the job
        has committed another round.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called when `take` has something to return."""
        self._wake = wake
        self._missing: dict[int, ParticipantsMissing] = {}
        """What each paused job is missing, by its number."""
        self._used: dict[int, set[str]] = {}
        """Participants that have ended a pause of a job, by its number."""
        self._due: set[int] = set()

    def await_missing(
        self, job: int, error: ParticipantsMissing, connected: Iterable[Peer], *, progressed: bool
    ) -> None:
        """Watch for what a job is missing, from the beginning of its pause.

        Args:
            job: its number.
            error: why it is paused.
            connected: all connected participants; of them, those that came after the run had given
                up end the pause at once.
            progressed: whether it has committed a round since its last pause.
        """
        if progressed:
            self._used.pop(job, None)
        self._missing[job] = error
        for peer in connected:
            if peer.name not in error.declined:
                self.joined(peer)

    def forget(self, job: int, *, ended: bool = False) -> None:
        """Stop watching for a job that runs again or, with `ended`, never will."""
        self._missing.pop(job, None)
        self._due.discard(job)
        if ended:
            self._used.pop(job, None)

    def take(self) -> set[int]:
        """Return the numbers of the jobs whose pause is over, and forget them."""
        due = self._due
        self._due = set()
        return due

    def joined(self, peer: Peer) -> None:
        """End the pauses of the jobs that were missing this participant."""
        for job, error in list(self._missing.items()):
            used = self._used.setdefault(job, set())
            if peer.role in error.roles and peer.name not in error.ready | used:
                used.add(peer.name)
                del self._missing[job]
                self._due.add(job)
                self._wake()
