"""What devices answer to the draw of one attempt, and whose clock is probably wrong.

Devices refuse a draw that is more than a day from their clocks. If most of a cohort do, it is the
server's clock that is wrong; if few do, it is theirs, or they lie, and have no attempt repeated for
them: that would cost the others, who are charged for each.
"""

from __future__ import annotations

from isthmus.system.clocks import utc
from isthmus_server.regimes.call import CLOCK_REFUSALS, CallFailed, ReceiptBook
from isthmus_server.transport.enrolment import Enrolments


class StatedDraw:
    """The draw of one attempt at a secure sum; 0 if its devices were selected without one."""

    def __init__(self, draw: int, enrolments: Enrolments) -> None:
        self._draw = draw
        self._enrolments = enrolments
        self._accepted: set[str] = set()
        self._refused: set[str] = set()
        """Devices whose clock is more than a day from it."""
        self._of_clocks: set[str] = set()
        """Devices that have refused because of a clock, also one that was wrong before."""

    def note_accepted(self, name: str) -> None:
        """Note that a device takes part."""
        self._accepted.add(name)
        if self._draw:
            self._enrolments.draws.accept(name, self._draw)

    def note_failure(self, name: str, failed: CallFailed) -> None:
        """Note that a device does not take part; it may have accepted the draw all the same."""
        if self._draw and (failed.code in CLOCK_REFUSALS or not failed.reached):
            self._enrolments.draws.refuse(name, self._draw)
        if failed.code in CLOCK_REFUSALS:
            self._of_clocks.add(name)
        if failed.code == "draw-not-now":
            self._refused.add(name)

    def excuses(self, invited: int) -> bool:
        """Whether refusals because of a clock are no fault of the devices, or there are none.

        `invited` is the number of devices in the attempt.
        """
        return not self._of_clocks or 2 * len(self._of_clocks) > invited

    def leave_out_few(self, invited: int) -> None:
        """Leave those out for a while who have refused because of a clock, if they are few."""
        if not self.excuses(invited):
            self._enrolments.draws.leave_out(self._of_clocks)

    def suspicion(self, invited: int) -> str:
        """Which clock may be wrong, as the beginning of a sentence; empty unless it is this one's.

        `invited` is the number of devices in the attempt.
        """
        if not 2 * len(self._refused) > invited:
            return ""
        now = utc(self._enrolments.now())
        return (
            f"the clock of this server, which is at {now}, is probably wrong, as "
            f"{len(self._refused)} of {invited} devices have clocks that are more than a day from "
            "it; set the clock that is wrong, and the run goes on by itself: "
        )

    def explain(self, receipts: ReceiptBook) -> None:
        """Add to the receipts of the few who have refused that the clock is probably theirs."""
        if not self._refused or len(self._refused) >= len(self._accepted):
            return
        for name in self._refused:
            if (receipt := receipts.get(name)) is not None:
                receipts.amend(
                    name,
                    f"{receipt.reason}; {len(self._accepted)} other devices accept it, so the "
                    "clock of this device is probably wrong",
                )
        self._refused.clear()
