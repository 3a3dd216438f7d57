"""One step of DP-SGD: the sum of all clipped gradients, with noise, over its expected size."""

from __future__ import annotations

import abc
from typing import Any

import torch
import torch.distributed as dist

from isthmus.job.datacenter import DatacenterSection
from isthmus.task import Task
from isthmus.task.scoring import Averages
from isthmus_datacenter.messages import ReadSignal
from isthmus_datacenter.parallel.model_shard import ModelShard
from isthmus_datacenter.training.consensus import start_units_all_reduce
from isthmus_datacenter.training.forward_backward import ForwardBackward, StepResult
from isthmus_privacy.dp_sgd.examples import ExampleGroup
from isthmus_privacy.dp_sgd.gradients import ExampleGradients, add_noise


class PrivateForwardBackward(ForwardBackward, abc.ABC):
    """Computes gradients with differential privacy in place of those of a batch.

    Guarantees:
      * one example changes the sum of a step by a 2-norm of at most the clipping bound;
      * every element of a trained parameter gets noise once in every step, also if no example was
        drawn;
      * nothing else of a step that depends on data leaves this class: neither losses nor counts.
    """

    def __init__(
        self,
        task: Task,
        shard: ModelShard,
        rank: int,
        device: torch.device,
        section: DatacenterSection,
    ) -> None:
        """`section` has `privacy`, with its noise."""
        super().__init__(task, shard, rank, device, section.batch_size)
        privacy = section.privacy
        assert privacy is not None
        assert privacy.noise is not None
        assert shard.all_reduce is None
        self._clip = privacy.clip
        self._deviation = privacy.noise * privacy.clip
        self._expected = section.private_batch

    def run(
        self,
        batch: Any,
        loss_scale: float,
        read_signal: ReadSignal,
        averages: Averages | None = None,
        optimizer: str = "",
    ) -> StepResult:
        """Compute the gradient of one step.

        Args:
            batch: groups of examples that this rank has drawn.
            loss_scale: not used, as the precision is float32.
            read_signal: called once.
            averages: not used.
            optimizer: not used.

        Returns:
            A result without losses, whose units are the expected number of examples.

        Raises:
            TaskError: the task's code failed.
        """
        # Only for the signal: how many examples were drawn is nobody's to know.
        wait = start_units_all_reduce(0.0, read_signal(), self.dims.ranks)
        self._set_gradients(batch)
        _, signal = wait()
        # Divided by the expected number and not by the number drawn, which depends on the data.
        nothing = torch.zeros((), device=self.device)
        return StepResult(nothing, 0.0, float(self._expected), signal, 1 / self._expected)

    def step_flops(self, batch: Any, samples: float) -> float:
        """Not counted."""
        return 0

    @abc.abstractmethod
    def check(self, group: ExampleGroup) -> None:
        """Refuse models in which an example has a share in more than its own gradient.

        Args:
            group: a few examples, the same on all ranks.

        Raises:
            TaskError: the model is one.
        """

    @abc.abstractmethod
    def _set_gradients(self, batch: Any) -> None:
        """Set the parameters' `grad` to the sum of the clipped gradients over all ranks, and noise.

        `batch` has the groups of examples that this rank has drawn.
        """


class PerExampleForwardBackward(PrivateForwardBackward):
    """Computes the gradient of every single example, on ranks with the whole model."""

    def __init__(
        self,
        task: Task,
        shard: ModelShard,
        rank: int,
        device: torch.device,
        section: DatacenterSection,
    ) -> None:
        """See `PrivateForwardBackward`."""
        super().__init__(task, shard, rank, device, section)
        self._adds_noise = rank == 0
        self._gradients = ExampleGradients(task, self.model, self._clip, section.batch_size)

    def check(self, group: ExampleGroup) -> None:
        """See `PrivateForwardBackward`."""
        self._gradients.check(group)

    def _set_gradients(self, batch: Any) -> None:
        total = self._gradients.step_sum(batch, self.device)
        if self._adds_noise:
            add_noise(total, self._deviation)
        if self.dims.ranks > 1:
            dist.all_reduce(total)
        self._gradients.put(total)
