"""Compute the gradients of many devices' stacked models in one pass of `torch.vmap`.

Shape legend: K = devices of the batch, S = steps, B = examples of a step.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from isthmus.errors import TaskError
from isthmus.task import Task, user_code
from isthmus.task.scoring import batches, losses
from isthmus_clients.training.local_run import CPU
from isthmus_simulation.devices.stacks.captured_step import captured
from isthmus_simulation.devices.stacks.channels import record_by_channels
from isthmus_simulation.devices.stacks.grouped_convolution import use_products
from isthmus_simulation.devices.stacks.randomness import Predictable, no_other_generators
from isthmus_simulation.devices.stacks.recorded_step import (
    descent,
    is_random,
    simplified,
    step_bytes,
    trace,
)
from isthmus_simulation.devices.stacks.scripted_step import Step, scripted

Stacked = dict[str, torch.Tensor]
"""Parameters by name, each (K, *shape)."""

_MAX_GRADIENT_ERROR_RECORDED = 0.001
"""Largest difference of a recorded step's gradient from that of a single model, relative to it;
with a larger one the step is recorded again. Rounding is far below."""

_MAX_GRADIENT_ERROR_CHANNELS = 0.0001
"""Largest such difference with convolutions that have the models as channels; with a larger one
they are recorded with PyTorch's rules."""

_MAX_GRADIENT_ERROR_STACKED = 0.01
"""Largest such difference with which models can be stacked."""

_ROUNDING = 1e-6
"""Difference, as a part of the parameters, that counts as none: of a gradient near zero."""


class _Repeated:
    """A recorded step that is made faster when it is needed.

    Scripts stay in memory to the end, so that a step that is recorded again in each round has none.
    """

    def __init__(self, recorded: torch.fx.GraphModule, *, is_renewed: bool) -> None:
        self._recorded: torch.fx.GraphModule | None = recorded
        self._compute: Step = recorded
        self._is_renewed = is_renewed

    def __call__(self, *arguments: torch.Tensor | float) -> Sequence[torch.Tensor]:
        if self._recorded is not None:
            recorded = self._recorded
            self._recorded = None
            tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
            if not tensors[0].is_cuda and not self._is_renewed:
                self._compute = scripted(recorded, arguments)
            if tensors[0].is_cuda and not is_random(recorded):
                self._compute = captured(recorded, tensors)
        return self._compute(*arguments)


class _Recorded(NamedTuple):
    """A step for one shape of its inputs: computations of tensors, the first of them parameters."""

    gradients: _Repeated
    descent: _Repeated
    """Changes the parameters by the gradients."""


