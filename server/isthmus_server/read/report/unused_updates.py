"""Devices that take part round after round without effect: their update is not usable, or weighs 0.

With secure aggregation the server knows how many, and not which. One in each round is a sentence
about that round; one in all of the last rounds is most likely always the same.

With differential privacy it does not know how many either, but it knows the noise of each sum:
means that are as long as their noise alone say that there may be nothing else in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from isthmus.printable import in_a_line
from isthmus_server.storage.records import RoundRecord

WINDOW = 10
"""The last rounds with devices that are looked at."""

_FEWEST = 3
"""Rounds from which on there is something to say."""
_SURE = 3.0
"""Standard deviations of the noise's length beyond which there is more than noise."""


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
    lines += _noise_alone(last)
    return lines


def _noise_alone(records: Sequence[RoundRecord]) -> list[str]:
    """A sentence if the devices' means in these rounds cannot be told from their noise.

    The squared length of the noise of N elements, over its variance, has a mean of N and a variance
    of 2 N (chi-square), that of k rounds k times as much, and that of an update is added to it.
    """
    elements = 0
    excess = 0.0
    deviation = 0.0
    for record in records:
        norm = record.norms.get("federated")
        if record.noise is None or norm is None:
            return []
        elements += record.noise.elements
        excess += (norm / record.noise.deviation) ** 2 - record.noise.elements
        deviation = max(deviation, record.noise.deviation)
    visible = _SURE * math.sqrt(2 * elements)
    if excess > visible:
        return []
    # Updates of this length make the excess twice `visible`; less is then very unlikely.
    shortest = deviation * math.sqrt(2 * visible / len(records))
    return [
        f"the devices' means of the last {len(records)} rounds are as long as their noise alone; "
        f"a mean update of more than {shortest:.2g} would be seen, so devices may train nothing: "
        "try the task without [privacy], and `isthmus client status` tells an owner whether a "
        "device's updates are usable"
    ]


def _without_weight(record: RoundRecord) -> set[str]:
    """Devices whose plain update was accepted and has no examples."""
    if "examples" in record.training.get("federated", {}):
        return set()  # of a secure sum: no weight is known
    return {
        receipt.participant
        for receipt in record.receipts
        if receipt.regime == "federated" and receipt.status == "accepted" and not receipt.examples
    }
