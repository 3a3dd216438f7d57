"""The gradient of every single example, clipped to a norm, and their sum with noise.

The gradients are those that a batch of this one example would have, computed for several at a time
by `torch.func`, where no operation sees two examples. What is left to a model is to keep something
of one example until it computes another: `KeptState` refuses it in every step where it finds it,
and in some steps examples are computed again after others (`Reference`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode

from isthmus.errors import TaskError
from isthmus.task import Task, user_code
from isthmus.task.scoring import losses_of, pair_of
from isthmus.task.scoring.inputs import tensors_of
from isthmus_privacy.dp.gaussian import KEY_BYTES, GaussianDraws
from isthmus_privacy.dp_sgd.alone import check_alone
from isthmus_privacy.dp_sgd.examples import ExampleGroup
from isthmus_privacy.dp_sgd.isolation import (
    ComputedBefore,
    GeneratorStates,
    Observed,
    arranged,
    check_repeats,
    check_same,
    compares,
    kept_generators,
    place_in,
    replaced,
    secret_numbers,
)
from isthmus_privacy.dp_sgd.kept_state import KeptState
from isthmus_privacy.dp_sgd.reference import Reference

log = logging.getLogger(__name__)

MEMORY_ELEMENTS = 1 << 26
"""Elements of all gradients that exist at a time."""
_ROUNDING = 1 - 2.0**-20
"""Factor of the clipping bound, so that rounding the products does not exceed it."""
_CONVERTED_ELEMENTS = 1 << 22
"""Elements that exist in float64 at a time."""
_AS_IN_PLAIN = 2.0**-6
"""Largest difference between two ways to compute a gradient, relative to its 2-norm."""


class ExampleGradients:
    """Clipped gradients of single examples."""

    def __init__(self, task: Task, model: nn.Module, clip: float, at_once: int) -> None:
        """`clip` is the largest 2-norm; `at_once` the most examples that are computed together."""
        self._task = task
        self._called = _CalledWithInputs(task, model)
        self._model = model
        self._clip = clip
        self.size = sum(each.numel() for each in self.trained().values())
        """N: elements of a gradient."""
        self._at_once = max(1, min(at_once, MEMORY_ELEMENTS // max(self.size, 1)))
        self._steps = 0
        self._reference = Reference(model)
        self._first: ExampleGroup | None = None
        """The example of the reference: the first one that there was."""
        self._together: bool | None = None
        """Whether `torch.func.vmap` can compute the model; None until that was tried."""

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name; a gradient is in their order."""
        named = self._model.named_parameters()
        return {name: each for name, each in named if each.requires_grad}

    def check(self, group: ExampleGroup) -> None:
        """Refuse models in which the gradient of an example depends on others.

        What is computed for each of the examples must not change when the others are replaced, and
        nothing that is kept between calls may change at all. Random numbers are drawn again
        afterwards as if this had not been.

        Args:
            group: a few examples.

        Raises:
            TaskError: it does, or the model or the loss failed.
        """
        self._check_hooks()
        state = KeptState(self._task, self._model, closely=True)
        with state.explaining():
            self._check_alone(group)
            self._check_as_in_plain(group)
            self._check_reference(group)
            self._check_isolation(group, state)
            self._check_reference(group)
        state.check()

    def _check_alone(self, group: ExampleGroup) -> None:
        """Refuse a loss without a gradient for single examples, see `check_alone`."""
        rows = next(iter(group.parts(self._at_once)))
        with kept_generators(rows[0].device):
            found, _ = self._computed(group)(*rows)
        if not any(bool((each != 0).any()) for each in found.values()):
            check_alone(self._task, self._model, group)

    def _check_as_in_plain(self, group: ExampleGroup) -> None:
        """Refuse a model whose gradient of one example is not that of plain training.

        Here its parameters are replaced by copies, which are no `nn.Parameter`, and with
        `torch.func.vmap` the backward pass is another one. Where only the latter differs, examples
        are computed one after the other. That is not found of a model that draws random numbers,
        which are others there.

        Raises:
            TaskError: it is another one.
        """
        rows = [each[:1] for each in group.tensors]
        trained = {name: each.detach() for name, each in self.trained().items()}
        device = rows[0].device
        with kept_generators(device):
            generators = GeneratorStates(device)
            before = generators.observed()
            try:
                with torch.enable_grad(), user_code("the gradient of an example"):
                    expected = self._plain_gradient(group, rows)
                    after = GeneratorStates(device).observed()
                    generators.restore()
                    with self._leaving_gradients():
                        alone, _ = _one_after_the_other(self._loss(group), trained, rows)
            except TaskError:  # training meets it again, or not
                return
            if _is_other(expected, alone):
                raise TaskError(
                    "the gradient of an example alone is not that of plain training, where the "
                    "model has its parameters and not copies of them: perhaps forward() or loss() "
                    "asks whether a tensor is an nn.Parameter; compute the same for any tensor"
                )
            draws = any(not torch.equal(each, after[what]) for what, each in before.items())
            if self._together and not draws:
                found, _ = self._computed(group)(*rows)
                if _is_other(expected, found):
                    self._together = False
                    log.info(
                        "torch.func.vmap computes other gradients of this model than plain "
                        "training, so that those of single examples are computed one after the "
                        "other, which takes longer"
                    )

    def _plain_gradient(
        self, group: ExampleGroup, rows: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The gradient (1, ...) of one example as plain training computes it, by name."""
        trained = self.trained()
        inputs, target = pair_of(self._task, group.batch_of([each[0] for each in rows]))
        with self._kept_gradients():
            _, loss = self._called(inputs, target, None)
            if loss.requires_grad:
                torch.autograd.backward(loss, inputs=list(trained.values()))
            return {name: _dense(each.grad, each).unsqueeze(0) for name, each in trained.items()}

    @contextlib.contextmanager
    def _kept_gradients(self) -> Iterator[None]:
        """Within it the parameters of the model have no gradients; afterwards those of before."""
        trained = list(self.trained().values())
        kept = [each.grad for each in trained]
        for each in trained:
            each.grad = None
        try:
            yield
        finally:
            for each, gradient in zip(trained, kept, strict=True):
                each.grad = gradient

    @contextlib.contextmanager
    def _leaving_gradients(self) -> Iterator[None]:
        """Refuse a pass that adds something to the gradients of the model's own parameters.

        A backward pass within another one does, such as that of a reversible layer, where it uses
        another reference to a layer than the one whose parameters were replaced.

        Raises:
            TaskError: it does.
        """
        with self._kept_gradients():
            yield
            for name, each in self.trained().items():
                if each.grad is not None:
                    raise _used_elsewhere(name)

    def _check_isolation(self, group: ExampleGroup, state: KeptState) -> None:
        for rows, place in arranged(group.tensors):
            expected = self._observe(group, rows, place)
            state.check()
            repeated = self._repeated(group, rows, place)
            for others in replaced(rows, place, made_up=True):
                try:
                    found = self._observe(group, others, place)
                except TaskError:  # of values that no example has
                    continue
                state.check()
                check_same(expected, found, repeated)
            check_repeats(expected, self._observe(group, rows, place), repeated)

    def step_sum(self, groups: Sequence[ExampleGroup], device: Any) -> torch.Tensor:
        """The sum (N, float64) of the clipped gradients of all examples of a step.

        In some steps one of them is computed before and after all, among others, and the first
        example of all is computed again. What the model draws is secret.

        Raises:
            TaskError: see `add_to`; or one example changes the gradients of others.
        """
        compared = compares(self._steps)
        self._check_hooks()
        state = KeptState(self._task, self._model, closely=compared)
        with state.explaining(), secret_numbers(device):
            before = self._before(groups) if compared else None
            total = self.zeros(device)
            for group in groups:
                self.add_to(total, group)
            if before is not None:
                before.compare()
        state.check()
        self._steps += 1
        return total

    def add_to(self, total: torch.Tensor, group: ExampleGroup) -> None:
        """Add the clipped gradients of all examples of a group to a vector (N) of `zeros`.

        An example whose gradient is not finite adds nothing.

        Raises:
            TaskError: the model or the loss failed, or cannot be computed by `torch.func.vmap`.
        """
        gradients = self._computed(group)
        for rows in group.parts(self._at_once):
            parts = list(gradients(*rows)[0].values())
            total += clipped_sum(parts, self._clip)

    def _check_reference(self, group: ExampleGroup | None) -> None:
        """Compute the first example again, after whatever there was since."""
        if self._first is None and group is not None:
            self._first = ExampleGroup(group.one, [each[:1].clone() for each in group.tensors])
        first = self._first
        if first is None:
            return
        trained = {name: each.detach() for name, each in self.trained().items()}

        def observe(generators: GeneratorStates) -> Observed:
            numbers = {name: self._reference.numbers(name, each) for name, each in trained.items()}
            return self._observe(first, first.tensors, 0, generators, numbers)

        self._reference.check(trained, first.tensors[0].device, observe)

    def _before(self, groups: Sequence[ExampleGroup]) -> ComputedBefore | None:
        """Compute one example of a step before all of them, and then the first one of all."""
        if not groups:
            self._check_reference(None)
            return None
        group = max(groups, key=len)
        rows = next(iter(group.parts(self._at_once)))
        place = place_in(self._steps, len(rows[0]))

        def observe(some: Sequence[torch.Tensor], generators: GeneratorStates | None) -> Observed:
            return self._observe(group, some, place, generators)

        before = ComputedBefore(observe, rows, place)
        self._check_reference(group)
        return before

    def _repeated(
        self, group: ExampleGroup, rows: Sequence[torch.Tensor], place: int
    ) -> Observed | None:
        """What `_observe` finds once more; None where kernels repeat their result."""
        return None if rows[0].device.type == "cpu" else self._observe(group, rows, place)

    def _observe(
        self,
        group: ExampleGroup,
        rows: Sequence[torch.Tensor],
        place: int,
        generators: GeneratorStates | None = None,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> Observed:
        """The loss, the outputs and the gradient of one of some examples, from one seed.

        Args:
            group: with the structure of the examples.
            rows: the examples.
            place: of the one.
            generators: states of generators to begin with; None for those of now.
            parameters: in place of those of the model.
        """
        gradients = self._computed(group, with_outputs=True, parameters=parameters)
        observed: dict[str, torch.Tensor] = {}
        with kept_generators(rows[0].device):
            if generators is not None:
                generators.restore()
            for start in range(0, len(rows[0]), self._at_once):
                some = [each[start : start + self._at_once] for each in rows]
                found, (loss, outputs) = gradients(*some)
                if not start <= place < start + self._at_once:
                    continue
                index = place - start
                observed["the loss"] = loss[index].clone()
                for number, each in enumerate(outputs):
                    observed[f"tensor {number} of the output"] = each[index].clone()
                for name, each in found.items():
                    observed[f"the gradient of parameter {name!r}"] = each[index].clone()
            observed.update(GeneratorStates(rows[0].device).observed())
        return observed

    def _computed(
        self,
        group: ExampleGroup,
        *,
        with_outputs: bool = False,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> Callable[..., Any]:
        """A function of rows (B, ...): gradients (B, ...) by name, losses (B), and outputs."""
        trained = parameters or {name: each.detach() for name, each in self.trained().items()}
        loss = self._loss(group, with_outputs=with_outputs)
        axes = (None, *(0 for _ in group.tensors))
        together = vmap(grad(loss, has_aux=True), in_dims=axes, randomness="different")

        def computed(*rows: torch.Tensor) -> Any:
            # With gradients outside of `grad`, too: those of parameters that were not swapped.
            with (
                torch.enable_grad(),
                self._leaving_gradients(),
                user_code("the gradient of single examples (torch.func.vmap)"),
            ):
                found, (losses, outputs) = self._each(together, loss, trained, rows)
            self._check_swapped(losses)
            alone = {name: _dense(each, each) for name, each in found.items()}
            return alone, (losses.detach(), outputs)

        return computed

    def _loss(self, group: ExampleGroup, *, with_outputs: bool = False) -> Callable[..., Any]:
        """A function of parameters by name and of one row: its loss, and the loss with outputs."""
        places = _places(self._called, self.trained())

        def loss(
            parameters: Mapping[str, torch.Tensor], *rows: torch.Tensor, backward: Any = None
        ) -> Any:
            inputs, target = pair_of(self._task, group.batch_of(rows))
            swapped = {place: parameters[name] for place, name in places.items()}
            with _WithoutAssignedData():
                output, mean = functional_call(
                    self._called, swapped, (inputs, target, backward), tie_weights=False
                )
            outputs = [each.detach() for each in tensors_of(output)] if with_outputs else []
            return mean, (mean, outputs)

        return loss

    def _each(
        self,
        together: Callable[..., Any],
        loss: Callable[..., Any],
        trained: Mapping[str, torch.Tensor],
        rows: Sequence[torch.Tensor],
    ) -> Any:
        """What is computed for each example, stacked.

        Some models `torch.func.vmap` cannot compute, such as an `nn.GRU`, or one that looks at its
        values, as those of `transformers` look at an attention mask. Their examples are computed
        one after the other. The first call decides: results have other bits then. So it decides
        nothing when it fails for lack of memory, of which there may be more the next time.

        Args:
            together: computes several examples.
            loss: of one, with what else is computed.
            trained: the parameters.
            rows: of the examples.
        """
        if self._together is None:
            generators = GeneratorStates(rows[0].device)
            try:
                result = together(trained, *rows)
            except (RuntimeError, TaskError) as error:
                # A TaskError of loss() or inputs_and_target() has the task's own as its cause.
                cause = error if isinstance(error, RuntimeError) else error.__cause__
                if not isinstance(cause, RuntimeError) or _lacks_memory(cause):
                    raise
                generators.restore()
                try:
                    result = _one_after_the_other(loss, trained, rows)
                except Exception:  # noqa: BLE001 - what failed first is told
                    result = None
                if result is None:
                    raise
                self._together = False
                log.info(
                    "torch.func.vmap cannot compute this model, so that the gradients of single "
                    "examples are computed one after the other, which takes longer"
                )
            else:
                self._together = True
            return result
        if self._together:
            return together(trained, *rows)
        return _one_after_the_other(loss, trained, rows)

    def _check_hooks(self) -> None:
        """Refuse hooks of parameters: no gradient is accumulated in these, so none is called.

        Raises:
            TaskError: a parameter has one.
        """
        for name, each in self.trained().items():
            if each._backward_hooks or each._post_accumulate_grad_hooks:
                raise TaskError(
                    f"parameter {name!r} has a hook on its gradient, which is not called where "
                    "each example has a gradient of its own; remove the hook, freeze what should "
                    "not be trained, and change gradients in the optimizer"
                )

    def _check_swapped(self, losses: torch.Tensor) -> None:
        """Refuse losses in which a parameter has a part that no example's gradient has.

        `functional_call` replaces the parameters of modules. Another reference to one, as in a list
        that model() has made of them or in a layer that is no submodule, it does not know.

        Args:
            losses: of all examples, with their graph.

        Raises:
            TaskError: they have a gradient at a parameter itself.
        """
        if not losses.requires_grad:
            return
        trained = self.trained()
        found = torch.autograd.grad(losses.sum(), list(trained.values()), allow_unused=True)
        for name, gradient in zip(trained, found, strict=True):
            if gradient is not None:
                raise _used_elsewhere(name)

    def zeros(self, device: Any) -> torch.Tensor:
        """A sum (N) of nothing, in float64: see `clipped_sum`."""
        return torch.zeros(self.size, dtype=torch.float64, device=device)

    def put(self, total: torch.Tensor) -> None:
        """Make a vector (N) the gradients of the trained parameters."""
        trained = self.trained().values()
        parts = torch.split(total, [each.numel() for each in trained])
        for parameter, part in zip(trained, parts, strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)


def add_noise(total: torch.Tensor, deviation: float) -> None:
    """Add Gaussian noise to a sum (N), in place, from new randomness of the operating system."""
    noise = GaussianDraws(os.urandom(KEY_BYTES), len(total)).row(0)
    total += noise.mul_(deviation).to(total)


def clipped_sum(parts: list[torch.Tensor], clip: float) -> torch.Tensor:
    """The sum of vectors, each scaled down to a 2-norm of at most `clip`.

    It is in float64. How a float32 sum rounds depends on what is in it already, so that one vector
    changed a sum of 65,536 by up to 65 times the bound, and whether it overflows told whether a
    vector was in it. Small factors would be rounded up to the least float32.

    Args:
        parts: of the vectors, (B, ...) each; those of vectors that are not finite become zeros.
        clip: the bound.

    Returns:
        The sum (N, float64) of B vectors, of which those that are not finite are left out.
    """
    norms = [norms_of(each) for each in parts]
    norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    factor = (clip * _ROUNDING / norm.clamp(min=1e-300)).clamp(max=1.0)
    finite = norm.isfinite()
    if not bool(finite.all()):
        factor = torch.where(finite, factor, 0.0)
        for each in parts:
            each[~finite] = 0
    return torch.cat([_weighted_sum(factor, rows_of(each)) for each in parts])


def _one_after_the_other(
    loss: Callable[..., Any], trained: Mapping[str, torch.Tensor], rows: Sequence[torch.Tensor]
) -> Any:
    """What `vmap` of `grad` of a loss would give, by a pass for each row.

    By passes as in plain training: `grad` cannot compute all models either, such as one that
    computes activations again in the backward pass.
    """
    found: list[Sequence[torch.Tensor | None]] = []
    losses = []
    outputs = []
    for index in range(len(rows[0])):
        leaves = {name: each.detach().requires_grad_() for name, each in trained.items()}
        # While the model has these parameters: it may compute activations again with them.
        backward = functools.partial(_add_gradients, found, list(leaves.values()))
        value, (_, output) = loss(leaves, *(each[index] for each in rows), backward=backward)
        losses.append(value)
        outputs.append(output)
    stacked = {
        name: torch.stack([torch.zeros_like(each) if one is None else one for one in column])
        for (name, each), column in zip(trained.items(), zip(*found, strict=True), strict=True)
    }
    columns = zip(*outputs, strict=True)
    return stacked, (torch.stack(losses), [torch.stack(column) for column in columns])


def _lacks_memory(error: RuntimeError) -> bool:
    # PyTorch has no class of its own for lack of the processor's memory.
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _add_gradients(
    found: list[Sequence[torch.Tensor | None]], leaves: Sequence[torch.Tensor], loss: torch.Tensor
) -> None:
    gradients: Sequence[torch.Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:
        # The graph is kept for `ExampleGradients._check_swapped`.
        gradients = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        # A backward pass within this one, as of a reversible layer, adds to the parameters.
        gradients = [_sum_of(each, leaf.grad) for each, leaf in zip(gradients, leaves, strict=True)]
    found.append(gradients)


def _sum_of(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one + other


def _dense(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """A gradient without its graph, with all elements; zeros where there is none."""
    if gradient is None:
        return torch.zeros_like(like)
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach()


def _is_other(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> bool:
    """Whether gradients differ by more than other kernels round; False if they are not finite."""
    pairs = [(each, _dense(found[name], each)) for name, each in expected.items()]
    norms = [norms_of(one) for one, _ in pairs]
    errors = [norms_of(one.double() - other.double()) for one, other in pairs]
    norm = float(torch.linalg.vector_norm(torch.stack(norms)))
    return float(torch.linalg.vector_norm(torch.stack(errors))) > _AS_IN_PLAIN * norm


def _used_elsewhere(name: str) -> TaskError:
    return TaskError(
        f"parameter {name!r} is used by another way than as an attribute of the model's modules, "
        "such as in a list of parameters or in a layer that is no submodule, where each example's "
        "gradient would lack a part; get it from its module in forward() or loss(), as "
        "model.layer.weight"
    )


def rows_of(tensors: torch.Tensor) -> torch.Tensor:
    """The tensor of each example as a vector: (B, ...) to (B, N), also where it is a number."""
    return tensors.flatten(1) if tensors.ndim > 1 else tensors.unsqueeze(1)


def norms_of(tensors: torch.Tensor) -> torch.Tensor:
    """The 2-norm of the tensor of each example: (B, ...) to (B) float64."""
    norms: torch.Tensor = torch.linalg.vector_norm(rows_of(tensors), dim=1, dtype=torch.float64)
    return norms


def _weighted_sum(factors: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The sum of rows (B, N), each times a factor, in float64."""
    total = factors.new_zeros(rows.shape[1])
    at_once = max(1, _CONVERTED_ELEMENTS // max(rows.shape[1], 1))
    for some, each in zip(torch.split(factors, at_once), torch.split(rows, at_once), strict=True):
        total += some @ each.double()
    return total


def _places(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Every place of some parameters in a model, once for each module that has it.

    `functional_call` finds the places of tied parameters by itself, but leaves its own tensors in a
    module that is used in two places.
    """
    names = {id(each): name for name, each in parameters.items()}
    return {
        f"{prefix}.{attribute}": names[id(parameter)]
        for prefix, module in model.named_modules()
        for attribute, parameter in module.named_parameters(recurse=False)
        if id(parameter) in names
    }


class _CalledWithInputs(nn.Module):
    """A model together with its task's forward() and loss(), which may use its parameters."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model

    def forward(
        self, inputs: Any, target: Any, backward: Callable[[torch.Tensor], None] | None
    ) -> tuple[Any, torch.Tensor]:
        output = self.task.forward(self.model, inputs)
        loss = losses_of(self.task, output, target).mean()
        if backward is not None:
            backward(loss)
        return output, loss


class _WithoutAssignedData(TorchFunctionMode):
    """Refuses to put the memory of a tensor of `torch.func` into another tensor.

    PyTorch does not: such a tensor has no memory of its own, and the process would end.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == _SET_DATA:
            raise TaskError(
                "forward() or loss() assigns the data of a tensor, which with differential privacy "
                "of examples could carry something of one example to others; keep nothing between "
                "calls"
            )
        return func(*args, **(kwargs or {}))


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a descriptor of C
