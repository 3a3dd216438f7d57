"""Compute the gradients of many devices' stacked models in one pass of `torch.vmap`.

Shape legend: K = devices of the batch, S = steps, B = examples of a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import Dataset

from isthmus.errors import JobError, TaskError
from isthmus.job import Job
from isthmus.job.federated import FederatedSection
from isthmus.job.learning_rate import RoundPosition
from isthmus.task import Participant, Task, user_code
from isthmus.task.definition import Parameters, defines
from isthmus.task.made_optimizers import SEVERAL
from isthmus.task.optimizers import ScheduleState, TaskOptimizers, job_schedule
from isthmus.task.scoring import batches, losses
from isthmus_clients.training.local_run import CPU, DeviceRun
from isthmus_clients.virtual.recorded_step import descent, simplified, step_bytes

Recorded = Callable[..., Sequence[torch.Tensor]]
"""A recorded computation."""

Stacked = dict[str, torch.Tensor]
"""Parameters by name, each (K, *shape)."""


class Gradients:
    """Gradients of all devices' losses; the computation is recorded once for each input shape."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._scored = _Scored(task, model)
        self._recorded: dict[tuple[object, ...], tuple[Recorded, Recorded]] = {}
        """The gradients, and the change of the parameters by them."""
        self.sizes: set[int] = set()
        """Numbers of devices for which the computation is recorded."""
        self.bytes_per_device = 0
        """Of the tensors that exist at the same time in a step; 0 if it is not recorded yet."""

    def __call__(
        self, stacked: Stacked, inputs: torch.Tensor, target: torch.Tensor, weights: torch.Tensor
    ) -> tuple[Stacked, torch.Tensor]:
        """Gradients (K, *shape) of each device's weighted loss, and the loss of each example.

        `inputs` and `target` are (K, B, ...), `weights` and the losses (K, B).
        """
        *gradients, examples = self._run(0, stacked, (inputs, target, weights), ())
        return dict(zip(stacked, gradients, strict=True)), examples

    def descend(
        self,
        stacked: Stacked,
        inputs: torch.Tensor,
        target: torch.Tensor,
        weights: torch.Tensor,
        rates: Sequence[float],
    ) -> torch.Tensor:
        """Subtract rate x gradient from each parameter, in place; returns the losses.

        `rates` are those of the parameters; for the others see `__call__`.
        """
        (examples,) = self._run(1, stacked, (inputs, target, weights), [-rate for rate in rates])
        return examples

    def _run(
        self,
        number: int,
        stacked: Stacked,
        batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rates: Sequence[float],
    ) -> Sequence[torch.Tensor]:
        arguments = (*(part.detach() for part in stacked.values()), *batch)
        key = tuple((each.shape, each.dtype) for each in batch[:2])
        with user_code("the loss of many devices at once (torch.vmap)"):
            if key not in self._recorded:
                self._recorded[key] = self._record(list(stacked), arguments)
            with torch.no_grad():
                results: Sequence[torch.Tensor] = self._recorded[key][number](*arguments, *rates)
                return results

    def _record(
        self, names: Sequence[str], arguments: Sequence[torch.Tensor]
    ) -> tuple[Recorded, Recorded]:
        count = len(names)

        def step(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
            parameters = dict(zip(names, arguments[:count], strict=True))
            gradients, examples = self._all(parameters, *arguments[count:])
            return *(gradients[name] for name in names), examples

        with warnings.catch_warnings():
            # Whether an operation without a batching rule is slower is measured.
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            gradients = simplified(make_fx(step)(*arguments))
        devices = len(arguments[-1])
        self.sizes.add(devices)
        self.bytes_per_device = max(self.bytes_per_device, -(-step_bytes(gradients) // devices))
        return gradients, descent(gradients, count)

    def _all(
        self, parameters: Stacked, inputs: torch.Tensor, target: torch.Tensor, weights: torch.Tensor
    ) -> tuple[Stacked, torch.Tensor]:
        """Differentiate the sum over devices: each device's gradient is in its own rows."""

        def loss(parameters: Stacked) -> tuple[torch.Tensor, torch.Tensor]:
            examples = torch.vmap(self._losses, randomness="different")(parameters, inputs, target)
            return (examples * weights).sum(), examples

        gradients, examples = torch.func.grad(loss, has_aux=True)(parameters)
        # Fused optimizers require gradients with the strides of their parameters.
        return {name: part.contiguous() for name, part in gradients.items()}, examples

    def _losses(
        self, parameters: Stacked, inputs: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        own = {f"model.{name}": part for name, part in parameters.items()}
        scored: torch.Tensor = torch.func.functional_call(self._scored, own, (inputs, target))
        return scored


_WHOLE_MATRIX = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam)
"""Optimizers that are not element-wise and would mix the stacked models of all devices."""


def check_run(run: DeviceRun) -> None:
    """Refuse a task and a division of its model that stacked models cannot have.

    Raises:
        TaskError: there is a loss of a batch as a whole, a personal parameter, a matrix that is
            changed by factors, a running statistic, or an endless data set.
    """
    if run.personal.size:
        raise TaskError(
            f"stacked models cannot keep {run.personal.entries[0].name!r} apart; remove "
            "exchange.personal and exchange.buffers = 'local', or train one by one"
        )
    if run.job.exchange.low_rank is not None:
        raise TaskError(
            "stacked models train whole matrices, and exchange.low_rank has factors, of a rank of "
            "each device; remove it, or train one by one"
        )
    if statistics := run.layout.statistics:
        raise TaskError(
            f"stacked models cannot keep running statistics ({statistics[0]!r}); "
            "set exchange.buffers = 'frozen', use GroupNorm, or train one by one"
        )
    if defines(run.task, "training_step"):
        raise TaskError(
            "stacked models compute the losses of all examples together, and training_step() is "
            "the loss of one device's batch; train one by one"
        )
    if run.data.is_stream:
        raise TaskError(
            "stacked models are trained on data sets with a length, and local_data() is an "
            "iterable one; train one by one"
        )


def check_settings(settings: FederatedSection) -> None:
    """Refuse settings of a device's training that stacked models cannot have.

    Raises:
        JobError: there is one.
    """
    if settings.privacy is not None:
        raise JobError(
            "stacked models train on batches, and federated.privacy bounds the gradient of each "
            "example of each device; train one by one"
        )
    if settings.compression is not None and settings.compression.step_ahead:
        raise JobError(
            "stacked models begin at one model, and with federated.compression each device begins "
            "at its own, in which everything is that it has not sent; set its key step_ahead = "
            "false, or train one by one"
        )
    if settings.precision != "fp32" or settings.compile:
        raise JobError(
            "stacked models train together in float32, without federated.precision and "
            "federated.compile; remove these, or train one by one"
        )


def clip_each(stacked: Stacked, clip_norm: float | None) -> None:
    """Scale each device's gradient down to a 2-norm; see `torch.nn.utils.clip_grad_norm_`."""
    gradients = [part.grad for part in stacked.values() if part.grad is not None]
    if clip_norm is None or not gradients:
        return
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors = (clip_norm / (norms + 1e-6)).clamp(max=1.0)  # (K)
    for gradient in gradients:
        gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))


def stacked_optimizers(
    run: tuple[Task, Job],
    stacked: Stacked,
    indices: Sequence[Sequence[list[int]]],
    participant: Participant,
    position: RoundPosition,
    earlier: Mapping[str, ScheduleState],
) -> TaskOptimizers:
    """The task's optimizers over all devices' parameters at once, with the round's first rates.

    Args:
        run: the task and the job.
        stacked: the parameters.
        indices: the examples of each step of each device.
        participant: the first device, which stands for all.
        position: of the round.
        earlier: the schedules of the round before.

    Raises:
        TaskError: an optimizer is not element-wise, or the devices are at different positions.
    """
    task, job = run
    parameters = [part.requires_grad_() for part in stacked.values()]
    with user_code("optimizer()"):
        made = task.optimizer(Parameters(stacked.items()), participant)  # type: ignore[arg-type]  # plain tensors: each stacks all devices'
    if isinstance(made, Mapping):
        raise TaskError(SEVERAL)
    schedule = job_schedule(job, position.cohort * job.federated.batch_size)
    optimizers = TaskOptimizers(made, parameters, schedule, earlier)
    _check_elementwise(optimizers.named.values())
    optimizers.check_round(position)
    if optimizers.needs_position and len(set(map(len, indices))) > 1:
        raise TaskError(
            "stacked models are trained together, and with a schedule of the learning rate all "
            "need the same number of steps; set federated.local_steps, or train one by one"
        )
    optimizers.go_to(position.start)
    return optimizers


def _check_elementwise(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, _WHOLE_MATRIX) or name == "Muon":
            raise TaskError(
                f"stacked models cannot use {name}: it is not element-wise; "
                "choose another optimizer, or train one by one"
            )


def plain_descent(optimizers: TaskOptimizers, stacked: Stacked) -> list[Mapping[str, float]] | None:
    """The group of each parameter, whose `lr` is its rate; None for all but SGD without options."""
    groups: dict[int, Mapping[str, float]] = {}
    for optimizer in optimizers.named.values():
        step = vars(optimizer).get("step")
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if type(optimizer) is not torch.optim.SGD or hooks:
            return None
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
            return None  # the task has replaced it
        for group in optimizer.param_groups:
            used = [group[name] for name in ("momentum", "weight_decay", "maximize")]
            if any(used) or isinstance(group["lr"], torch.Tensor):
                return None
            groups |= {id(parameter): group for parameter in group["params"]}
    if len(groups) < len(stacked):
        return None
    return [groups[id(part)] for part in stacked.values()]


def mean_gradients(
    gradients: Gradients,
    stacked: Stacked,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    present: torch.Tensor,
    passes: Sequence[int],
) -> Stacked:
    """Mean gradient (K, *shape) of each device at its parameters, over its first steps.

    Args:
        gradients: computes the gradients of one step.
        stacked: the parameters.
        inputs: see `stacked_batches`.
        targets: likewise.
        present: likewise.
        passes: number of steps for each of the K devices.
    """
    counted = present * (torch.arange(len(present))[:, None] < torch.tensor(passes)).unsqueeze(2)
    weights = counted / counted.sum((0, 2)).clamp(min=1.0)[:, None]
    means = {name: torch.zeros_like(part) for name, part in stacked.items()}
    with torch.random.fork_rng(devices=[]):
        for step in range(max(passes)):
            of_step, _ = gradients(stacked, inputs[step], targets[step], weights[step])
            for name, gradient in of_step.items():
                means[name].add_(gradient)
    return means


class _Scored(nn.Module):
    """Task and model as one module: maps examples to the mean loss (B) of each one's units."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model.train()

    def forward(self, inputs: Any, target: Any) -> torch.Tensor:
        _, values = losses(self.task, self.model, inputs, target)
        if values.weights is not None:
            raise TaskError(
                "stacked models train together, without masks of scored units; train one by one"
            )
        return values.values.reshape(len(inputs), -1).mean(1)


def stacked_batches(
    task: Task,
    datasets: Sequence[Dataset[Any]],
    indices: Sequence[Sequence[list[int]]],
    steps_max: int,
    batch_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs and targets (S, K, B, ...), and which examples are real (S, K, B).

    A device with fewer steps or a short last batch is padded with its first example.
    """
    inputs, targets = [], []
    lengths = torch.zeros(steps_max, len(datasets), 1)
    for k, (dataset, steps) in enumerate(zip(datasets, indices, strict=True)):
        flat = []
        for step in steps:
            flat += step + [0] * (batch_size - len(step))
        lengths[: len(steps), k, 0] = torch.tensor([float(len(step)) for step in steps])
        flat += [0] * (batch_size * steps_max - len(flat))
        x, y = next(batches(task, dataset, flat, len(flat), CPU))
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            raise TaskError(
                "stacked models need examples of two tensors (input, target), not "
                f"{type(x).__name__} and {type(y).__name__}"
            )
        inputs.append(x.reshape(steps_max, batch_size, *x.shape[1:]))
        targets.append(y.reshape(steps_max, batch_size, *y.shape[1:]))
    present = torch.arange(batch_size) < lengths
    return torch.stack(inputs, 1), torch.stack(targets, 1), present.float()
