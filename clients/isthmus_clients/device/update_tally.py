"""How many of a device's updates were usable, for its owner: nobody else may know which were not.

With secure aggregation a device whose task fails takes part with zeros of weight 0, in every round
if need be, and the server learns only how many did. So the device counts, in `updates.json` of its
state directory, and says so in its log.

>>> tally = UpdateTally(None)
>>> for usable in (True, False, False):
...     tally.note(usable)
>>> print(tally.sentence.partition(":")[0])
3 updates, 2 of them without effect (weight 0), the last 2 in a row
"""

from __future__ import annotations

import logging
from pathlib import Path

from isthmus.errors import DamagedError
from isthmus.system.sealed_files import read_sealed, write_sealed

FILE = "updates.json"

_FIRST_WARNING = 3
"""Updates without effect in a row after which the log says that something is wrong."""

log = logging.getLogger(__name__)


class UpdateTally:
    """Counts the updates of one device, over all of its runs."""

    def __init__(self, directory: Path | None) -> None:
        """Continue the count in a state directory; None counts as long as this process runs.

        A file that is damaged is replaced by a new count: nothing depends on it.
        """
        self._path = None if directory is None else directory / FILE
        self._updates = 0
        self._unused = 0
        self._in_a_row = 0
        try:
            self._read()
        except (DamagedError, OSError) as error:
            log.warning("the count of updates begins anew: %s", error)

    @classmethod
    def read(cls, directory: Path) -> UpdateTally:
        """The count in a state directory.

        Raises:
            DamagedError: the file is damaged.
            OSError: it cannot be read.
        """
        tally = cls(None)
        tally._path = directory / FILE
        tally._read()
        return tally

    def _read(self) -> None:
        if self._path is None or not self._path.exists():
            return
        values = read_sealed(self._path)
        self._updates, self._unused, self._in_a_row = (
            int(values[name]) for name in ("updates", "unused", "in_a_row")
        )

    def note(self, usable: bool) -> None:
        """Count an update that is sent; one that is not usable has weight 0."""
        self._updates += 1
        self._unused += not usable
        self._in_a_row = 0 if usable else self._in_a_row + 1
        if self._is_worth_a_warning:
            log.warning("this device trains without effect: %s", self.sentence)
        if self._path is not None:
            values = {
                "updates": self._updates,
                "unused": self._unused,
                "in_a_row": self._in_a_row,
            }
            try:
                write_sealed(self._path, values)
            except OSError as error:  # the update is worth more than its count
                log.warning("the count of updates could not be written: %s", error)

    @property
    def _is_worth_a_warning(self) -> bool:
        """At the first, and then less and less often."""
        rest = self._in_a_row
        while rest > _FIRST_WARNING and rest % 10 == 0:
            rest //= 10
        return self._in_a_row == _FIRST_WARNING or (rest == 1 and self._in_a_row > 1)

    @property
    def sentence(self) -> str:
        """The count, for the owner."""
        if not self._updates:
            return "no updates so far"
        many = f"{self._updates} update{'s' * (self._updates > 1)}"
        if not self._unused:
            return f"{many}, all of them usable"
        row = f", the last {self._in_a_row} in a row" if self._in_a_row else ", but not the last"
        return (
            f"{many}, {self._unused} of them without effect (weight 0){row}: the log of this "
            "device says why"
        )
