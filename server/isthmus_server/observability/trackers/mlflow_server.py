"""A run of an MLflow tracking server."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from typing import Any

from isthmus_server.observability.trackers.tracker import TrackedRun

_BATCH = 100
"""Parameters in one request, as MLflow limits them."""

_LONGEST = 500
"""Characters of a parameter."""


class MlflowServer:
    """Logs to a run of the experiment with the job's name.

    Credentials are those that MLflow takes from its environment.
    """

    def __init__(self, uri: str | None) -> None:
        """Use a tracking URI; None for that of the environment, `MLFLOW_TRACKING_URI`."""
        self._uri = uri
        self._client: Any = None
        self._run = ""

    def begin(self, run: TrackedRun) -> str:
        """Create a run with the job's keys as parameters, or continue the earlier one."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        # It would log each of its retries; in the end there is one warning of the sink.
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        self._client = MlflowClient(tracking_uri=self._uri)
        if run.earlier:
            self._run = run.earlier
            self._client.update_run(self._run, status="RUNNING")
            return self._run
        experiment = self._client.get_experiment_by_name(run.name)
        id_ = experiment.experiment_id if experiment else self._client.create_experiment(run.name)
        self._run = self._client.create_run(id_, run_name=run.run_id).info.run_id
        parameters = [
            Param(_name(key), str(value)[:_LONGEST]) for key, value in run.parameters.items()
        ]
        for first in range(0, len(parameters), _BATCH):
            self._client.log_batch(self._run, params=parameters[first : first + _BATCH])
        return self._run

    def log(self, round_: int, figures: Mapping[str, float]) -> None:
        """Log metrics; the step is the round."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(_name(name), value, now, round_) for name, value in figures.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def log_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Log metrics of an optimizer step."""
        self.log(step, figures)

    def end(self, failed: bool) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def _name(name: str) -> str:
    """A name of the characters that MLflow allows.

    >>> _name("metrics/loss@1")
    'metrics/loss_1'
    """
    return re.sub(r"[^\w/. -]", "_", name)[:250]
