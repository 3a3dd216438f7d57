"""Random groups whose sums a robust rule has left out, in words.

A group is told as one, and not by its devices: most of them have done nothing wrong.

Then rounds in which more groups were left out than their rule withstands of any lies.

So many are left out because they were long. Others that lie in another way would not have been, and
a rule is not made for so many of both together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.job.federated import FederatedSection
from isthmus.printable import counted, in_a_line
from isthmus_server.storage.records import EndedAttempt, Receipt, RoundRecord


def left_out_sums(record: EndedAttempt) -> tuple[list[tuple[str, str]], list[Receipt]]:
    """Each group that an attempt has left out, with the reason, and the receipts of all others."""
    groups = record.groups if isinstance(record, RoundRecord) else {}
    left_out = {name for name, group in groups.items() if group.left_out}
    devices = Counter[str]()
    reasons: dict[str, str] = {}
    others: list[Receipt] = []
    for receipt in record.receipts:
        name = receipt.group
        if receipt.status != "accepted" or name not in left_out:
            others.append(receipt)
            continue
        devices[name] += 1
        why = receipt.reason.removeprefix(f"the sum of its group {name} was left out: ")
        reasons[name] = in_a_line(f"its sum was left out: {why}")
    told = [
        (in_a_line(f"group {name} ({counted(devices[name], 'device')})"), reasons[name])
        for name in sorted(reasons)
    ]
    return told, others


def more_than_withstood(job: Mapping[str, Any], rounds: Sequence[RoundRecord]) -> list[str]:
    """What to tell an operator after these rounds; the latest is the last.

    Args:
        job: the validated job, as in a report.
        rounds: committed ones.
    """
    robust = job["federated"]["robust"]
    if robust is None or not any(
        group.left_out for each in rounds for group in each.groups.values()
    ):
        return []
    from isthmus_server.regimes.secure_sums.robust_rule import RobustRule  # loads PyTorch

    rule = RobustRule(FederatedSection.model_validate(job["federated"]))
    beyond = []
    for record in rounds:
        groups = len(record.groups)
        left_out = sum(group.left_out for group in record.groups.values())
        if left_out > rule.withstands(groups):
            beyond.append((record.round, left_out, groups))
    if not beyond:
        return []
    last, left_out, groups = beyond[-1]
    were = "was" if left_out == 1 else "were"
    return [
        f"round {last}: {left_out} of {groups} random groups {were} left out, and federated.robust="
        f"{robust!r} withstands any lies in {rule.withstands(groups)}; so it was in {len(beyond)} "
        f"of {len(rounds)} rounds: more devices lie or have a fault than the rule is made for, and "
        "the model is that of honest devices only if all of these made their sums long"
    ]
