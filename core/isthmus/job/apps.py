"""Find what a framework registers for jobs whose devices run its apps.

A framework registers by entry points, which every role looks up only for a job that has an app:

  * `isthmus.device_work` opens an app on a device;
  * `isthmus.run_loops` has an app direct a run in place of the round loop;
  * `isthmus.app_checks` loads the apps for `isthmus job check`.

The name of each entry point is the table in `[federated]` that names the apps.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from isthmus.errors import JobError
from isthmus.job.federated import FederatedSection


def registered(group: str, federated: FederatedSection) -> Any:
    """What is registered in an entry-point group for the table of a job that names its apps.

    Raises:
        JobError: nothing is, or the framework is not installed.
    """
    for entry in entry_points(group=group):
        if getattr(federated, entry.name, None) is not None:
            return entry.load()
    raise JobError(
        f"the job has an app, and the installed isthmus registers nothing in {group!r} that runs "
        "it; install isthmus again"
    )
