"""Whether enough devices may be asked for an evaluation or a comparison."""

from __future__ import annotations

from isthmus.job.federated import FederatedSection
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.rounds.cohort_selection import CohortSelector, SelectedCohort


def check_quorum(
    cohort: SelectedCohort, settings: FederatedSection, cohorts: CohortSelector, what: str
) -> None:
    """Refuse an attempt on too few devices.

    Args:
        cohort: that was selected.
        settings: with the size and the quorum that are wanted.
        cohorts: has selected it.
        what: the devices are for, as in "an evaluation".

    Raises:
        AttemptFailed: it is too small. One that lacks devices whose privacy budget is used up is
            not excused: they do not come back.
    """
    if len(cohort.examples) >= settings.needed:
        return
    reason = (
        cohort.shortage
        or f"{len(cohort.examples)} devices are ready and {what} on {settings.cohort} needs "
        f"{settings.needed}"
    )
    used_up = cohorts.measured_out()
    if used_up:
        reason += (
            f"; {used_up} others have been asked for all measurements that their privacy budget "
            "allows ([privacy] measurements)"
        )
    raise AttemptFailed(reason, [], excused=not used_up)
