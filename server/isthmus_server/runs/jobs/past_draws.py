"""The draws that devices have accepted before this process began, from the logs of the runs.

A device refuses a draw before the last one that it has accepted. After a time in which this
machine's clock was ahead, that one is in the future: a server that did not know of it would be
refused until its clock has caught up.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from pathlib import Path

from isthmus.errors import IsthmusError
from isthmus_privacy.secagg.lottery import DRAW_SECONDS
from isthmus_server.storage.store import Store
from isthmus_server.transport.device_draws import DeviceDraws

_ATTEMPTS = 50
"""Newest attempts of a run that are read: the draws of one process never go back."""

log = logging.getLogger(__name__)


def restore_draws(draws: DeviceDraws, runs: Path, now: float) -> None:
    """Note what the devices have accepted in the runs of a folder.

    Args:
        draws: that no device was asked in yet.
        runs: the folder; it may be missing.
        now: Unix seconds.
    """
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(runs.iterdir()):
            try:
                # No device accepts a draw that was more than a day ahead of its log: that of any
                # other run is in the past by now.
                if (path / "run.head").stat().st_mtime < now - DRAW_SECONDS:
                    continue
                _restore(draws, path)
            except (IsthmusError, OSError, sqlite3.Error) as error:
                log.info("draws of %s are not known: %s", path, error)


def _restore(draws: DeviceDraws, path: Path) -> None:
    with contextlib.closing(Store.open(path)) as store:
        for attempt in store.newest_attempts(_ATTEMPTS):
            draw = attempt.planned.draw
            if not draw:
                continue
            # Who has not answered may have accepted it.
            draws.ask(attempt.planned.invited, draw)
            for receipt in () if attempt.record is None else attempt.record.receipts:
                if not receipt.started:
                    draws.refuse(receipt.participant, draw)
        for unmasking in store.unmaskings.entries:
            if unmasking.draw and not unmasking.refused:
                for name in unmasking.devices:
                    draws.accept(name, unmasking.draw)
