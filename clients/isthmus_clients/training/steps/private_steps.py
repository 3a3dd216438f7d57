"""The steps of DP-SGD on a device, in place of those of `local_data` and `step_gradient`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from isthmus.errors import TaskError
from isthmus.job import Job
from isthmus.job.federated import FederatedSection
from isthmus.task import Task
from isthmus.task.scoring import Averages
from isthmus_clients.training.local_data import LocalData
from isthmus_privacy.dp_sgd.device_examples import DeviceExamplesPlan
from isthmus_privacy.dp_sgd.examples import ExampleGroup, SampledExamples
from isthmus_privacy.dp_sgd.gradients import ExampleGradients, add_noise
from isthmus_privacy.dp_sgd.isolation import EXAMPLES, kept_generators
from isthmus_privacy.dp_sgd.refusals import check_layers, check_task, check_trained

TABLE = "federated.privacy"


class PrivateSteps:
    """The examples of each step, and the noisy sum of their clipped gradients.

    Guarantees:
      * one example changes the sum of a step by a 2-norm of at most the clipping bound;
      * every trained parameter gets noise in every step, also if no example was drawn;
      * nothing else of a step that depends on data leaves this class: no loss, no count.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        data: LocalData,
        job: Job,
        device: torch.device,
        *,
        checked: bool = False,
        withheld: bool = False,
    ) -> None:
        """Find the noise, from the number of examples of this device.

        Args:
            task: of the job.
            model: what the device trains, on `device`.
            data: of this device.
            job: with `federated.privacy`.
            device: of the computation.
            checked: whether the model was compared on another device's examples.
            withheld: whether the server is not to know if the job's noise fits.

        Raises:
            TaskError: the task or a layer of the model mixes examples.
            JobError: the numbers do not fit, see `DeviceExamplesPlan.of`.
        """
        check_task(task, data.dataset, TABLE)
        check_layers(model.train(), TABLE)
        self._model = model
        settings = job.federated
        self.plan = plan = DeviceExamplesPlan.of(
            settings, job.rounds, data.examples, whole=withheld
        )
        """The noise of this device."""
        self.watch: Callable[[torch.Tensor], None] | None = None
        """Told of the sum (N, float64) of each step with its noise: an audit of privacy has it."""
        self._deviation = plan.multiplier * plan.privacy.clip
        self._expected = settings.batch_size
        self._device = device
        own = range(data.examples)
        self._sampled = SampledExamples(task, data.dataset, own, plan.probability, device)
        self._sampled.watch(model)
        self._gradients = ExampleGradients(task, model, plan.privacy.clip, settings.batch_size)
        if not checked:
            with kept_generators(device):
                sample = self._sampled.check(range(min(EXAMPLES, data.examples)))
            try:
                self._gradients.check(sample[0])
            except TaskError as error:
                # What the task's own code raises may be about an example, and would be told to the
                # server by declining the run. Training meets it again, where it is not told.
                if error.__cause__ is None:
                    raise

    def steps(
        self, seed: bytes, round_: int, settings: FederatedSection
    ) -> Iterator[list[ExampleGroup]]:
        """The examples of each step of a participation, drawn anew: nothing given repeats them."""
        return self._sampled.batches(0, self.plan.steps)

    def check_trained(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Refuse optimizers that train something besides the model.

        Raises:
            TaskError: one does.
        """
        check_trained(optimizers, self._model.parameters(), TABLE)

    def add(
        self, groups: Sequence[ExampleGroup], averages: Averages, optimizer: str
    ) -> torch.Tensor:
        """Make the noisy mean of a step's gradients those of the parameters.

        The sum is divided by the expected number of examples, whatever was drawn.

        Args:
            groups: the examples; none for a step that has noise only.
            averages: not used.
            optimizer: not used.

        Returns:
            0 in place of the loss, which has no noise.

        Raises:
            TaskError: the task's code failed.
        """
        total = self._gradients.step_sum(groups, self._device)
        add_noise(total, self._deviation)
        if self.watch is not None:
            self.watch(total)
        self._gradients.put(total.div_(self._expected))
        return torch.zeros(())


def check_measured(job: Job, what: str) -> None:
    """Refuse to compute something without noise from examples that the job protects.

    Raises:
        TaskError: it does.
    """
    if job.federated.privacy is not None:
        raise TaskError(
            f"the job protects the examples of devices ({TABLE}), and {what} would get no noise"
        )
