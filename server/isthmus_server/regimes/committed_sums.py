"""What the committed rounds of a run say about its compressed updates."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.wire import link_pb2
from isthmus_privacy.secagg import MAGNITUDE
from isthmus_server.storage.records import AttemptRecord, RoundRecord


class CommittedSums:
    """The last committed sum of each device, and the magnitude of the updates in the last one.

    Devices learn from it which of their updates counted, and devices and server which values
    rounding has to represent. It follows from the round log alone, so that a server that was
    killed continues with the same.
    """

    def __init__(self, attempts: Iterable[AttemptRecord] = ()) -> None:
        """`attempts` are those of the run so far, oldest first."""
        self.magnitude: float | None = None
        """Mean binary logarithm of the root mean square of what devices sent; None before the
        first compressed round."""
        self._last: dict[str, tuple[int, int]] = {}
        for record in attempts:
            self.add(record)

    def add(self, record: AttemptRecord) -> None:
        """Take note of an ended attempt; only committed ones count."""
        if not isinstance(record, RoundRecord):
            return
        figures = record.training.get("federated", {})
        if MAGNITUDE.name not in figures:  # its updates were not compressed
            return
        self.magnitude = figures[MAGNITUDE.name]
        for receipt in record.receipts:
            if receipt.regime == "federated" and receipt.status == "accepted":
                self._last[receipt.participant] = record.round, record.attempt

    def tell(self, name: str, request: link_pb2.Request) -> None:
        """Add to a request for training which of the device's updates counted last."""
        if request.HasField("train_local"):
            work = request.train_local
            work.summed_round, work.summed_attempt = self.last(name)

    def last(self, name: str) -> tuple[int, int]:
        """Round and attempt of the last committed sum that a device is in; zeros for none."""
        return self._last.get(name, (0, 0))
