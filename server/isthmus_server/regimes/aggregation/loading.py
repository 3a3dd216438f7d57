"""Load the aggregation rule that a job names."""

from __future__ import annotations

from isthmus.errors import JobError
from isthmus.job.federated import FederatedSection
from isthmus.provided import make_provided, provided
from isthmus_server.regimes.aggregation.rule import RULES, AggregationRule

MEAN = "mean"
"""The name of what the server computes without a rule, in secure sums too."""

_STATE = ("commit", "reset", "export_state", "import_state")
"""The methods of `RuleWithState`."""


def load_rule(federated: FederatedSection) -> AggregationRule | None:
    """Construct the rule that `federated.aggregation` names, which checks its settings.

    None for the mean.

    Raises:
        UserError: there is no such rule, its settings cannot be used or have no effect, or it is no
            rule.
    """
    shown = f"federated.aggregation={federated.aggregation!r}"
    if federated.aggregation == MEAN:
        if others := provided(RULES).get(MEAN):
            raise JobError(
                f"{shown} is built in, and {others[0].value} of an installed package has the same "
                "name; rename that rule, or uninstall its package"
            )
        return None
    rule = make_provided(RULES, federated.aggregation, shown, federated)
    if not callable(getattr(rule, "begin", None)):
        raise JobError(f"{shown} is not an aggregation rule: it has no begin()")
    if not isinstance(getattr(rule, "needs_all", None), bool):
        raise JobError(f"{shown} is not an aggregation rule: needs_all is neither True nor False")
    has = [each for each in _STATE if callable(getattr(rule, each, None))]
    missing = [each for each in _STATE if each not in has]
    if has and missing:
        raise JobError(
            f"{shown} has {has[0]}() and no {missing[0]}(); a rule with state has both "
            f"(RuleWithState: {', '.join(_STATE)}), and one without has neither"
        )
    default = FederatedSection.model_fields["aggregation_max_bytes"].default
    if not rule.needs_all and federated.aggregation_max_bytes != default:
        raise JobError(
            f"federated.aggregation_max_bytes={federated.aggregation_max_bytes} has no effect on "
            f"{shown}, which uses each update when it arrives; remove it"
        )
    found: AggregationRule = rule
    return found
