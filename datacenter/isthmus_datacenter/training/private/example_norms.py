"""Norms of the gradients of all examples of a batch, from one backward pass (ghost clipping).

Hooks on the layers see each layer's input and the gradient of its output, from which the gradient
of every example follows. That of linear layers and embeddings is never computed, only its norm
(`outer_products`); that of other layers, which are small, is computed for one layer at a time.

The backward pass computes no gradient of a parameter, so that it works with `fully_shard`: nothing
is reduced, and the layers have their whole parameters when gradients pass them.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.instancenorm import _InstanceNorm

from isthmus.errors import TaskError
from isthmus.task.scoring.host_generators import HostGenerators
from isthmus_datacenter.training.private.outer_products import (
    OuterProducts,
    slices,
    squared,
    squared_norms,
)
from isthmus_privacy.dp_sgd.gradients import norms_of, rows_of

PER_EXAMPLE = "set datacenter.privacy.clipping = 'per_example', with zero_stage = 0"
"""What is possible for all models."""

_UNIT = 2.0**-24
"""Largest relative error of rounding to float32."""
_ERRORS = 8
"""Roundings of an output gradient on its way to a layer, relative to the largest one."""
_UNIT_TF32 = 2.0**-11
"""Largest relative error of rounding to TensorFloat-32, to which convolutions on GPUs round what
they multiply."""
_RECOMPUTED = 1e-2
"""Largest change of the norm and the sum of an output that is computed again, relative to them."""
_NORMALISING = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _InstanceNorm)
"""Layers whose gradients do not grow with their inputs."""

_NOT_COMPARED = ("_parameters", STATE_KEY, REGISTRY_KEY)
"""Attributes of a layer that are others while `fully_shard` computes: its parameters and state."""
_MOST_INSIDE = 10_000
"""Objects that an attribute of a layer may refer to, besides plain values: all are compared."""
_NOT_INSIDE = (bool, int, float, str, bytes, type(None), type, ModuleType, FunctionType)
"""What is not followed: plain values, and code."""

_Summand = OuterProducts | torch.Tensor
"""The gradients of one parameter at one of its places: as they are, or (B, ...)."""


class ExampleNorms:
    """Hooks on the layers of a model that find the norms of the gradients of single examples.

    Hooks do nothing but between `begin` and `end`.
    """

    def __init__(self, model: nn.Module) -> None:
        """Register the hooks, after `fully_shard` has registered its own.

        Raises:
            TaskError: there is a layer whose norms cannot be found.
        """
        self._batch: _Batch | None = None
        first_names = {id(each): name for name, each in model.named_parameters()}
        self._names = {key: repr(name) for key, name in first_names.items()}
        """Names of the model's parameters, quoted, by `id()`."""
        for name, module in model.named_modules():
            trained = {
                attribute: first_names[id(each)]
                for attribute, each in module._parameters.items()
                if each is not None and each.requires_grad
            }
            if trained:
                _check(name, module)
                layer = _Layer(name, module, trained)
                module.register_forward_pre_hook(self._before(layer), with_kwargs=True)
                module.register_forward_hook(self._computed(layer), prepend=True)
                module.register_forward_hook(self._after(layer), with_kwargs=True)

    def begin(self, alive: torch.Tensor, observed: int | None = None) -> None:
        """Begin a batch, before its forward pass.

        Args:
            alive: (B) bool; the layers replace the inputs of other examples by zeros, and do not
                pass their gradients on, so that nothing of them is in a sum, even if not finite.
            observed: the place of an example whose inputs and output gradients of all layers are
                noted; None for none.
        """
        self._batch = _Batch(alive, observed)

    def end(self) -> None:
        """End the batch."""
        self._batch = None

    def check_uses(self, losses: torch.Tensor) -> None:
        """Refuse losses in whose graph a trained parameter is used outside of its layers.

        Its gradients would be in no norm; with some examples only, no comparison might meet it. The
        graph has all uses, also those by operations and scripts that a mode of PyTorch does not
        see.

        Args:
            losses: after a forward pass; outside of a batch nothing is refused.

        Raises:
            TaskError: one is.
        """
        batch = self._batch
        if batch is None:
            return
        waiting = [losses.grad_fn]
        visited = {losses.grad_fn}
        while waiting:
            node = waiting.pop()
            assert node is not None
            for following, _ in node.next_functions:
                parameter = getattr(following, "variable", None)
                if parameter is not None:
                    self._check_use(batch, parameter, node._sequence_nr())
                elif following is not None and following not in visited:
                    visited.add(following)
                    waiting.append(following)

    def _check_use(self, batch: _Batch, parameter: torch.Tensor, number: int) -> None:
        """Refuse an operation that uses a parameter outside of the calls of its layers."""
        calls = batch.calls.get(id(parameter))
        if calls is None and id(parameter) not in self._names:  # of what is not trained here
            return
        if not any(first <= number < end for first, end in calls or ()):
            # `fully_shard` has other parameters in the layers while they compute.
            which = self._names.get(id(parameter), f"of shape {tuple(parameter.shape)}")
            raise TaskError(
                f"the gradient of parameter {which} does not follow from its layers: it is "
                f"used outside of them; {PER_EXAMPLE}"
            )

    def squares(self, losses: torch.Tensor) -> dict[str, torch.Tensor]:
        """Squared norms of the gradients of each parameter, after the forward pass of a batch.

        Args:
            losses: (B) of each example; their graph is kept.

        Returns:
            (B) float64 for each parameter by its first name; not finite for gradients that are not.
        """
        batch = self._batch
        assert batch is not None
        batch.measures = True
        torch.autograd.grad(losses.sum(), batch.lowest, retain_graph=True, allow_unused=True)
        batch.measures = False
        batch.check_recomputed()
        batch.lowest.clear()  # their hooks refer to the batch, and Python does not see such a cycle
        for name, summands in batch.several.items():
            batch.squares[name] = _squares_of_sum(summands)
        batch.several.clear()
        return batch.squares

    def observed(self) -> dict[str, torch.Tensor]:
        """What the layers got for the observed example, by what it is; after `squares`.

        The gradients of all parameters of layers follow from it.
        """
        assert self._batch is not None
        return self._batch.noted

    def rounding(self) -> torch.Tensor:
        """Bounds (B, float64) on what rounding adds to each example's gradient; after `squares`.

        See `_Batch.rounding`.
        """
        assert self._batch is not None
        return self._batch.rounding()

    # -- hooks ----------------------------------------------------------------------------------

    def _before(self, layer: _Layer) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            batch = self._batch
            if batch is None:
                return None
            batch.began(module)
            layer.begin()
            given = layer.input_of(args, kwargs)
            prepared = layer.one_for_each(given, batch)
            if prepared.is_floating_point():
                prepared = batch.without_dead(prepared)
            if prepared is given:
                return None
            if args:
                return (prepared,), kwargs
            return args, dict.fromkeys(kwargs, prepared)

        return hook

    def _computed(self, layer: _Layer) -> Callable[..., Any]:
        """Notes what forward() has returned, before other hooks."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._batch is not None and isinstance(output, torch.Tensor):
                layer.returned = output, output._version

        return hook

    def _after(self, layer: _Layer) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            batch = self._batch
            if batch is None:
                return
            batch.ended()
            given = layer.input_of(args, kwargs)
            layer.check_output(output, batch.size)
            layer.check_unchanged(output)
            layer.check_precision(output)
            layer.check_drawn()
            call = batch.note(f"the input of layer {layer.name!r}", given)
            if not output.requires_grad:
                return
            batch.uses.update(layer.trained.values())
            if not given.requires_grad:
                # Every path of the backward pass ends at one of these. An edge, since a later
                # operation may change the output in place.
                batch.lowest.append(get_gradient_edge(output))
            kept = [(given.detach(), layer.described(output.detach()))]
            attributes = layer.attributes()

            def receive(gradient: torch.Tensor) -> torch.Tensor:
                gradient = batch.without_dead(gradient)
                if batch.measures:
                    if call is not None:
                        batch.note(f"the gradient after {call[4:]}", gradient)
                    layer.check_attributes(attributes)
                    with torch.no_grad():  # then the second pass frees inputs as it goes
                        batch.add(layer, *kept.pop(), gradient)
                return gradient

            output.register_hook(receive)

        return hook


class _Layer:
    """A layer with parameters that are trained."""

    def __init__(self, name: str, module: nn.Module, trained: Mapping[str, str]) -> None:
        self.name = name
        self.module = module
        self.trained = trained
        """First names of its parameters in the model, by attribute."""
        self._without_examples: bool | None = None
        """Whether the inputs are the same for all examples, such as positions; None if unknown."""
        self.returned: tuple[torch.Tensor, int] | None = None
        """What the last forward() has returned, and its version then."""
        self._generators: HostGenerators | None = None
        """States at the beginning of the last call."""

    @property
    def _is_known(self) -> bool:
        """Whether its gradients follow from its input alone, and nothing is computed again."""
        return isinstance(self.module, nn.Linear | nn.Embedding)

    def begin(self) -> None:
        """Note where the generators of Python and NumPy are, before a call."""
        self._generators = None if self._is_known else HostGenerators.now()

    def check_drawn(self) -> None:
        """Refuse a layer that has drawn from them in the call: it would draw others later.

        What it draws need not be seen in its output: the parameter that it is for may be small.
        """
        if self._generators is not None and self._generators != HostGenerators.now():
            raise self._refused("draws random numbers of Python or NumPy")

    def attributes(self) -> dict[str, tuple[object, ...]]:
        """What the layer has besides its parameters, each with what tells that it has changed.

        Raises:
            TaskError: it refers to too much to be compared.
        """
        if self._is_known:
            return {}
        own = {**vars(self.module), **self.module._buffers}
        found = {}
        for name, each in own.items():
            if name in _NOT_COMPARED:
                continue
            inside = _inside(each)
            if inside is None:
                raise self._refused(
                    f"refers by its attribute {name!r} to more than {_MOST_INSIDE:,} objects, too "
                    "many to see whether they change"
                )
            found[name] = (each, *inside)
        return found

    def check_attributes(self, before: Mapping[str, tuple[object, ...]]) -> None:
        """Refuse a layer that has other attributes than in its call when it is computed again.

        Raises:
            TaskError: with the attribute.
        """
        now = self.attributes()
        for name in {**before, **now}:
            if name not in before or name not in now or not _is_unchanged(before[name], now[name]):
                raise self._refused(
                    f"computes something else in the backward pass, as its attribute {name!r} is "
                    "only set for the time of a call"
                )

    def input_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """The one tensor that the layer is called with."""
        values = [*args, *kwargs.values()]
        if len(values) != 1 or not isinstance(values[0], torch.Tensor):
            raise self._refused("is not called with one tensor alone")
        return values[0]

    def one_for_each(self, given: torch.Tensor, batch: _Batch) -> torch.Tensor:
        """The input with one row for each example; an embedding may have the same for all."""
        without = given.ndim == 0 or len(given) != batch.size
        if self._without_examples is None and (without or batch.size > 1):
            # One row for a single example says nothing: there may be one row for several, too.
            self._without_examples = without
        if not self._without_examples and not without:
            return given
        if not isinstance(self.module, nn.Embedding) or not self._without_examples:
            raise self._refused(
                f"gets a tensor of shape {tuple(given.shape)} for {batch.size} examples, and needs "
                "one row for each"
            )
        rows = given if given.ndim > 1 and len(given) == 1 else given.unsqueeze(0)
        return rows.expand(batch.size, *rows.shape[1:])

    def check_output(self, output: Any, examples: int) -> None:
        """Refuse an output that is not one tensor with a row for each example."""
        if not isinstance(output, torch.Tensor) or len(output) != examples:
            raise self._refused("does not return one tensor with a row for each example")

    def check_unchanged(self, output: torch.Tensor) -> None:
        """Refuse what a hook of somebody else has made of the output: gradients pass that, too."""
        returned = self.returned
        self.returned = None  # or it would keep the graph
        if returned is None or output is not returned[0] or output._version != returned[1]:
            raise self._refused("has a hook that changes its output")

    def described(self, output: torch.Tensor) -> torch.Tensor | None:
        """Norms and sums (2, B) of what is computed again later; None if that is not done."""
        if self._is_known:
            return None
        rows = rows_of(output)
        return torch.stack([torch.linalg.vector_norm(rows, dim=1), rows.sum(1)])

    def check_precision(self, output: torch.Tensor) -> None:
        """Refuse numbers with fewer bits, as of autocast, whose rounding has no bound here."""
        numbers = {output.dtype, *(each.dtype for each in self.parameters().values())}
        half = numbers & {torch.bfloat16, torch.float16}
        if half or torch.is_autocast_enabled(output.device.type):
            raise self._refused(
                "computes in half precision, whose rounding could add more than the bound"
            )

    def gradients(self, given: torch.Tensor, gradient: torch.Tensor) -> dict[str, _Summand]:
        """The gradients of the parameters for all examples, by attribute."""
        module = self.module
        if isinstance(module, nn.Linear):
            gradient = gradient.flatten(1, -2) if gradient.ndim > 2 else gradient.unsqueeze(1)
            given = given.flatten(1, -2) if given.ndim > 2 else given.unsqueeze(1)
            shape = torch.Size((module.out_features, module.in_features))
            weight = OuterProducts(gradient, given, shape)
            return {name: weight if name == "weight" else gradient.sum(1) for name in self.trained}
        assert isinstance(module, nn.Embedding)
        gradient = gradient.flatten(1, -2) if gradient.ndim > 2 else gradient.unsqueeze(1)
        rows = rows_of(given)
        if module.padding_idx is not None:  # its row is not trained
            gradient = gradient.masked_fill((rows == module.padding_idx).unsqueeze(-1), 0)
        shape = torch.Size((module.num_embeddings, module.embedding_dim))
        return {"weight": OuterProducts(rows, gradient, shape)}

    def sizes(self, given: torch.Tensor, gradient: torch.Tensor) -> _Sizes:
        """How large the terms of the gradients are, by attribute.

        A gradient is a sum over the T positions of an example, such as of g_t x_t^T in a linear
        layer, whose terms may be much larger than it. Where the terms are not known, the product of
        the norms of g and x is no less than the sum of theirs (Cauchy and Schwarz).
        """
        module = self.module
        if isinstance(module, nn.Linear | nn.Embedding):
            of_gradients = _norms_of_terms(gradient)
            terms = dict.fromkeys(self.trained, of_gradients.sum(1))
            count = torch.full_like(of_gradients[:, 0], of_gradients.shape[1])
            factors = dict.fromkeys(self.trained, count)
            if isinstance(module, nn.Linear) and "weight" in terms:
                of_inputs = _norms_of_terms(given)
                terms["weight"] = (of_gradients * of_inputs).sum(1)
                factors["weight"] = of_inputs.sum(1)
            return _Sizes(terms, factors, of_gradients.amax(1))
        positions = max(1, self.terms(gradient) // len(gradient))
        # What is normalised is at most one on average; other layers may have it besides inputs.
        length = torch.full_like(norms_of(gradient), math.sqrt(gradient[0].numel()))
        if not isinstance(module, _NORMALISING) and given.is_floating_point():
            # A convolution uses each number of its input once for each number of the kernel.
            kernel = getattr(module, "kernel_size", ())
            uses = math.prod(kernel) if isinstance(kernel, tuple) else 1
            length += math.sqrt(uses) * norms_of(given)
        largest = rows_of(gradient).abs().amax(1).double()
        return _Sizes(
            dict.fromkeys(self.trained, length * norms_of(gradient)),
            dict.fromkeys(self.trained, length * math.sqrt(positions)),
            largest * math.sqrt(gradient[0].numel() / positions),
        )

    def terms(self, gradient: torch.Tensor) -> int:
        """The number of terms of all examples that are added to one number of a gradient."""
        if isinstance(self.module, nn.Linear | nn.Embedding):
            return gradient.numel() // gradient.shape[-1]
        smallest = min(each.numel() for each in self.parameters().values())
        return max(1, gradient.numel() // getattr(self.module, "out_channels", smallest))

    def computed(
        self, given: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """The gradients (B, ...) of the parameters of any layer, and its output `described`."""
        called = _Forward(_kind(self.module), self.module)
        parameters = {name: each.detach() for name, each in self.parameters().items()}

        def of_one(row: torch.Tensor, output_gradient: torch.Tensor) -> tuple[Any, torch.Tensor]:
            def forward(values: Mapping[str, torch.Tensor]) -> Any:
                named = {f"module.{name}": each for name, each in values.items()}
                return functional_call(called, named, (row.unsqueeze(0),)).squeeze(0)

            found = vjp(forward, parameters)
            return found[1](output_gradient)[0], found[0]

        gradients, outputs = vmap(of_one)(given, gradient)
        return gradients, self.described(outputs)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that are trained, by attribute; whole while gradients pass the layer."""
        own = self.module.named_parameters(recurse=False)
        return {name: each for name, each in own if name in self.trained}

    def _refused(self, why: str) -> TaskError:
        return refused(self.name, self.module, why)


