"""Devices that take part round after round without effect: their update is not usable, or weighs 0.

With secure aggregation the server knows how many, and not which. One in each round is a sentence
about that round; one in all of the last rounds is most likely always the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.printable import in_a_line
from isthmus_server.storage.records import RoundRecord

WINDOW = 10
"""The last rounds with devices that are looked at."""

_FEWEST = 3
"""Rounds from which on there is something to say."""


def unused_updates(rounds: Sequence[RoundRecord]) -> list[str]:
    """What to tell an operator after these rounds; the latest is the last."""
    last = [record for record in rounds if record.regime != "datacenter"][-WINDOW:]
    if len(last) < _FEWEST:
        return []
    where = f"in each of the last {len(last)} rounds"
    lines = []
    fewest = min(record.unusable_devices for record in last)
    if fewest:
        lines.append(
            f"{fewest} of {last[-1].summed_devices} devices without a usable update {where}; "
            "`isthmus client status` and its log tell the owner which device it is, and why"
        )
    names = set.intersection(*(_without_weight(record) for record in last))
    if names:
        listed = ", ".join(map(in_a_line, sorted(names)[:8])) + (", ..." if len(names) > 8 else "")
        count = f"{len(names)} of {last[-1].summed_devices} devices with a weight of 0 {where}"
        lines.append(f"{count}: {listed}")
    return lines


def _without_weight(record: RoundRecord) -> set[str]:
    """Devices whose plain update was accepted and has no examples."""
    if "examples" in record.training.get("federated", {}):
        return set()  # of a secure sum: no weight is known
    return {
        receipt.participant
        for receipt in record.receipts
        if receipt.regime == "federated" and receipt.status == "accepted" and not receipt.examples
    }
