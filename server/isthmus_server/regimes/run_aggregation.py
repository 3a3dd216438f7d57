"""What replaces the weighted mean of the devices' updates in a run, if anything does."""

from __future__ import annotations

from isthmus.job.federated import FederatedSection
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.regimes.aggregation.control_variates import ControlVariates
from isthmus_server.regimes.aggregation.loading import load_rule
from isthmus_server.regimes.aggregation.rule_extension import RuleExtension
from isthmus_server.regimes.base import FederatedExtension, load_extension


def aggregation_of(federated: FederatedSection, layout: TensorLayout) -> FederatedExtension | None:
    """The rule that a job names, or the extension that it asks for; None for the mean.

    Raises:
        UserError: it is not installed, or its settings cannot be used.
    """
    if federated.control_variates is not None:
        # The job's cross-checks exclude the others.
        return ControlVariates(federated.control_variates, layout)
    extension = load_extension(federated, layout)
    rule = load_rule(federated)
    if rule is None:
        return extension
    return RuleExtension(rule, federated, layout)  # the job's schema excludes both
