"""One rank's share of training one run: model, optimizer and data, always at an absolute step.

Shape legend: one *unit* is whatever the task scores (an example, a token); a step's loss is the
mean over the units of all replicas.
"""

from __future__ import annotations

import dataclasses
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from isthmus.errors import TaskError, UserError
from isthmus.exchange import Layout
from isthmus.job import Job
from isthmus.scoring import build_model, count_examples
from isthmus.task import Participant, Task, load_task, user_code
from isthmus_datacenter import auto
from isthmus_datacenter.agreement import (
    AgreedError,
    StoppedError,
    Wish,
    Wishes,
    agree_on_units,
    agreement,
)
from isthmus_datacenter.checkpoint import Checkpoints
from isthmus_datacenter.control import Command
from isthmus_datacenter.data import Feed, Order, derived_seed
from isthmus_datacenter.evaluation import Evaluation
from isthmus_datacenter.exchange import load_shards, store_shards
from isthmus_datacenter.layout import RankLayout
from isthmus_datacenter.live import Live, Tell
from isthmus_datacenter.optim import Updater
from isthmus_datacenter.parallelize import parallelize
from isthmus_datacenter.passes import Passes
from isthmus_datacenter.profile import FORWARD_AND_BACKWARD, Profile, count_flops
from isthmus_datacenter.share import local

_SAMPLE = 2
"""Examples to compare a model that was cut with the whole one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where this rank is and what it trains on."""

    rank: int
    ranks: int
    device: torch.device
    participant: str
    state: Path
    """Directory of the run's checkpoints."""


