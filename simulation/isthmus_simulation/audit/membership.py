"""What membership inference gets in a job without noise, from opened sums and from the model.

Two attacks, each in one simulated run:

* **A device in an opened sum.** In each round a coin decides whether a device contributes its
  update or zeros. Somebody who knows its data, and so its update, guesses the coin from the angle
  between the update and the sum.
* **An example in the final model** (Yeom et al. 2018). Examples that were trained on have smaller
  losses than held-out ones.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isthmus.errors import TaskError, UserError
from isthmus.job import Job
from isthmus.task import Participant, Task, user_code
from isthmus.task.definition import defines
from isthmus.task.own_numbers import own_numbers
from isthmus.task.scoring import count_examples, losses_of, pair_of
from isthmus.transport.blobs import Buffer
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_clients.device.task_host import TrainingResult
from isthmus_privacy.dp.auditing import lower_bound
from isthmus_server.python.saved_model import load_model
from isthmus_server.regimes.base import AttemptSpec, FederatedResult
from isthmus_simulation.devices.device import VirtualHost
from isthmus_simulation.devices.fleet import VirtualFleet
from isthmus_simulation.run import Simulation

if TYPE_CHECKING:
    from torch import nn

    from isthmus_server.rounds.run_parts import RunParts

MOST_EXAMPLES = 1000
"""Members, and others, whose losses are compared."""
FEW = 4
"""Fewest devices in a sum for which they are compared with the middle of them."""
_MIDDLE = 0.5
"""Middle of the cosines of an update and a sum that is all of it or zeros."""
FALSE_ALARMS = 0.01
"""Share of those that are no members which an attack may take for members."""


@dataclasses.dataclass(frozen=True)
class Attack:
    """How well members are told from others."""

    members: int
    others: int
    area: float
    """Probability that a member looks more like one than another does: 0.5 for no knowledge."""
    found: float
    """Share of the members that are found where 1 % of the others are taken for members."""

    @classmethod
    def of(cls, members: Sequence[float], others: Sequence[float]) -> Attack:
        """From scores, which are larger for what looks like a member."""
        inside = torch.tensor(members, dtype=torch.float64)
        outside, _ = torch.tensor(others, dtype=torch.float64).sort()
        below = torch.searchsorted(outside, inside, right=False).double()
        not_above = torch.searchsorted(outside, inside, right=True).double()
        area = float(((below + not_above) / 2).mean() / len(outside))
        limit = outside[-1 - int(FALSE_ALARMS * len(outside))]
        return cls(len(inside), len(outside), area, float((inside > limit).double().mean()))

    def to_json(self) -> dict[str, Any]:
        """The attack as a JSON object."""
        return {
            "members": self.members,
            "others": self.others,
            "area": self.area,
            "found_at_1_percent": self.found,
        }


class DeviceMembership:
    """The devices' coins and updates of a run, and what the opened sums say of them."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._updates: dict[tuple[int, int], dict[str, tuple[bool, torch.Tensor]]] = {}
        self.inside: list[float] = []
        self.outside: list[float] = []
        self.right = 0
        """Guesses that were right, one for each device and round."""

    def tossed(self, work: link_pb2.TrainLocal, name: str, update: torch.Tensor) -> bool:
        """Toss the coin of a device in an attempt; its update (N) is remembered."""
        present = bool(secrets.randbits(1))
        of_attempt = self._updates.setdefault((work.round, work.attempt), {})
        of_attempt[name] = present, update.clone()
        return present

    def watch(self, spec: AttemptSpec, result: FederatedResult) -> None:
        """See the opened means of a round."""
        updates = self._updates.pop((spec.round, spec.attempt), {})
        self._updates.clear()  # of attempts that failed
        # A round that is summed by group opens the sum of each group, which is of fewer devices.
        for opened in result.groups.values() or (result,):
            self._compare(opened, updates)

    def _compare(
        self, opened: FederatedResult, updates: Mapping[str, tuple[bool, torch.Tensor]]
    ) -> None:
        """Guess the coins of the devices that are in one opened sum."""
        names = {each.participant for each in opened.receipts if each.status == "accepted"}
        mean = opened.pseudo_gradient.double()
        scores = []
        coins = []
        for name, (present, update) in updates.items():
            if name in names:
                scores.append(float(torch.cosine_similarity(mean, update.double(), dim=0)))
                coins.append(present)
        middle = sorted(scores)[len(scores) // 2] if len(scores) >= FEW else _MIDDLE
        for score, present in zip(scores, coins, strict=True):
            (self.inside if present else self.outside).append(score - middle)
            self.right += (score >= middle) == present


class _TossingHost(VirtualHost):
    """A device that contributes its update or zeros."""

    def __init__(
        self, fleet: VirtualFleet, participant: Participant, membership: DeviceMembership
    ) -> None:
        super().__init__(fleet, participant)
        self._membership = membership

    def train(
        self, request_id: str, work: link_pb2.TrainLocal, payload: Buffer, progress: ReportProgress
    ) -> TrainingResult:
        """See `TaskHost.train`."""
        trained, update = super().train(request_id, work, payload, progress)
        assert self.run is not None
        vector = self.run.layout.decode(update)
        if not self._membership.tossed(work, self._participant.name, vector):
            vector.zero_()
        return trained, update


class MembershipRun(Simulation):
    """A simulated run of a job in which each device tosses a coin in each round."""

    membership: DeviceMembership

    def _host(self, fleet: VirtualFleet, index: int) -> VirtualHost:
        return _TossingHost(fleet, fleet.participant(index), self.membership)

    def _watch(self, parts: RunParts, fleet: VirtualFleet) -> None:
        parts.federated.watch = self.membership.watch


@dataclasses.dataclass(frozen=True)
class MembershipReport:
    """What the attacks got."""

    job: str
    device: Attack
    right: int
    """Guesses of a device's coin that were right, of all."""
    epsilon: float
    """No guarantee with a smaller epsilon, and delta 0, can hold for a device in one sum."""
    confidence: float
    example: Attack | None
    no_example: str
    """Why there is no attack on examples; empty if there is one."""

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {
            "job": self.job,
            "noise": False,
            "confidence": self.confidence,
            "device_in_a_sum": {
                **self.device.to_json(),
                "right": self.right,
                "epsilon_at_least": self.epsilon,
            },
            "example_in_the_model": None if self.example is None else self.example.to_json(),
            "example_not_attacked": self.no_example,
        }

    def lines(self) -> list[tuple[str, str]]:
        """The report as lines: names and texts."""
        device = self.device
        made = device.members + device.others
        found = [
            ("noise", f"none: {self.job!r} promises nothing about what its sums and model reveal"),
            ("a device", f"{self.right} of {made} guesses whether it is in a sum are right"),
            (
                "",
                f"area under the curve {device.area:.3f}; {device.found:.0%} of those in it are "
                "found with 1 % false alarms",
            ),
            (
                "",
                f"no guarantee below an epsilon of {self.epsilon:.2f} can hold in one round, with "
                f"confidence {self.confidence:.4%}",
            ),
        ]
        if self.example is None:
            found.append(("an example", f"not attacked: {self.no_example}"))
        else:
            by_loss = (
                f"area under the curve {self.example.area:.3f} by its loss of the final model; "
                f"{self.example.found:.1%} of {self.example.members} that were trained on are "
                "found with 1 % false alarms"
            )
            found.append(("an example", by_loss))
        found.append(("to bound it", "add a table [privacy], or [federated.privacy] for examples"))
        return found


def membership_run(job: Job, base: Path, directory: Path) -> MembershipRun:
    """The run of a job, which is yet to be run.

    Raises:
        JobError: it cannot be simulated.
    """
    simulation = MembershipRun.new(job, base, directory)
    assert isinstance(simulation, MembershipRun)
    simulation.membership = DeviceMembership()
    return simulation


def report_of(run: MembershipRun, task: Task, devices: int, confidence: float) -> MembershipReport:
    """What the attacks got from a run that has ended.

    Args:
        run: of the job.
        task: of the job.
        devices: of the job.
        confidence: of the bound on epsilon.

    Raises:
        UserError: no sum was opened, or only with few devices.
    """
    membership = run.membership
    made = len(membership.inside) + len(membership.outside)
    if not membership.inside or not membership.outside:
        raise UserError(
            f"the simulated run has opened sums with {made} updates of devices, too few to tell "
            "members from others; let it have more rounds or a larger cohort"
        )
    share = lower_bound(membership.right, made, confidence)
    example = None
    try:
        example = _examples(task, load_model(run.directory), devices, run.store.job.seed)
        reason = ""
    except TaskError as error:
        reason = str(error)
    return MembershipReport(
        job=run.store.job.name,
        device=Attack.of(membership.inside, membership.outside),
        right=membership.right,
        epsilon=max(0.0, math.log(share / (1 - share))) if share else 0.0,
        confidence=confidence,
        example=example,
        no_example=reason,
    )


def _examples(task: Task, model: nn.Module, devices: int, seed: int) -> Attack:
    """Tell examples of devices from held-out ones by their losses.

    Raises:
        TaskError: the task has no loss of an example, or no held-out data.
    """
    if not defines(task, "loss"):
        raise TaskError("the task has no loss() of an example")
    with user_code("eval_data()"):
        held_out = task.eval_data()
    if held_out is None:
        raise TaskError("eval_data() gives no examples that were not trained on")
    members: list[float] = []
    for index in range(devices):
        participant = Participant(
            name=f"client-{index}", regime="federated", shard=(index, devices)
        )
        with own_numbers(seed, participant.name), user_code("local_data()"):
            dataset = task.local_data(participant)  # which it has trained on
        members += _losses(task, model, dataset, MOST_EXAMPLES - len(members))
        if len(members) >= MOST_EXAMPLES:
            break
    others = _losses(task, model, held_out, MOST_EXAMPLES)
    return Attack.of([-each for each in members], [-each for each in others])


@torch.no_grad()
def _losses(task: Task, model: nn.Module, dataset: Any, most: int) -> list[float]:
    """The losses of at most so many examples, each alone, drawn at random."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise TaskError("local_data() is an iterable dataset, whose examples cannot be drawn")
    count = count_examples(dataset, "the data set")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:most]
    found = []
    for index in order.tolist():
        with user_code("the loss of one example"):
            inputs, target = pair_of(task, task.collate([dataset[index]]))
            output = task.forward(model, inputs)
            found.append(float(losses_of(task, output, target).mean()))
    return found