class Gradients:
    """Gradients of all devices' losses; the computation is recorded once for each input shape.

    Numbers of Python, and tensors other than parameters, inputs and targets, are constants of what
    is recorded. So `check` compares it with the model itself in every round.
    """

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._scored = _Scored(task, model)
        self._recorded: dict[tuple[object, ...], _Recorded] = {}
        self._is_renewed = False
        """Whether any step had to be recorded again."""
        self._by_channels = next(model.parameters()).device.type == "cpu"
        """Whether steps are recorded by `record_by_channels`."""
        self._round = 0
        self._checked: set[tuple[object, str]] = set()
        """Shapes of inputs, and kinds of batches, whose computation was checked in the round."""
        self.unused: set[str] = set()
        """Parameters that had no gradient when a model was checked; optimizers skip these."""
        self.bytes_per_device = 0
        """Bytes of the tensors that exist at once in a step; 0 if it is not recorded yet."""
        self.are_random = False
        """Whether the computation draws random numbers."""

    def __call__(
        self, stacked: Stacked, inputs: torch.Tensor, target: torch.Tensor, weights: torch.Tensor
    ) -> tuple[Stacked, torch.Tensor]:
        """Gradients (K, *shape) of each device's weighted loss, and the loss of each example.

        `inputs` and `target` are (K, B, ...), `weights` and the losses (K, B).
        """
        *gradients, examples = self._run("gradients", stacked, (inputs, target, weights), ())
        # Losses in the memory of a graph of kernels are overwritten by the next step.
        return dict(zip(stacked, gradients, strict=True)), examples.clone()

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
        minus = [-float(rate) for rate in rates]  # of the type that a script expects
        if inputs.is_cuda:  # where numbers would be constants of the graph
            gradients, examples = self(stacked, inputs, target, weights)
            with torch.no_grad():
                for (name, part), rate in zip(stacked.items(), minus, strict=True):
                    part.add_(gradients[name], alpha=rate)
            return examples
        (examples,) = self._run("descent", stacked, (inputs, target, weights), minus)
        return examples

    def check(
        self,
        round_: int,
        stacked: Stacked,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Record a step again if the gradient of a device is not that of the model itself.

        Of a whole batch, and of a short one, where examples would see those that fill it up.

        Args:
            round_: number of the round; there is one check of each input shape in a round.
            stacked: parameters, all of them those that the model has.
            inputs: of all steps, see `stacked_batches`.
            targets: likewise.
            weights: of the examples (S, K, B); those that fill up a batch have 0.

        Raises:
            TaskError: the gradient of a step that was recorded now differs, too, or losses differ
                when they are computed again.
        """
        if round_ != self._round:
            self._round = round_
            self._checked = set()
        key = _key(inputs[0], targets[0])
        if {(key, "whole"), (key, "short")} <= self._checked:
            return
        counts = (weights > 0).sum(2)
        size = weights.shape[2]
        for kind, found in (("whole", counts == size), ("short", (counts > 0) & (counts < size))):
            if (key, kind) in self._checked:
                continue
            for k in found.any(0).nonzero().flatten().tolist():
                step = int(found[:, k].int().argmax())
                if self._check_device(key, k, stacked, inputs[step], targets[step], weights[step]):
                    self._checked.add((key, kind))
                    break

    def _check_device(
        self, key: tuple[object, ...], k: int, stacked: Stacked, *batch: torch.Tensor
    ) -> bool:
        """See `check`; False if the device's gradient is not finite, which says nothing."""
        was_recorded = key in self._recorded
        difference = self._difference(k, stacked, *batch)
        if (
            difference is not None
            and not difference <= _MAX_GRADIENT_ERROR_RECORDED
            and was_recorded
        ):
            del self._recorded[key]
            self._is_renewed = True
            difference = self._difference(k, stacked, *batch)
        if (
            difference is not None
            and self._by_channels
            and not difference <= _MAX_GRADIENT_ERROR_CHANNELS
        ):
            self._recorded = {}
            self._by_channels = False
            difference = self._difference(k, stacked, *batch)
        if difference is not None and not difference <= _MAX_GRADIENT_ERROR_STACKED:  # nan, too
            raise TaskError(
                f"the gradient of stacked models differs by {difference:.1%} from that of a single "
                "one; train one by one"
            )
        return difference is not None

    def _difference(
        self,
        k: int,
        stacked: Stacked,
        inputs: torch.Tensor,
        target: torch.Tensor,
        weights: torch.Tensor,
    ) -> float | None:
        """The length of the difference of a device's gradients, as a part of them."""
        self._prepare(stacked, (inputs, target, weights))
        predictable = Predictable() if self.are_random else contextlib.nullcontext()
        is_present = weights[k] > 0
        model = self._scored.model.train()
        own_inputs = inputs[k][is_present]
        own_target = target[k][is_present]
        named = dict(model.named_parameters())
        parameters = [named[name] for name in stacked]
        device = inputs.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), predictable:
            found, _ = self(stacked, inputs, target, weights)
            with user_code("loss()"), torch.enable_grad():
                examples = self._scored(own_inputs, own_target)
                loss = (examples * weights[k][is_present]).sum()
                alone = torch.autograd.grad(loss, parameters, allow_unused=True)
            with user_code("loss()"), torch.no_grad():
                again = self._scored(own_inputs, own_target)
        if not torch.allclose(examples, again, rtol=1e-5, atol=1e-7, equal_nan=True):
            raise TaskError(
                "stacked models repeat a recorded step, and forward() or loss() computes another "
                "loss when it is called again; train one by one"
            )
        self.unused = {name for name, each in zip(stacked, alone, strict=True) if each is None}
        error = length = size = 0.0
        for name, parameter, gradient in zip(stacked, parameters, alone, strict=True):
            expected = torch.zeros_like(parameter) if gradient is None else gradient
            error += float((found[name][k] - expected).square().sum())
            length += float(expected.square().sum())
            size += float(parameter.detach().square().sum())
        if not math.isfinite(length):
            return None
        return 0.0 if error <= _ROUNDING**2 * size else math.sqrt(error / max(length, 1e-60))

    def _prepare(
        self, stacked: Stacked, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The arguments of a step, which is recorded for their shapes."""
        arguments = (*(part.detach() for part in stacked.values()), *batch)
        key = _key(*batch[:2])
        if key not in self._recorded:
            with user_code("the loss of many devices at once (torch.vmap)"):
                self._recorded[key] = self._record(list(stacked), arguments)
        return arguments

    def _run(
        self,
        what: Literal["gradients", "descent"],
        stacked: Stacked,
        batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rates: Sequence[float],
    ) -> Sequence[torch.Tensor]:
        arguments = self._prepare(stacked, batch)
        compute: _Repeated = getattr(self._recorded[_key(*batch[:2])], what)
        with user_code("the loss of many devices at once (torch.vmap)"), torch.no_grad():
            return compute(*arguments, *rates)

    def _record(self, names: Sequence[str], arguments: Sequence[torch.Tensor]) -> _Recorded:
        count = len(names)

        def step(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
            parameters = dict(zip(names, arguments[:count], strict=True))
            gradients, examples = self._all(parameters, *arguments[count:])
            return *(gradients[name] for name in names), examples

        self._scored.model.train()
        with warnings.catch_warnings(), no_other_generators(), torch.random.fork_rng(devices=[]):
            # Whether an operation without a batching rule is slower is measured.
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            if self._by_channels:
                recorded, self._by_channels = record_by_channels(step, arguments)
            else:
                recorded = trace(step, arguments)
            gradients = simplified(recorded)
        use_products(gradients)
        self.are_random |= is_random(gradients)
        devices = len(arguments[-1])
        self.bytes_per_device = max(self.bytes_per_device, -(-step_bytes(gradients) // devices))
        return _Recorded(
            *(
                _Repeated(each, is_renewed=self._is_renewed)
                for each in (gradients, descent(gradients, count))
            )
        )

    def _all(
        self, parameters: Stacked, inputs: torch.Tensor, target: torch.Tensor, weights: torch.Tensor
    ) -> tuple[Stacked, torch.Tensor]:
        """Gradients of each device's weighted loss, and the losses of its examples."""

        def loss(
            parameters: Stacked, inputs: torch.Tensor, target: torch.Tensor, weights: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            examples = self._losses(parameters, inputs, target)
            return (examples * weights).sum(), examples

        each = torch.vmap(torch.func.grad(loss, has_aux=True), randomness="different")
        gradients, examples = each(parameters, inputs, target, weights)
        # Fused optimizers require gradients with the strides of their parameters.
        return {name: part.contiguous() for name, part in gradients.items()}, examples

    def _losses(
        self, parameters: Stacked, inputs: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        own = {f"model.{name}": part for name, part in parameters.items()}
        scored: torch.Tensor = torch.func.functional_call(self._scored, own, (inputs, target))
        return scored


def _key(inputs: torch.Tensor, target: torch.Tensor) -> tuple[object, ...]:
    return inputs.shape, inputs.dtype, target.shape, target.dtype


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
    is_first = torch.arange(len(present))[:, None] < torch.tensor(passes)
    counted = present * is_first.to(present.device).unsqueeze(2)
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
        self.model = model

    def forward(self, inputs: Any, target: Any) -> torch.Tensor:
        _, values = losses(self.task, self.model, inputs, target)
        if values.weights is not None:
            raise TaskError(
                "stacked models train together, without masks of scored units; train one by one"
            )
        if len(values.values) != len(inputs):
            raise TaskError(
                f"stacked models need a loss for each of the {len(inputs)} examples of a batch, "
                f"and the first dimension of loss() has {len(values.values)}; train one by one"
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

    A device with fewer steps or a short last batch is padded with the example that it uses first.
    """
    inputs = []
    targets = []
    lengths = torch.zeros(steps_max, len(datasets), 1)
    for k, (dataset, steps) in enumerate(zip(datasets, indices, strict=True)):
        flat: list[int] = []
        filler = steps[0][:1] if steps else [0]
        for step in steps:
            flat += step + filler * (batch_size - len(step))
        lengths[: len(steps), k, 0] = torch.tensor([float(len(step)) for step in steps])
        flat += filler * (batch_size * steps_max - len(flat))
        x, y = next(batches(task, dataset, flat, len(flat), CPU))
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            raise TaskError(
                "stacked models need examples of two tensors (input, target), not "
                f"{type(x).__name__} and {type(y).__name__}"
            )
        inputs.append(x.reshape(steps_max, batch_size, *x.shape[1:]))
        targets.append(y.reshape(steps_max, batch_size, *y.shape[1:]))
    present = torch.arange(batch_size) < lengths
    for parts in (inputs, targets):
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise TaskError(
                "stacked models need examples of one shape and type, and those of devices differ: "
                f"{' and '.join(sorted({str(tuple(part.shape[2:])) for part in parts}))}; "
                "train one by one"
            )
    return torch.stack(inputs, 1), torch.stack(targets, 1), present.float()
