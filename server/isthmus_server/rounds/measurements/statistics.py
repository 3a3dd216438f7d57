"""A run that computes statistics of the devices' data, in place of training.

The server keeps what the job allows to show, see `isthmus.task.measurements.statistics`; the sums
are only in memory.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from typing import Any

from isthmus.errors import IsthmusError
from isthmus.task.measurements.statistics import StatisticsVector
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.measurements.summing import DeviceSums
from isthmus_server.storage.checkpoints import replacing
from isthmus_server.storage.events import RunFailed, RunFinished

STATISTICS = "statistics.json"
"""The file in the run directory."""


class StatisticsRun(Coordinator):
    """Runs a job whose `statistics.collect` is set.

    Guarantees:
      * nothing is trained, and the file is written at once or not at all;
      * a run that was interrupted asks the same devices again, which take part only together.
    """

    async def run(self) -> None:  # type: ignore[override]  # there is no final model
        """Compute the statistics and write them to the run directory.

        Raises:
            UserError: too few devices can be summed, or the task cannot be used; the run is stored
                as failed, with the reason.
        """
        if self.store.status()[0] == "finished":
            return
        self.drain.begin()
        self.store.reopen()
        self.roster.start()
        try:
            await self.roster.wait_for_embedded()
            vector = StatisticsVector(self.model.task)
            await self.roster.require("federated")
            settings = self.job.statistics.on_devices(self.job.federated)
            await self.roster.gather_cohort(settings.cohort)
            # Attempts are not stored, and have to follow those before an interruption.
            first = int(self.clock.utc())
            with self.drain.held():
                sums = await self.evaluator.statistics(vector, first)
            path = self.store.directory / STATISTICS
            with replacing(path) as file:
                file.write(json.dumps(self._described(vector, sums), indent=1).encode() + b"\n")
            reason = f"statistics of {sums.devices} devices are in {path}"
            self.store.finish("finished", reason, None)
            self._publish(RunFinished(reason=reason, spent=0.0, final=None))
        except (IsthmusError, OSError, sqlite3.Error) as error:
            failure = error if isinstance(error, IsthmusError) else self.store.unusable(error)
            with contextlib.suppress(OSError, sqlite3.Error):  # a full disk cannot store it
                self.store.finish("failed", str(failure), None)
            self._publish(RunFailed(reason=str(failure)))
            raise failure from error
        finally:
            await self.federated.stop()
            await self.roster.stop(True)

    def _described(self, vector: StatisticsVector, sums: DeviceSums) -> dict[str, Any]:
        """The contents of the file."""
        minimum = self.job.statistics.minimum
        described: dict[str, Any] = {
            "devices": sums.devices,
            "minimum": minimum,
            "columns": vector.describe(sums.total, minimum),
        }
        if sums.groups:
            described["groups"] = {
                name: {"devices": devices, "columns": vector.describe(total, minimum)}
                for name, (total, devices) in sums.groups.items()
            }
        return described
