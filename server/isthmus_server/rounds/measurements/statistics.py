"""A run that computes statistics of the devices' data, in place of training.

The server keeps what the job allows to show, see `isthmus.task.measurements.statistics`; the sums
are only in memory.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from isthmus.task.measurements.statistics import StatisticsVector
from isthmus_server.rounds.drain import Drain
from isthmus_server.rounds.measurements.questions import Answers
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.checkpoints import replacing

STATISTICS = "statistics.json"
"""The file in the run directory."""


class StatisticsRun:
    """Runs a job whose `statistics.collect` is set, in place of a `Coordinator`.

    Guarantees:
      * nothing is trained, and the file is written at once or not at all;
      * a run that was interrupted asks the same devices again, which take part only together.
    """

    def __init__(self, parts: RunParts) -> None:
        """`parts` are those of the run; its budgets are closed when `run` ends."""
        self.parts = parts
        self.store = parts.store
        self.roster = parts.roster
        self.drain = Drain()

    async def run(self) -> None:
        """Compute the statistics and write them to the run directory; there is no final model.

        Raises:
            UserError: too few devices can be summed, or the task cannot be used; the run is stored
                as failed, with the reason.
        """
        with contextlib.closing(self.parts.budgets):
            await self._run()

    def abandon(self) -> None:
        """Nothing is kept for a later continuation."""

    async def _run(self) -> None:
        parts = self.parts
        if self.store.status()[0] == "finished":
            return
        self.drain.begin()
        self.store.reopen()
        self.roster.start()
        try:
            with parts.journal.failure_noted():
                await self.roster.wait_for_embedded()
                vector = StatisticsVector(parts.model.task)
                await self.roster.require("federated")
                settings = parts.job.statistics.on_devices(parts.job.federated)
                await self.roster.gather_cohort(1, settings.cohort)
                with self.drain.held():
                    sums = await parts.evaluator.statistics(vector)
                path = self.store.directory / STATISTICS
                with replacing(path, self.store.fence) as file:
                    file.write(json.dumps(self._described(vector, sums), indent=1).encode() + b"\n")
                parts.journal.finish(f"statistics of {sums.devices} devices are in {path}")
        finally:
            await parts.federated.stop()
            await self.roster.stop(True)

    def _described(self, vector: StatisticsVector, sums: Answers) -> dict[str, Any]:
        """The contents of the file."""
        minimum = self.parts.job.statistics.minimum
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
