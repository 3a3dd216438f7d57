"""The four parts of a plan for one job: datacenter, devices, privacy and cost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from isthmus.errors import JobError, UserError
from isthmus.extras import install_line
from isthmus.job import Job
from isthmus.job.planned import PLANS, Figure, PlannedRanks, RanksQuestion
from isthmus.provided import load_provided, provided
from isthmus.task import Task
from isthmus_server.checks import check_exchanged, check_measured, check_settings
from isthmus_server.model.optimizers import make_optimizer
from isthmus_server.plan.cost import CostQuestion, possible_regimes
from isthmus_server.plan.devices import PlannedDevices
from isthmus_server.plan.failed_attempts import FailedAttempts
from isthmus_server.plan.model_parts import ModelParts
from isthmus_server.plan.privacy import epsilons
from isthmus_server.plan.token_prices import TokenQuestion

PlanRanks = Callable[[Job, Task, Path, int, RanksQuestion], PlannedRanks]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sides:
    """What a job asks of each side."""

    datacenter: PlannedRanks | None
    """None for a job without one."""
    devices: PlannedDevices | None
    """None for a job without rounds of devices."""
    privacy: list[Figure]
    cost: list[Figure]
    cost_question: CostQuestion
    token_question: TokenQuestion

    @functools.cached_property
    def tokens(self) -> list[Figure]:
        """What a token costs; data are read when it is asked for, once."""
        return self.token_question.prices()

    def with_failed(self, failed: FailedAttempts | None) -> Sides:
        """These sides with what failed attempts cost; None if that is not known."""
        return dataclasses.replace(self, cost=self.cost_question.prices(failed))

    @classmethod
    def of(
        cls,
        job: Job,
        task: Task,
        base: Path,
        ranks: int,
        question: RanksQuestion,
        mbit: float | None = None,
        known: PlannedRanks | None = None,
    ) -> Sides:
        """Compute all of it; nothing is trained but what `question` asks to measure.

        Args:
            job: the job.
            task: its task.
            base: the job file's folder.
            ranks: of the datacenter; 0 for none.
            question: about them.
            mbit: rate of a device's link, in megabits per second.
            known: the datacenter's part, if it was computed before.

        Raises:
            UserError: the job cannot run, in the words of `isthmus job check`.
        """
        if job.federated.app is not None or job.federated.server_app is not None:
            raise JobError(
                "a plan is of jobs with a task and the rounds of Isthmus; what an app of "
                "federated.flower sends and computes is not known before it has run"
            )
        policy = check_settings(job, ranks)
        parts = ModelParts.of(job, task)
        layout = parts.division.exchanged
        any_parameter = [torch.nn.Parameter(torch.zeros(1))]
        make_optimizer(job.strategy.server_optimizer, any_parameter)
        check_exchanged(job, layout)
        check_measured(job, task, policy)
        regimes = possible_regimes(job, policy, datacenter=bool(ranks))
        trained_there = ranks and any(kind != "federated" for kind in regimes)
        on_devices = any(kind != "datacenter" for kind in regimes)
        datacenter = known
        if trained_there and datacenter is None:
            datacenter = _plan_ranks()(job, task, base, ranks, question)
        devices = None
        if on_devices:
            devices = PlannedDevices.of(
                job,
                parts,
                mbit,
                hybrid="hybrid" in regimes,
                always="datacenter" not in regimes,
            )
        cost_question = CostQuestion(
            job=job, policy=policy, regimes=regimes, model_bytes=layout.nbytes
        )
        return cls(
            datacenter=datacenter,
            devices=devices,
            privacy=epsilons(job),
            cost=cost_question.prices(),
            cost_question=cost_question,
            token_question=TokenQuestion(
                job,
                task,
                examples_of_step=0 if datacenter is None else datacenter.examples,
                on_devices=on_devices,
            ),
        )


def _plan_ranks() -> PlanRanks:
    """What the datacenter's package has for plans.

    Raises:
        UserError: the package is not installed.
    """
    if "datacenter" not in provided(PLANS):
        raise UserError(f"the plan of a datacenter needs its package; {install_line('datacenter')}")
    found: PlanRanks = load_provided(PLANS, "datacenter", "the datacenter's part of a plan")
    return found