@dataclasses.dataclass
class _Sizes:
    """How large the terms of the gradients of one layer are: (B, float64) each."""

    terms: dict[str, torch.Tensor]
    """Sums of the norms of all terms, by attribute."""
    factors: dict[str, torch.Tensor]
    """Sums of the norms of what output gradients are multiplied by, by attribute."""
    largest: torch.Tensor
    """Largest norm of an output gradient at one position."""


@dataclasses.dataclass
class _Batch:
    """What the hooks find for one batch."""

    alive: torch.Tensor
    place: int | None = None
    """Place of the example that is observed; None without one."""
    measures: bool = False
    """Whether gradients that pass are those whose norms are wanted."""
    lowest: list[GradientEdge] = dataclasses.field(default_factory=list)
    """Outputs of layers whose inputs do not depend on other layers."""
    uses: Counter[str] = dataclasses.field(default_factory=Counter)
    """Places of each parameter: layers that share it, and calls of them."""
    squares: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    several: defaultdict[str, list[_Summand]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )
    """Gradients of parameters with several places: the norm of their sum is wanted."""
    terms: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """See `_Sizes`, for each parameter at all of its places."""
    factors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    largest: torch.Tensor | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    """What rounding adds to a parameter's gradient, relative to its terms."""
    noted: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    others: dict[str, tuple[_Layer, torch.Tensor]] = dataclasses.field(default_factory=dict)
    """Whether (bool) a layer has computed something else in the backward pass."""
    calling: list[tuple[int, list[int]]] = dataclasses.field(default_factory=list)
    """Calls of layers that have not ended: the number of their first operation, see `calls`, and
    the `id` of each parameter."""
    calls: defaultdict[int, list[tuple[int, int]]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )
    """The operations in the calls of layers, by the `id` of each parameter of the layer: PyTorch
    has given them the numbers from the first one to one before the second."""

    def __post_init__(self) -> None:
        self.size = len(self.alive)
        self._has_dead = not bool(self.alive.all())

    def began(self, module: nn.Module) -> None:
        """Note the beginning of a layer's call, with the parameters that it computes with."""
        parameters = [id(each) for each in module._parameters.values()]
        self.calling.append((_next_operation(), parameters))

    def ended(self) -> None:
        """Note the end of the call that has begun last."""
        first, parameters = self.calling.pop()
        for each in parameters:
            self.calls[each].append((first, _next_operation()))

    def without_dead(self, rows: torch.Tensor) -> torch.Tensor:
        """Zeros in place of the rows of examples that are not alive."""
        if not self._has_dead:
            return rows
        return torch.where(self.alive.view(-1, *[1] * (rows.ndim - 1)), rows, 0)

    def note(self, what: str, rows: torch.Tensor) -> str | None:
        """Note the row of the observed example; returns what it is called, None without one."""
        if self.place is None:
            return None
        calls = sum(each.partition(" (")[0] == what for each in self.noted)
        name = f"{what} (call {calls + 1})" if calls else what
        self.noted[name] = rows[self.place].detach().clone()
        return name

    def rounding(self) -> torch.Tensor:
        """Bounds (B, float64) on what rounding adds to the gradient of each example.

        Adding n numbers rounds n times, each time by at most u of the sum so far, which is at most
        the sum of the numbers' sizes. Errors of independent signs add up to the root of n times
        that (Higham and Mary 2019, "A new approach to probabilistic rounding error analysis"). n
        is of the whole batch, since all its examples are added to one sum, in any order.

        Output gradients have rounding errors too, which may be all that there is of them, where
        others cancel on the way. They are taken for `_ERRORS` u of the example's largest one.
        """
        assert self.largest is not None
        total = torch.zeros_like(self.largest)
        for name, terms in self.terms.items():
            error = self.errors[name] * terms
            error = error + _ERRORS * _UNIT * self.largest * self.factors[name]
            total += error.square()
        return total.sqrt()

    def _add_sizes(self, layer: _Layer, given: torch.Tensor, gradient: torch.Tensor) -> None:
        count = layer.terms(gradient)
        error = _UNIT * math.sqrt(count)
        if gradient.device.type != "cpu" and hasattr(layer.module, "kernel_size"):
            error += _UNIT_TF32 / math.sqrt(max(1, count // self.size))
        sizes = layer.sizes(given, gradient)
        for attribute, terms in sizes.terms.items():
            name = layer.trained[attribute]
            self.terms[name] = self.terms.get(name, 0) + terms
            self.factors[name] = self.factors.get(name, 0) + sizes.factors[attribute]
            self.errors[name] = max(self.errors.get(name, 0.0), error)
        if self.largest is None:
            self.largest = sizes.largest
        self.largest = torch.maximum(self.largest, sizes.largest)

    def add(
        self,
        layer: _Layer,
        given: torch.Tensor,
        described: torch.Tensor | None,
        gradient: torch.Tensor,
    ) -> None:
        """Add the gradients of a layer's parameters at one place.

        `described` is its output in the forward pass, see `_Layer.described`.
        """
        self._add_sizes(layer, given, gradient)
        if isinstance(layer.module, nn.Linear | nn.Embedding):
            for attribute, summand in layer.gradients(given, gradient).items():
                name = layer.trained[attribute]
                if self.uses[name] > 1:
                    self.several[name].append(summand)
                else:
                    self.squares[name] = _squares_of_sum([summand])
            return
        elements = sum(each.numel() for each in layer.parameters().values())
        parts: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        for some in slices(self.size, elements):
            gradients, again = layer.computed(given[some], gradient[some])
            assert described is not None
            assert again is not None
            self._compare(layer, described[:, some], again)
            for attribute, each in gradients.items():
                name = layer.trained[attribute]
                parts[name].append(each if self.uses[name] > 1 else squared(each))
        for name, pieces in parts.items():
            if self.uses[name] > 1:
                self.several[name].append(torch.cat(pieces))
            else:
                self.squares[name] = torch.cat(pieces)

    def _compare(self, layer: _Layer, before: torch.Tensor, after: torch.Tensor) -> None:
        # What is not a number either time is not compared: the example is left out.
        differs = ((before - after).abs() > _RECOMPUTED * (before[0] + before.abs())).any()
        if layer.name in self.others:
            differs |= self.others[layer.name][1]
        self.others[layer.name] = layer, differs

    def check_recomputed(self) -> None:
        """Refuse layers whose gradients were computed of something else than their output."""
        if not self.others:
            return
        layers, found = zip(*self.others.values(), strict=True)
        self.others.clear()
        for layer, differs in zip(layers, torch.stack(found).tolist(), strict=True):
            if differs:
                raise refused(
                    layer.name,
                    layer.module,
                    "computes something else in the backward pass, as with random numbers, or with "
                    "attributes that are only set for the time of a call",
                )


def _next_operation() -> int:
    """The number that PyTorch gives to the next operation of a graph."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # not declared
    return number


def refused(name: str, module: nn.Module, why: str) -> TaskError:
    """The error for a layer whose norms cannot be found."""
    return TaskError(
        f"layer {name!r} ({_kind(module).__name__}) {why}, so that ghost clipping cannot find the "
        f"norm of an example's gradient; {PER_EXAMPLE}"
    )


def _inside(value: object) -> tuple[object, ...] | None:
    """What a value refers to, and what that refers to, with the versions of tensors.

    None if these are too many.
    """
    found: list[object] = []
    waiting = [value]
    visited: set[int] = set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, _NOT_INSIDE) or id(each) in visited:
            continue
        if len(visited) == _MOST_INSIDE:
            return None
        visited.add(id(each))
        if isinstance(each, torch.Tensor):
            found.append(each._version)
            continue
        inner = _items(each)
        found += inner
        waiting += inner
    return tuple(found)


def _items(value: object) -> list[object]:
    """What a container or object refers to; a module also by its hooks, but not by parameters."""
    kept = getattr(value, "__dict__", {})
    items = [each for name, each in kept.items() if name not in (*_NOT_COMPARED, "_modules")]
    if isinstance(value, dict):
        items += [*value, *value.values()]
    elif isinstance(value, list | tuple):
        items += value
    return items


def _is_unchanged(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    """Whether an attribute and its items are the same objects, or equal numbers or text."""
    return len(before) == len(now) and all(map(_is_same, before, now))


def _is_same(one: object, other: object) -> bool:
    is_plain = type(one) is type(other) and isinstance(one, int | float | str)
    return one is other or (is_plain and one == other)


def _norms_of_terms(rows: torch.Tensor) -> torch.Tensor:
    """Norms (B, T, float64) of the last dimension of tensors (B, ..., C)."""
    terms = rows.flatten(1, -2) if rows.ndim > 2 else rows.unsqueeze(1)
    norms: torch.Tensor = torch.linalg.vector_norm(terms, dim=-1, dtype=torch.float64)
    return norms


def _squares_of_sum(summands: Sequence[_Summand]) -> torch.Tensor:
    """Squared norms (B) of the sum of gradients of one parameter at its places."""
    products = [each for each in summands if isinstance(each, OuterProducts)]
    if len(products) == len(summands):
        return squared_norms(products)
    dense = [each.dense() if isinstance(each, OuterProducts) else each for each in summands]
    return squared(sum(dense[1:], start=dense[0]))


def _check(name: str, module: nn.Module) -> None:
    """Refuse layers whose gradients do not follow from their input and output."""
    kind = _kind(module)
    if "forward" in vars(module):
        raise refused(name, module, "has a forward() of its own besides that of its class")
    if isinstance(module, nn.Linear | nn.Embedding):
        known: type[nn.Module] = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
        if kind.forward is not known.forward:
            raise refused(name, module, f"changes forward() of {known.__name__}")
    if isinstance(module, nn.Embedding):
        if module.scale_grad_by_freq:
            raise refused(name, module, "has scale_grad_by_freq=True, which mixes examples")
        if module.max_norm is not None:
            raise refused(name, module, "has max_norm, which changes weights without noise")
        if module.sparse:
            raise refused(name, module, "has sparse=True, and words without a gradient need noise")
    elif next(module.children(), None) is not None:
        raise refused(name, module, "has parameters of its own besides those of its layers")


def _kind(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before `fully_shard` gave it another."""
    if not isinstance(module, FSDPModule):
        return type(module)
    kinds = (each for each in type(module).__mro__ if issubclass(each, nn.Module))
    return next(each for each in kinds if not issubclass(each, FSDPModule))


class _Forward(nn.Module):
    """Calls the forward() of a module's class, without its hooks."""

    def __init__(self, kind: type[nn.Module], module: nn.Module) -> None:
        super().__init__()
        self.kind = kind
        self.module = module

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.kind.forward(self.module, given)
        return output
