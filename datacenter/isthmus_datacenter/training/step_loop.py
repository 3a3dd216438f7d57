"""The order of a step, on each rank and in a simulated datacenter.

Shape legend: one *unit* is what the task scores (an example, a token); a step's loss is the
mean over the units of all replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from isthmus.errors import TaskError
from isthmus.task.scoring import Averages
from isthmus.tensors.fingerprint import changed_frozen, newly_frozen, same_values
from isthmus_datacenter.messages import ControlSignal, ReadSignal, RecordedStep
from isthmus_datacenter.parallel.optimizer import ShardedOptimizer
from isthmus_datacenter.training.consensus import StoppedError, finite_mean_loss
from isthmus_datacenter.training.forward_backward import ForwardBackward
from isthmus_datacenter.training.profile import RoundProfile
from isthmus_datacenter.training.step_figures import StepRecorder


@dataclasses.dataclass(frozen=True)
class StartPoint:
    """Where training begins: at the round's first step, or where an earlier attempt stopped."""

    step: int
    loss_sum: float = 0.0
    """Losses of the round so far, of the units scored on this rank."""
    units: float = 0.0
    """Units of the round so far, of all replicas."""
    parts: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """Sums and weights of the named parts of the losses so far, of this rank."""
    step_figures: Sequence[RecordedStep] = ()
    """Figures of the steps of the round so far."""


@dataclasses.dataclass(frozen=True)
class TakenStep:
    """A step that was taken."""

    step: int
    """Number of the step in the run, from 0."""
    local_units: float
    """Units that were scored on this rank."""
    global_units: float
    """Units of all replicas."""
    signal: ControlSignal
    """The strongest signal of all ranks, which they read within the step."""


class StepLoop:
    """Takes the steps of one round, and counts their losses."""

    def __init__(
        self,
        forward_backward: ForwardBackward,
        optimizer: ShardedOptimizer,
        statistics: Sequence[str],
        profile: RoundProfile,
        start: StartPoint,
        recorder: StepRecorder | None = None,
    ) -> None:
        """Begin at a step, with what was counted of the round before it.

        Args:
            forward_backward: computes gradients.
            optimizer: applies them.
            statistics: names of the running statistics of the exchange set.
            profile: gets the times of the parts of a step.
            start: the first step.
            recorder: gets figures of some steps; None if nobody wants them.
        """
        self.loss_sum = torch.tensor(
            start.loss_sum, dtype=torch.float64, device=forward_backward.device
        )
        """Losses of the round so far, of the units scored on this rank, a scalar."""
        self.units = start.units
        """Units of the round so far, of all replicas."""
        self.parts = Averages()
        """The named parts of losses of batches as a whole, of this rank."""
        for name, (part, weight) in start.parts.items():
            self.parts.add_sum(name, torch.tensor(part, dtype=torch.float64), weight)
        self._forward_backward = forward_backward
        self._shard = forward_backward.shard
        self._optimizer = optimizer
        self._statistics = statistics
        self._profile = profile
        self._first = start.step
        self._recorder = recorder
        self._frozen = self._shard.frozen_samples()
        optimizer.zero_grad()  # of a step that was stopped

    def take(
        self, batches: Iterable[Any], position: int, read_signal: ReadSignal
    ) -> Iterator[TakenStep]:
        """Take a step for each batch; after each, the caller may use the state.

        Args:
            batches: of this rank's replica.
            position: of the first step in the schedules of the run.
            read_signal: returns the control signal that this rank has received.

        Raises:
            StoppedError: the result is not wanted.
            TaskError: the task raised on this rank, maybe on this one only.
        """
        optimizer = self._optimizer
        for index, batch in enumerate(batches):
            step = self._first + index
            # Ranks agree on the strongest signal within the step, since all have to stop after the
            # same one.
            signal = ControlSignal.CONTINUE
            local_units = 0.0
            global_units = 0.0
            recorder = self._recorder
            due = recorder is not None and recorder.is_due(step)
            loss_sum = torch.zeros_like(self.loss_sum)
            norms: list[torch.Tensor] = []
            for name in optimizer.names:
                with optimizer.alone(name):
                    with self._profile.device_time("forward_backward"):
                        result = self._forward_backward.run(
                            batch, optimizer.loss_scale, read_signal, self.parts, name
                        )
                    if result.signal is ControlSignal.CANCEL:
                        raise StoppedError(
                            f"stopped before step {step} because the result is not wanted"
                        )
                    if result.signal is ControlSignal.SAVE:
                        signal = result.signal
                    with self._profile.device_time("optimizer"):
                        # Before it: a schedule's rate is that of the step it is used in.
                        optimizer.go_to(position + index)
                        # Reduces, scales and clips the gradients, applies and deletes them.
                        norm = optimizer.step(result.gradient_factor, name, measures_norm=due)
                        if norm is not None:
                            norms.append(norm)
                        self._shard.average_statistics(self._statistics)
                self.loss_sum += result.loss_sum
                if due:
                    loss_sum += result.loss_sum
                local_units += result.local_units
                global_units += result.global_units
            self.units += global_units
            if recorder is not None:
                recorder.count(global_units)
                if due:
                    recorder.record(step, loss_sum, global_units, norms, optimizer.learning_rate)
            yield TakenStep(step, local_units, global_units, signal)

    def finish(self, first: int, until: int) -> float | None:
        """Check the model after the last step.

        Args:
            first: the first step of the round.
            until: the step after the last.

        Returns:
            The mean loss of the round; None without steps.

        Raises:
            ConsensusError: a loss or a parameter is not finite, on some rank.
            TaskError: training has changed what is frozen, or the parameters of the model.
        """
        shard = self._shard
        shard.check_structure()
        # Only a sample of each: comparing all would cost a copy of the model. What training
        # changes, such as weight decay, changes all elements.
        for name, values in shard.frozen_samples().items():
            if name not in self._frozen:
                raise TaskError(newly_frozen(name))
            if not same_values(values, self._frozen[name]):
                raise TaskError(changed_frozen(name))
        if until == first:
            return None
        return finite_mean_loss(
            self.loss_sum * self._forward_backward.counts_losses,
            self.units,
            shard.parameters().values(),
            (first, until),
            self._forward_backward.dims.ranks,
        )
