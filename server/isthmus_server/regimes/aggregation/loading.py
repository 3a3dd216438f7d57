"""Load the aggregation rule that a job names."""

from __future__ import annotations

from isthmus.errors import JobError
from isthmus.job.federated import FederatedSection
from isthmus.provided import make_provided
from isthmus_server.regimes.aggregation.rule import RULES, AggregationRule


def load_rule(federated: FederatedSection) -> AggregationRule:
    """Construct the rule that `federated.aggregation` names, which checks its settings.

    Raises:
        UserError: there is no such rule, its settings cannot be used, or it is no rule.
    """
    shown = f"federated.aggregation={federated.aggregation!r}"
    rule = make_provided(RULES, federated.aggregation, shown, federated)
    if not callable(getattr(rule, "begin", None)):
        raise JobError(f"{shown} is not an aggregation rule: it has no begin()")
    if not isinstance(getattr(rule, "needs_all", None), bool):
        raise JobError(f"{shown} is not an aggregation rule: needs_all is neither True nor False")
    found: AggregationRule = rule
    return found
