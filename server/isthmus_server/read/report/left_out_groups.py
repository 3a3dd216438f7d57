"""Rounds in which more random groups were left out than their robust rule withstands of any lies.

So many are left out because they were long. Others that lie in another way would not have been, and
a rule is not made for so many of both together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.job.federated import FederatedSection
from isthmus_server.storage.records import RoundRecord


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
    return [
        f"round {last}: {left_out} of {groups} random groups were left out, and federated.robust="
        f"{robust!r} withstands any lies in {rule.withstands(groups)}; so it was in {len(beyond)} "
        f"of {len(rounds)} rounds: more devices lie or have a fault than the rule is made for, and "
        "the model is that of honest devices only if all of these made their sums long"
    ]
