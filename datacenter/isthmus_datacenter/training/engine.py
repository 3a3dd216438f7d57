"""One rank's share of training one run: model, optimizer and data, always at an absolute step.

Shape legend: one *unit* is whatever the task scores (an example, a token); a step's loss is the
mean over the units of all replicas.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.task import Participant, Task, load_task, user_code
from isthmus.task.scoring import build_same_model, count_examples
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_datacenter.checkpointing.checkpoints import Checkpoints, Midway, Within
from isthmus_datacenter.checkpointing.model_file import load_shards, store_shards
from isthmus_datacenter.parallel import auto_layout
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.parallelize import parallelize
from isthmus_datacenter.service.messages import Command, ControlSignal, ReadSignal
from isthmus_datacenter.training.agreement import (
    AgreedError,
    StoppedError,
    agree_on_loss,
    agreement,
)
from isthmus_datacenter.training.data import Feed, Order
from isthmus_datacenter.training.evaluation import Evaluation
from isthmus_datacenter.training.forward_backward import ForwardBackward
from isthmus_datacenter.training.live_progress import Live, SendProgress
from isthmus_datacenter.training.optimizer import Updater
from isthmus_datacenter.training.profile import Profile
from isthmus_datacenter.training.rng import go_on, seed_all, states

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


@dataclasses.dataclass(frozen=True)
class _Begun:
    """Where a round's training begins: at its first step, or where an earlier try got to."""

    step: int
    summed: float
    """Losses so far, of the units scored here."""
    units: int
    """Units so far, of all replicas."""


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
        self.layout = TensorLayout.from_header(command.layout.encode("latin-1"))
        self.frozen = command.frozen
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
        self.note = "; ".join(filter(None, [self.note, *self.share.notes]))

    # -- the commands ---------------------------------------------------------------------------

    def train(
        self, command: Command, send_progress: SendProgress, read_signal: ReadSignal
    ) -> dict[str, object]:
        """Train from one absolute step to another, and save the state there.

        Raises:
            AgreedError: no state to start from, the loss left the finite numbers, stopped.
            TaskError: the task raised on this rank, maybe on this one only.
        """
        profile = self.profile = Profile(self.place.device)
        self._newest_within: Within | None = None
        start = self._start_of(command)
        self._starts = {command.from_step} if start is None else {command.from_step, start}
        origin = self._origin(command, start)
        begun = self._resume(origin, command) or self._start(command, start)
        try:
            loss = self._steps(origin, begun, command, send_progress, read_signal)
        except AgreedError:
            self.checkpoints.finish()  # as all ranks do
            raise
        per_step = self.order.ranks * self.order.batch_size
        steps, made = (command.until_step - at for at in (command.from_step, begun.step))
        figures = profile.figures(made, made * per_step, self._units, self._flops or 0)
        with profile.host("checkpoint"):
            self.checkpoints.begin(command.until_step, self.share, self.updater)
        # Neither of these changes the state, which is being written meanwhile.
        evaluation = {}
        if command.evaluate:
            with profile.host("evaluation"):
                evaluation = self.evaluation.run(self.passes, self.here.data)
        if command.result is not None:
            with profile.host("exchange"):
                store_shards(Path(command.result), self.layout, self.share)
        with profile.host("checkpoint"):
            self.checkpoints.finish()
        if self.place.rank == 0:
            self.checkpoints.keep_only({*self._starts, command.until_step})
        self.at = command.until_step
        self.figures = {**figures, **profile.around()} if made else {}
        return {
            "steps": steps,
            "resumed": begun.step if begun.step > command.from_step else None,
            "noted": self._notes(command, start),
            "examples": steps * per_step,
            "training": {} if loss is None else {"loss": loss},
            "evaluation": evaluation,
            "seconds": profile.seconds,
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

    def _choose_layout(self) -> ParallelDims:
        section = self.job.datacenter
        if section.layout == "auto":
            section, why = auto_layout.chosen(section, self.place.ranks, self.layout.size)
            self.note = f"layout: {why}"
        return ParallelDims.of(section, self.place.ranks)

    def _local_data(self) -> Dataset[object]:
        with user_code("local_data()"):
            return self.task.local_data(self._participant())

    def _participant(self) -> Participant:
        return Participant(name=self.place.participant, regime="datacenter")

    def _begin_anew(self) -> None:
        """The state of step 0: the model as the seed makes it."""
        with agreement():
            model, _ = build_same_model(
                self.task, self.job.seed, self.layout.header, self.frozen, "the datacenter"
            )
            device = self.place.device
            self.share = parallelize(
                self.task, model, self.ranks, self.place.rank, device, sample=self._sample
            )
        self.passes = ForwardBackward(
            self.task, self.share, self.place.rank, device, self.order.batch_size
        )
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
        return Updater(
            self.share,
            lambda parameters: self.task.optimizer(parameters, self._participant()),
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

    # -- work -----------------------------------------------------------------------------------

    def _start_of(self, command: Command) -> int | None:
        """The step whose state a round starts from; None: that of a new run.

        Where a model comes, the rest of the state may be older, or new: this datacenter was away
        meanwhile, or was never here.
        """
        first = command.from_step
        if command.model is None or first == 0 or self.checkpoints.has(first):
            return first
        return self.checkpoints.newest(first)

    def _origin(self, command: Command, start: int | None) -> str | None:
        """A name for all that the states within a round follow from; None where nobody knows."""
        if command.model is not None and not command.model_digest:
            return None
        before = "nothing" if start is None else self.checkpoints.origin(start)
        mesh = f"{self.ranks.data} {self.ranks.pipeline}"
        text = f"{before} {command.model_digest} {mesh} {self.job.model_dump_json()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _start(self, command: Command, start: int | None) -> _Begun:
        """The state before the round's first step."""
        if command.model is None or not self._resets or self.share.has_buffers():
            if start is None:
                self._begin_anew()
            else:
                self._go_to(start)
        self.at = None
        if command.model is not None:
            with self.profile.host("exchange"):
                load_shards(Path(command.model), self.layout, self.share)
            if self._resets:
                self.updater = self._make_updater()
        # Ranks that share matrices draw alike: what they hold whole must stay the same.
        place = self.here.data + self.ranks.data * self.here.pipeline
        seed_all(self.job.seed, command.from_step, place)
        return _Begun(command.from_step, 0.0, 0)

    @property
    def _resets(self) -> bool:
        return self.job.datacenter.optimizer_on_load == "reset"

    def _notes(self, command: Command, start: int | None) -> list[str]:
        """What a person may want to know of where a round started from."""
        if command.model is None or self._resets or start == command.from_step:
            return []
        kept = "a new one" if start is None else f"that of step {start}"
        return [f"the optimizer kept at step {command.from_step} is {kept}: it was not here"]

    def _resume(self, origin: str | None, command: Command) -> _Begun | None:
        """The furthest state within this round that an earlier try left, if one did."""
        if origin is None or command.until_step == command.from_step:
            return None
        at = self.checkpoints.newest_within(origin, command.until_step)
        if at is None:
            return None
        self.at = None
        self._newest_within = at
        with agreement():
            self.updater = self._make_updater()
        midway = self.checkpoints.restore_within(at, self.share, self.updater, self._place())
        go_on(midway.drawn, self.place.device)
        return _Begun(at.step, midway.summed, midway.units)

    def _place(self) -> str:
        return f"{self.here.data}.{self.here.pipeline}"

    def _steps(
        self,
        origin: str | None,
        begun: _Begun,
        command: Command,
        send_progress: SendProgress,
        read_signal: ReadSignal,
    ) -> float | None:
        """Train; the mean loss over all units, or None if there was nothing to do."""
        passes, profile, device = self.passes, self.profile, self.place.device
        first, until = command.from_step, command.until_step
        total = torch.tensor(begun.summed, dtype=torch.float64, device=device)
        units = begun.units
        live = None
        if passes.scores and self.here.data == 0:
            examples = self.order.ranks * self.order.batch_size
            done_before, summed = begun.step - first, begun.summed
            live = Live(
                send_progress, until - first, examples, device, done=done_before, summed=summed
            )
        self.updater.optimizer.zero_grad(set_to_none=True)  # left by a step that was stopped
        profile.begin()
        stream = profile.reads(self.feed.batches(begun.step, until))
        for step, (inputs, target) in enumerate(stream, start=begun.step):
            if self._flops is None:
                self._flops = passes.step_flops(inputs, self.order.batch_size / _SAMPLE)

            with profile.device_time("passes"):
                done = passes.run(inputs, target, self.updater.scale, read_signal)
            if done.signal is ControlSignal.CANCEL:
                raise StoppedError(f"stopped before step {step} because the result is not wanted")
            with profile.device_time("optimizer"):
                self.updater.step(done.factor)
            total += done.summed
            units += done.everyones
            if live is not None:
                live.step(total, done.mine, done.everyones)
            if origin is not None and step + 1 < until:
                self._save_within(Within(origin, step + 1), command, total, units, done.signal)
        self._units = units - begun.units
        loss = None
        if until > first:
            loss = agree_on_loss(
                total * passes.scores, units, self.share.parameters().values(), (first, until)
            )
        profile.end()
        return loss

    def _save_within(
        self, at: Within, command: Command, total: torch.Tensor, units: int, signal: ControlSignal
    ) -> None:
        """Save the state within a round, where the job or somebody outside wants it.

        Raises:
            StoppedError: it is saved, and that was the last step.
        """
        every = self.job.datacenter.checkpoint_steps
        if signal is not ControlSignal.SAVE and (every == 0 or at.step % every):
            return
        midway = Midway(
            place=self._place(),
            speaks=self.here.tensor == 0,
            drawn=states(self.place.device),
            summed=float(total),
            units=units,
        )
        with self.profile.host("checkpoint"):
            self.checkpoints.begin_within(at, self.share, self.updater, midway)
            if self.place.rank == 0:  # the one before is whole by now
                self.checkpoints.keep_only(self._starts, self._newest_within)
        self._newest_within = at
        if signal is ControlSignal.SAVE:
            self.checkpoints.finish()
            raise StoppedError(
                f"stopped after step {at.step} of {command.from_step} to {command.until_step}, "
                "which is saved: the machines are about to be taken away"
            )
