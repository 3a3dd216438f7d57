"""Whether enough devices may be asked for an evaluation or a comparison."""

from __future__ import annotations

from isthmus.job.federated import FederatedSection
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.rounds.cohort_selection import CohortSelector, SelectedCohort


def check_budgets_left(settings: FederatedSection, cohorts: CohortSelector, what: str) -> None:
    """Refuse an attempt for which too few devices have privacy budget left.

    It is not repeated, as waiting does not help.

    Args:
        settings: with the size and the quorum that are wanted.
        cohorts: selects the devices.
        what: they are for, as in "an evaluation".

    Raises:
        AttemptFailed: the devices would be enough but for their budgets.
    """
    left, connected = cohorts.measurable()
    if left < settings.needed <= connected:
        raise AttemptFailed(
            f"{left} of {connected} devices have privacy budget left for measurements, and {what} "
            f"on {settings.cohort} needs {settings.needed} ([privacy] measurements)",
            [],
        )


def check_quorum(cohort: SelectedCohort, settings: FederatedSection, what: str) -> None:
    """Refuse an attempt on too few devices; see `check_budgets_left` for the arguments.

    Raises:
        AttemptFailed: the cohort that was selected is too small.
    """
    if len(cohort.examples) < settings.needed:
        raise AttemptFailed(
            cohort.shortage
            or f"{len(cohort.examples)} devices are ready and {what} on {settings.cohort} needs "
            f"{settings.needed}",
            [],
            excused=True,
        )
