"""How far a run has got: its state after the last attempt, and the time that it has taken."""

from __future__ import annotations

from isthmus_server.rounds.attempt_log import AttemptTime
from isthmus_server.rounds.clock import Clock
from isthmus_server.storage.run_state import RunState


class RunProgress:
    """The state and the time of one run; the coordinator changes them, others read them."""

    def __init__(self, state: RunState, clock: Clock) -> None:
        """`state` is that after the last commit."""
        self.state = state
        """After each attempt and comparison, the one that it has left."""
        self._clock = clock
        self._began = self._attempt_began = clock.now()

    @property
    def elapsed(self) -> float:
        """Seconds that the run has lasted, without the time in which it was stopped."""
        return self._clock.now() - self._began

    def begin(self) -> None:
        """Begin to measure; the time before an interruption counts, and that of it does not."""
        self._began = self._clock.now() - self.state.elapsed

    def begin_attempt(self) -> None:
        """Begin to measure an attempt."""
        self._attempt_began = self._clock.now()

    def attempt_time(self) -> AttemptTime:
        """The time of the attempt that ends now."""
        now = self._clock.now()
        return AttemptTime(started_at=self._attempt_began, ended_at=now, elapsed=now - self._began)
