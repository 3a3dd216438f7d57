"""Through which address a device is linked now, for its owner: an aggregator, or the server itself.

The device is the only one that dials, so it knows; it keeps that in `link.json` of its state
directory, where `isthmus client status` reads it without a connection.

>>> own = OwnLink(None)
>>> own.note("sums.example.org:9500", "", now=2_000_000_000)
>>> own.sentence
'linked to sums.example.org:9500 since 2033-05-18 03:33:20 UTC'
>>> own.note("", "it was stopped", now=2_000_000_010)
>>> own.note("", "nothing listens there", now=2_000_000_020)
>>> own.sentence
'without a link since 2033-05-18 03:33:30 UTC: nothing listens there'
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

from isthmus.errors import DamagedError
from isthmus.printable import in_a_line
from isthmus.system.clocks import utc
from isthmus.system.sealed_files import read_sealed, write_sealed

FILE = "link.json"

log = logging.getLogger(__name__)


class OwnLink:
    """The address of a device's link, or why it has none."""

    def __init__(self, directory: Path | None) -> None:
        """Nothing is known yet; in a state directory it is kept for others to read."""
        self._path = None if directory is None else directory / FILE
        self._address: str | None = None
        """Empty without a link; None if nothing is known."""
        self._why = ""
        self._since = 0.0
        self._has_failed = False

    @classmethod
    def read(cls, directory: Path) -> OwnLink:
        """What a device has kept; nothing if its file is missing or damaged."""
        own = cls(None)
        with contextlib.suppress(OSError, DamagedError, LookupError, TypeError, ValueError):
            values = read_sealed(directory / FILE)
            since = float(values["since"])
            why = str(values["why"])
            own._address = str(values["address"])
            own._why = why
            own._since = since
        return own

    def note(self, address: str, why: str, now: float | None = None) -> None:
        """Keep that the device is linked through an address, or why it is not.

        Args:
            address: where it is linked; empty for no link.
            why: there is no link.
            now: Unix seconds; None for the present.
        """
        if self._address is None or address or self._address:
            self._since = time.time() if now is None else now
        self._address = address
        self._why = why
        if self._path is None:
            return
        try:
            write_sealed(self._path, {"address": address, "why": why, "since": self._since})
        except OSError as error:  # the link is worth more
            if not self._has_failed:
                log.warning("the address of the link could not be written: %s", error)
            self._has_failed = True

    @property
    def sentence(self) -> str:
        """Where the device is linked, for the owner; empty if nothing is known."""
        if self._address is None:
            return ""
        if self._address:
            return f"linked to {in_a_line(self._address)} since {utc(self._since)}"
        return f"without a link since {utc(self._since)}: {in_a_line(self._why)}"
