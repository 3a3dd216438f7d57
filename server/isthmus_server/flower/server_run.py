"""Our server as a Flower ServerApp, for a SuperLink of Flower's own runtime.

In the app's module::

    app = server_app(Path(__file__).with_name("job.toml"))

A job's federated rounds, with its strategy, server optimizer and central evaluation. What Flower's
runtime has nothing for stays with our own: resumption, receipts, datacenters, secure aggregation.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from isthmus.errors import RoundFailed, UpdateError, UserError
from isthmus.integrations.flower.job_limits import DIRECTORY, hosted_job
from isthmus.job import Job
from isthmus.job.federated import FlowerSection
from isthmus.task import load_task
from isthmus_server.flower.replies import check, odd_ones
from isthmus_server.flower.strategy_adapter import FlowerStrategyAdapter, StrategyRound
from isthmus_server.model.global_model import GlobalModel

log = logging.getLogger("flwr")  # what is said there is what `flwr log` shows

_POLL_SECONDS = 0.5
"""Between two looks at who is there: Flower's runtime does not say when somebody comes."""


def server_app(job_file: Path) -> ServerApp:
    """An app that runs a job's rounds on whatever SuperNodes are connected."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        """Train, and write `model.safetensors` and `report.json` into the config's `directory`.

        Raises:
            UserError: the job cannot be used, or a round failed as often as it may.
        """
        job = hosted_job(job_file, context.run_config)
        directory = Path(str(context.run_config.get(DIRECTORY) or "."))
        FlowerServerRun(job, job_file.parent).run(grid, directory)

    return app


class FlowerServerRun:
    """One run of a job on somebody else's runtime."""

    def __init__(self, job: Job, base: Path) -> None:
        """Load the task, the model and the strategy.

        Raises:
            UserError: one of them cannot be used.
        """
        self.job = job
        data = job.task.data_in(base)
        task = load_task(job.task.source, job.task.settings, base=base, data=data)
        strategy = job.strategy
        self.model = GlobalModel(task, job.seed, strategy.server_optimizer, strategy.served_average)
        flower = job.federated.flower or FlowerSection()
        self.federated = job.federated.model_copy(update={"flower": flower})
        self.adapter = FlowerStrategyAdapter(
            self.federated, self.model.layout, sampled_nodes=self.federated.invited
        )

    def run(self, grid: Grid, directory: Path) -> None:
        """All rounds, and the files at the end."""
        rows = []
        for round_ in range(1, self.job.rounds + 1):
            row = self._round(grid, round_)
            log.info("round %d: %s", round_, json.dumps(row))
            rows.append(row)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "model.safetensors").write_bytes(self.model.served_payload)
        final = {"model_sha256": self.model.served_sha256, "metrics": rows[-1]["metrics"]}
        report = {"job": self.job.name, "rounds": rows, "final": final}
        (directory / "report.json").write_text(json.dumps(report, indent=1) + "\n")

    def _round(self, grid: Grid, round_: int) -> Mapping[str, Any]:
        """Try a round until it succeeds, or the job's attempts are used up."""
        started = time.monotonic()
        for attempt in range(1, self.job.attempts + 1):
            self._wait_for_nodes(grid)
            begun = self.adapter.begin(round_, self.model.vector, self.federated)
            try:
                accepted = self._attempt(grid, begun)
                break
            except RoundFailed as error:
                log.warning("round %d, attempt %d: %s", round_, attempt, error)
                if attempt == self.job.attempts:
                    raise UserError(
                        f"round {round_} failed {attempt} times; the last time because: {error}"
                    ) from None
        every = self.job.evaluation.every
        evaluates = round_ % every == 0 or round_ == self.job.rounds
        return {
            "round": round_,
            "accepted": accepted,
            "training": begun.figures,
            "metrics": self.model.evaluate(self.job.evaluation.batch_size) if evaluates else {},
            "seconds": time.monotonic() - started,
        }

    def _attempt(self, grid: Grid, begun: StrategyRound) -> int:
        """Ask, and step on what comes; returns how many answers were used."""
        messages = begun.configure(grid)
        waits = self.job.time.round_seconds
        scratch = torch.empty_like(self.model.vector)
        refused: list[str] = []
        good: dict[int, Message] = {}
        for reply in grid.send_and_receive(messages, timeout=waits):
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise UpdateError(reply.error.reason or "no reason")
                check(
                    reply.content,
                    self.model.layout,
                    scratch,
                    weighted_by=begun.weighted_by,
                    max_examples=self.adapter.settings.max_examples,
                )
                good[node] = reply
            except UpdateError as error:
                refused.append(f"node {node}: {error}")
        for node in odd_ones({node: reply.content for node, reply in good.items()}):
            del good[node]
            refused.append(f"node {node}: its records have other names than most nodes'")
        if len(good) < self.federated.needed:
            raise RoundFailed(
                f"{len(good)} of {len(messages)} answers were accepted and the quorum is "
                f"{self.federated.needed} ({'; '.join(sorted(refused)[:3])})"
            )
        self.model.step(begun.aggregate([good[node] for node in sorted(good)]))
        self.model.average()
        self.adapter.commit(begun.state)
        return len(good)

    def _wait_for_nodes(self, grid: Grid) -> None:
        wanted, until = self.federated.invited, time.monotonic() + self.job.time.join_seconds
        while (here := len(list(grid.get_node_ids()))) < wanted:
            if time.monotonic() > until:
                raise UserError(
                    f"{here} SuperNodes are connected and a round asks {wanted} "
                    f"(federated.cohort); waited {self.job.time.join_seconds:g} s"
                )
            time.sleep(_POLL_SECONDS)  # a Grid can only be asked
