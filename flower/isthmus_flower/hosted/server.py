"""Run a job as a Flower ServerApp, on a SuperLink of Flower's own runtime.

In the app's module::

    app = server_app(Path(__file__).with_name("job.toml"))

It runs a job's federated rounds with its strategy, server optimizer and central evaluation. Other
features need Isthmus' own server: resumption, receipts, datacenters, secure aggregation.
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
from isthmus.job import Job
from isthmus.job.flower import FlowerSection
from isthmus.task import load_task
from isthmus.task.scoring import build_start_model
from isthmus_flower.hosted.job_limits import DIRECTORY, hosted_job
from isthmus_flower.server.replies import check_reply, inconsistent_replies
from isthmus_flower.server.strategy_adapter import FlowerStrategyAdapter
from isthmus_flower.server.strategy_round import StrategyRound
from isthmus_server.model.global_model import GlobalModel

log = logging.getLogger("flwr")  # `flwr log` shows this logger

_POLL_SECONDS = 0.5
"""Interval between two reads of the connected nodes: a Grid sends no events."""


def server_app(job_file: Path) -> ServerApp:
    """Create an app that runs a job's rounds on the connected SuperNodes."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        """Train, and write `model.safetensors` and `report.json` into the config's `directory`.

        Raises:
            UserError: the job is invalid, or a round failed in all its attempts.
        """
        job = hosted_job(job_file, context.run_config)
        directory = Path(str(context.run_config.get(DIRECTORY) or "."))
        FlowerServerRun(job, job_file.parent).run(grid, directory)

    return app


class FlowerServerRun:
    """One run of a job on Flower's runtime."""

    def __init__(self, job: Job, base: Path) -> None:
        """Load the task, the model and the strategy.

        Raises:
            UserError: one of them is invalid.
        """
        self.job = job
        data = job.task.data_in(base)
        task = load_task(job.task.source, job.task.settings, base=base, data=data)
        strategy = job.strategy
        self.model = GlobalModel(
            task,
            job.seed,
            strategy.server_optimizer,
            strategy.served_average,
            job.exchange,
            build=lambda: build_start_model(task, job, base),
        )
        flower = job.federated.flower or FlowerSection()
        self.federated = job.federated.model_copy(update={"flower": flower})
        self.adapter = FlowerStrategyAdapter(
            self.federated, self.model.layout, sampled_nodes=self.federated.invited
        )

    def run(self, grid: Grid, directory: Path) -> None:
        """Run all rounds, then write `model.safetensors` and `report.json` into `directory`."""
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
        """Run a round, with as many attempts as the job allows."""
        started = time.monotonic()
        for attempt in range(1, self.job.attempts + 1):
            self._wait_for_nodes(grid)
            strategy_round = self.adapter.begin(round_, self.model.vector, self.federated)
            try:
                accepted = self._attempt(grid, strategy_round)
                break
            except RoundFailed as error:
                log.warning("round %d, attempt %d: %s", round_, attempt, error)
                if attempt == self.job.attempts:
                    raise UserError(
                        f"round {round_} failed {attempt} times; the last time because: {error}"
                    ) from None
        every = self.job.evaluation.every
        evaluated = round_ % every == 0 or round_ == self.job.rounds
        return {
            "round": round_,
            "accepted": accepted,
            "training": strategy_round.figures,
            "metrics": self.model.evaluate(self.job.evaluation.batch_size) if evaluated else {},
            "seconds": time.monotonic() - started,
        }

    def _attempt(self, grid: Grid, strategy_round: StrategyRound) -> int:
        """Train one attempt, step the model, and return how many replies were used."""
        messages = strategy_round.configure(grid)
        scratch = torch.empty_like(self.model.vector)
        refusals: list[str] = []
        accepted: dict[int, Message] = {}
        for reply in grid.send_and_receive(messages, timeout=self.job.time.first_round_seconds):
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise UpdateError(reply.error.reason or "no reason")
                check_reply(
                    reply.content,
                    self.model.layout,
                    scratch,
                    weighted_by=strategy_round.weighted_by,
                    max_examples=self.adapter.settings.max_examples,
                )
                accepted[node] = reply
            except UpdateError as error:
                refusals.append(f"node {node}: {error}")
        contents = {node: reply.content for node, reply in accepted.items()}
        for node in inconsistent_replies(contents):
            del accepted[node]
            refusals.append(f"node {node}: its records have other names than most nodes'")
        if len(accepted) < self.federated.needed:
            raise RoundFailed(
                f"{len(accepted)} of {len(messages)} answers were accepted and the quorum is "
                f"{self.federated.needed} ({'; '.join(sorted(refusals)[:3])})"
            )
        self.model.step(strategy_round.aggregate([accepted[node] for node in sorted(accepted)]))
        self.model.average()
        self.adapter.commit(strategy_round.state)
        return len(accepted)

    def _wait_for_nodes(self, grid: Grid) -> None:
        """Wait until a whole cohort is connected.

        Raises:
            UserError: too few nodes connected in time.
        """
        needed = self.federated.invited
        deadline = time.monotonic() + self.job.time.join_seconds
        while (connected := len(list(grid.get_node_ids()))) < needed:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{connected} SuperNodes are connected and a round needs {needed} "
                    f"(federated.cohort); waited {self.job.time.join_seconds:g} s"
                )
            time.sleep(_POLL_SECONDS)  # a Grid can only be polled