class Engine:
    """One run on one rank.

    Guarantees:
      * the state at a step depends on the job, the data, the number of replicas and the models
        that were sent, and on nothing else: not on restarts, and not on what was tried between;
      * a failure that only some ranks can see leaves as it is; one that all see is agreed on first.
    """

    def __init__(self, command: Command, place: Place) -> None:
        """Load the task and its data, and lay the model out. All ranks call this together.

        Raises:
            AgreedError: the task failed on some rank.
        """
        self.place = place
        self.job = Job.model_validate_json(command.job)
        self.layout = Layout.from_header(command.layout.encode("latin-1"))
        self.checkpoints = Checkpoints(place.state)
        self.note = ""
        """What was decided here that a person may want to know."""
        with agreement():
            self.task = self._load(command)
            self.data = self._local_data()
            streams = isinstance(self.data, IterableDataset)
            self.examples = 0 if streams else count_examples(self.data, "local_data()")
            self.ranks = self._choose_layout()
        self.here = self.ranks.place(place.rank)
        self.order = Order(
            examples=self.examples,
            ranks=self.ranks.data,
            batch_size=self.job.datacenter.batch_size,
            seed=self.job.seed,
        )
        self.feed = Feed(
            self.data, self.order, self.here.data, place.device, self.job.datacenter.readers
        )
        batch_size = self.job.evaluation.batch_size
        self.evaluation = Evaluation(self.task, batch_size, place.device)
        self._flops: float | None = None
        """Operations of one step on one rank; 0 where nobody knows, None before anybody looked."""
        self._units = 0
        self.figures: dict[str, float] = {}
        """What the last training cost."""
        self.at: int | None = None
        self._begin_anew()

    # -- the commands ---------------------------------------------------------------------------

    def train(self, command: Command, tell: Tell, wishes: Wishes) -> dict[str, object]:
        """Train from one absolute step to another, and save the state there.

        Raises:
            AgreedError: no state to start from, the loss left the finite numbers, aborted.
            TaskError: the task raised on this rank, maybe on this one only.
        """
        reset = self.job.datacenter.optimizer_on_load == "reset"
        if command.model is None or not reset or self._has_buffers():
            self._go_to(command.from_step)
        self.at = None
        profile = self.profile = Profile(self.place.device)
        if command.model is not None:
            with profile.host("exchange"):
                load_shards(Path(command.model), self.layout, self.share)
            if reset:
                self.updater = self._make_updater()
        started = time.monotonic()
        profile.begin()
        self._seed(command.from_step)
        loss = self._steps(command.from_step, command.until_step, tell, wishes)
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)
        seconds = time.monotonic() - started
        steps = command.until_step - command.from_step
        examples = steps * self.order.ranks * self.order.batch_size
        figures = profile.figures(steps, examples, self._units, self._flops or 0)
        with profile.host("checkpoint"):
            self.checkpoints.save(command.until_step, self.share, self.updater)
        if self.place.rank == 0:
            self.checkpoints.keep_only({command.from_step, command.until_step})
        self.at = command.until_step
        evaluation = {}
        if command.evaluate:
            with profile.host("evaluation"):
                evaluation = self.evaluation.run(self.passes, self.here.data)
        if command.result is not None:
            with profile.host("exchange"):
                store_shards(Path(command.result), self.layout, self.share)
        self.figures = {**figures, **profile.around()} if steps else {}
        return {
            "steps": steps,
            "examples": examples,
            "training": {} if loss is None else {"loss": loss},
            "evaluation": evaluation,
            "seconds": seconds,
        }

    def export(self, command: Command) -> None:
        """Write the model of a step into a file.

        Raises:
            AgreedError: that step is not here.
        """
        assert command.result is not None
        self._go_to(command.from_step)
        store_shards(Path(command.result), self.layout, self.share)

    # -- state ----------------------------------------------------------------------------------

    def _load(self, command: Command) -> Task:
        return load_task(
            self.job.task.source,
            self.job.task.settings,
            base=Path(command.base),
            data=None if command.data is None else Path(command.data),
        )

    def _choose_layout(self) -> RankLayout:
        section = self.job.datacenter
        if section.layout == "auto":
            section, why = auto.chosen(section, self.place.ranks, self.layout.size)
            self.note = f"layout: {why}"
        return RankLayout.of(section, self.place.ranks)

    def _local_data(self) -> Dataset[object]:
        with user_code("local_data()"):
            return self.task.local_data(self._participant())

    def _participant(self) -> Participant:
        return Participant(name=self.place.participant, regime="datacenter")

    def _begin_anew(self) -> None:
        """The state of step 0: the model as the seed makes it."""
        with agreement():
            model = build_model(self.task, self.job.seed)
            difference = Layout.of(model).explain_difference(self.layout)
            if difference is not None:
                raise TaskError(
                    f"the task's model differs between the datacenter and the server: {difference}"
                )
            device = self.place.device
            self.share = parallelize(
                self.task, model, self.ranks, self.place.rank, device, sample=self._sample
            )
        self.passes = Passes(self.task, self.share, self.place.rank, device)
        self.passes.model.train()
        with agreement():
            self.updater = self._make_updater()
        self.at = 0

    def _sample(self) -> Any:
        """Inputs of a few examples, to look at what the model does."""
        order = dataclasses.replace(self.order, ranks=1, batch_size=_SAMPLE)
        feed = Feed(self.data, order, 0, torch.device("cpu"), 0)
        return next(feed.batches(0, 1))[0]

    def _make_updater(self) -> Updater:
        section = self.job.datacenter
        participant = self._participant()
        return Updater(
            self.share,
            lambda parameters: self.task.optimizer(parameters, participant),
            section.clip_norm,
            section.precision == "fp16",
        )

    def _go_to(self, step: int) -> None:
        """Have the state of a step, from memory, from its checkpoint, or from the seed."""
        if self.at == step:
            return
        self.at = None
        if step == 0 and not self.checkpoints.has(0):
            self._begin_anew()
            return
        with agreement():
            self.updater = self._make_updater()
            if not self.checkpoints.has(step):
                raise UserError(
                    f"the datacenter has no checkpoint of step {step} in {self.place.state}; start "
                    "it with the state directory it had before"
                )
        self.checkpoints.restore(step, self.share, self.updater)
        self.at = step

    def _has_buffers(self) -> bool:
        """Whether training may have changed something that no model that comes would replace."""
        found = torch.tensor([len(self.share.buffers())])
        if self.ranks.pipeline > 1:
            dist.all_reduce(found)
        return bool(found)

    def _seed(self, step: int) -> None:
        """Make whatever is drawn from here on depend on the step and the place alone.

        Ranks that share matrices draw alike: what they hold whole must stay the same.
        """
        place = self.here.data + self.ranks.data * self.here.pipeline
        seed = derived_seed(self.job.seed, step, place)
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)

    # -- work -----------------------------------------------------------------------------------

    def _steps(self, first: int, until: int, tell: Tell, wishes: Wishes) -> float | None:
        """Train; the mean loss over all units, or None if there was nothing to do."""
        passes, profile = self.passes, self.profile
        total = torch.zeros((), dtype=torch.float64, device=self.place.device)
        units = 0
        live = None
        if passes.scores and self.here.data == 0:
            examples = self.order.ranks * self.order.batch_size
            live = Live(tell, until - first, examples, self.place.device)
        self.updater.optimizer.zero_grad(set_to_none=True)  # left by a step that was stopped
        stream = profile.reads(self.feed.batches(first, until))
        for step, (inputs, target) in enumerate(stream, start=first):
            if self._flops is None:
                self._flops = self._count_flops(inputs)

            def agree(mine: int, step: int = step) -> int:
                everyones, wish = agree_on_units(mine, wishes(), self.ranks.ranks)
                if wish is Wish.ABORT:
                    raise StoppedError(
                        f"stopped before step {step} because the result is not wanted"
                    )
                return everyones

            with profile.device_time("passes"):
                done = passes.run(inputs, target, self.updater.scale, agree)
            with profile.device_time("optimizer"):
                self.updater.step(done.factor)
            total += done.summed
            units += done.everyones
            if live is not None:
                live.step(total, done.mine, done.everyones)
        self._units = units
        if until == first:
            return None
        return self._checked(total, units, first, until)

    def _count_flops(self, inputs: Any) -> float:
        """Of one step on one rank, where something knows the number or can use it."""
        if self.share.sample_flops:
            # Each rank has its part of what the whole model does with its replica's batch.
            whole = FORWARD_AND_BACKWARD * self.share.sample_flops / _SAMPLE
            return whole * self.order.batch_size / (self.ranks.tensor * self.ranks.pipeline)
        if self.place.device.type != "cuda":
            return 0
        model = self.passes.model
        flops = count_flops(model, lambda: self.task.forward(model, inputs))
        self.share.at_rest()
        return flops

    def _checked(self, total: torch.Tensor, units: int, first: int, until: int) -> float:
        """The mean loss, if it and the parameters are finite: looked at once, after the work."""
        locals_ = [local(parameter) for parameter in self.share.parameters().values()]
        norms = torch._foreach_norm([part for part in locals_ if part.numel()], math.inf)
        largest = torch.stack([norm.double() for norm in norms]).amax() if norms else 0.0 * total
        seen = torch.stack([total * self.passes.scores, largest * 0.0]).cpu()
        if self.place.ranks > 1:
            dist.all_reduce(seen)
        mean = float(seen[0]) / max(units, 1)
        if not math.isfinite(mean) or not math.isfinite(float(seen[1])):
            what = (
                f"loss is not finite ({mean})" if not math.isfinite(mean) else "model is not finite"
            )
            raise AgreedError(
                f"the {what} between steps {first} and {until}; lower the learning rate or check "
                "the data"
            )
        return mean
