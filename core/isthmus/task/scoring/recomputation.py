"""Recompute a module's activations in the backward pass instead of keeping them.

All of them, or all but the outputs of the operators that take most of the time (*selective*
recomputation, Korthikanti et al. 2022): their memory is a part of the whole, and calling the others
again costs little.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_device_states,
)

from isthmus.errors import TaskError
from isthmus.task.definition import Task
from isthmus.task.loading import user_code
from isthmus.task.scoring.blocks import default_units
from isthmus.task.scoring.host_generators import HostGenerators
from isthmus.task.scoring.kept_values import Changes, KeptValues
from isthmus.task.scoring.named_values import named_by

_Kept = list[tuple[dict[str, torch.Tensor | None], str, Any]]
"""A module's table of buffers, the name of one, and its values before a call: None if it had none,
and `_ABSENT` if it was not registered."""
_ABSENT = object()
"""In place of a buffer that a module does not have."""

_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)
"""Operators whose outputs are kept, as they cost most to call again."""

_TOLERANCE = 1e-5
"""Most difference of two calls on a processor, as a part of the output."""
_GPU_TOLERANCE = 1e-3
"""Most difference of two calls on GPUs, whose kernels may add in any order."""
_ROUNDINGS = 4.0
"""Most difference of two calls in half precision on GPUs, in roundings of a number: each addition
has one."""

_is_within_unit = contextvars.ContextVar("_is_within_unit", default=False)
"""Whether a module that keeps no activations is being called."""

BeginCall = Callable[[], Callable[[], contextlib.AbstractContextManager[object]]]
"""Is called before a call that is repeated at once; what it returns gives what to repeat within."""

_CHANGED = "cached during selective activation checkpoint has been mutated"
"""A part of PyTorch's sentence."""


def recompute(
    unit: nn.Module, *, keep_products: bool = False, to_end: bool = False, compares: bool = False
) -> None:
    """Have a module keep no activations; the backward pass calls its `forward` a second time.

    With `keep_products` the outputs of matrix products, convolutions and attention are kept, and
    the second call does not compute them.

    The second call ends as soon as the backward pass has what it needs, or with `to_end` where the
    first one did: for ranks that need other parts of it, and exchange activations in it.

    Buffers that a call changes have the values of the first call's beginning in the second one, and
    keep what the first has made of them: otherwise running statistics would count each batch twice,
    and what depends on a buffer, such as spectral norm, would be computed from another. The same
    holds for what modules keep in attributes, such as a number of calls, and add to arguments
    (`KeptValues`); with `compares` also for what they collect elsewhere (`named_by`). It draws the
    same random numbers, also those of Python and NumPy.

    With `compares` the first call in training is repeated at once and compared: a module may keep
    something else, such as an iterator, and would have other gradients without a word. It
    raises a TaskError then. What ranks exchange in the call they exchange once more, for which all
    of them have to make their first call together, as they do all others of such a module.
    """
    forward = unit.forward
    # TorchScript makes another error of the one that ends a call early.
    is_scripted = any(isinstance(each, torch.jit.ScriptModule) for each in unit.modules())

    def recomputed(named: list[Any], *args: Any, **kwargs: Any) -> Any:
        given = (named, args, kwargs)
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            early_stop=not (to_end or is_scripted),
            context_fn=functools.partial(_contexts, unit, keep_products, given),
            **kwargs,
        )

    if compares:
        unit.forward = _ComparedOnce(unit, forward, recomputed)
    else:
        unit.forward = functools.partial(recomputed, [])


def recompute_blocks(task: Task, model: nn.Module, *, keep_products: bool) -> None:
    """Have the blocks of a model keep no activations, see `recompute`.

    They are those that the task names (`shard_units`), or the children of the model's containers.

    Raises:
        TaskError: it has none, or the task's code raised.
    """
    with user_code("shard_units()"):
        given = task.shard_units(model)
    if given is None:
        groups = default_units(model, smallest=1, shared=True)
        units = [unit for group in groups for unit in group]
    else:
        units = list(given)
        for unit in units:
            if not isinstance(unit, nn.Module):
                raise TaskError(f"shard_units() returned {type(unit).__name__}, not an nn.Module")
        units = list(dict.fromkeys(units))
    if not units:
        raise TaskError(
            "checkpoint_activations is for models of blocks, and this one has no nn.ModuleList or "
            "nn.Sequential with parameters; set federated.checkpoint_activations = false"
        )
    for unit in units:
        recompute(unit, keep_products=keep_products, compares=True)


def watch_repeats(root: nn.Module, begin: BeginCall) -> None:
    """Have something that counts calls within a model see both calls of those that are repeated.

    It is told before the first of the two, and enters what it has returned for the second one: to
    count that from where it was, and to go on from where the first has ended.

    Args:
        root: has modules that `recompute` was called for, with `compares`.
        begin: see `BeginCall`.
    """
    for module in root.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, _ComparedOnce):
            forward.watch(begin)


class _ComparedOnce:
    """A `forward` that keeps no activations, of which the first call in training is repeated."""

    # No dictionary, which `KeptValues` would take for what the module keeps.
    __slots__ = (
        "__wrapped__",
        "_is_compared",
        "_named",
        "_recomputed",
        "_unit",
        "_watching",
    )

    def __init__(
        self, unit: nn.Module, forward: Callable[..., Any], recomputed: Callable[..., Any]
    ) -> None:
        """Prepare.

        Args:
            unit: the module.
            forward: its own.
            recomputed: one that keeps no activations; is called with what `named_by` found, too.
        """
        self._unit = unit
        self.__wrapped__ = forward  # which tells its signature, too
        self._recomputed = recomputed
        self._is_compared = False
        # What its code names and its calls change; None until one was compared.
        self._named: list[Any] | None = None
        self._watching: list[BeginCall] = []

    def watch(self, begin: BeginCall) -> None:
        """See `watch_repeats`."""
        self._watching.append(begin)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            TaskError: a second call computes something else.
        """
        compares = self._is_to_be_compared((args, kwargs))
        outside = _is_within_unit.set(True)
        try:
            if not compares:
                named = named_by(self._unit) if self._named is None else self._named
                return self._recomputed(named, *args, **kwargs)
            self._is_compared = True
            return self._compared(args, kwargs)
        finally:
            _is_within_unit.reset(outside)

    def _compared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the first of two calls that are alike."""
        before = HostGenerators.now()
        drawn = _Drawn((args, kwargs))
        kept: _Kept = []
        changes: list[Changes] = []
        repeats = [begin() for begin in self._watching]
        named = named_by(self._unit)
        elsewhere = KeptValues((), named=named)
        with _noting(self._unit, (named, args, kwargs), kept, changes):
            output = self._recomputed(named, *args, **kwargs)
        self._note(elsewhere.changed_through(named))
        after = _Drawn((args, kwargs))
        # A list that is passed to blocks may collect their losses: once each.
        given = KeptValues((), (args, kwargs))
        versions = [(each, each._version) for each in named if _has_version(each)]
        known = KeptValues(self._unit.modules(), (), (args, kwargs))
        if known.unknown:
            raise self._refusal(f"has {known.unknown}, and may not compute the same")
        try:
            drawn.restore()
            watched = [repeat() for repeat in repeats]
            with _within(*watched, _uncounted(), _Repeating(kept, changes, before)):
                again = self.__wrapped__(*args, **kwargs)
        except TaskError as error:
            # Its sentence is about what differs in this call, and not what a user can do about it.
            raise self._refusal("computes something else") from error
        except Exception as error:
            if _lacks_memory(error):
                raise
            text = str(error).partition("\n")[0]
            reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
            raise self._refusal(f"fails ({reason})") from error
        finally:
            after.restore()
        is_written = any(each._version != version for each, version in versions)
        if given.undo_containers() or is_written or known.has_moved or _differ(output, again):
            raise self._refusal("computes something else")
        return output

    def _note(self, named: list[Any]) -> None:
        """Note what calls change also for those within, which are not compared by themselves."""
        for module in self._unit.modules():
            forward = vars(module).get("forward")
            if isinstance(forward, _ComparedOnce):
                forward._named = named

    def _is_to_be_compared(self, arguments: Any) -> bool:
        if self._is_compared or not torch.is_grad_enabled() or _is_within_unit.get():
            # The repetition of an outer module is one of this module, too; that of this one alone
            # would be taken for a part of what the outer one does.
            return False
        is_backward = torch._C._current_graph_task_id() != -1
        return not is_backward and not _is_trial(arguments, self._unit)

    def _refusal(self, what: str) -> TaskError:
        name = type(self._unit).__name__.removeprefix("FSDP")  # PyTorch's, of sharded ones
        return TaskError(
            f"checkpoint_activations: a {name} {what} "
            "when it is called once more with the same inputs, as the backward pass does: it "
            "changes its inputs, or something that is not given back to it, such as the place of "
            "an iterator, or a variable outside of it; keep numbers, tensors or lists in its "
            "attributes, or set checkpoint_activations = false"
        )


def _has_version(value: Any) -> bool:
    """Whether it is a tensor that knows how often it was written to."""
    return issubclass(type(value), torch.Tensor) and not value.is_inference()


def _uncounted() -> contextlib.AbstractContextManager[None]:
    """Within it a checkpoint of the task around the module counts no tensors that are kept.

    It compares how many there are in its own two calls, of which only the first one is repeated.
    """
    return saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


def _is_trial(arguments: Any, unit: nn.Module) -> bool:
    """Whether tensors have no values, as where the memory of a layout is looked for."""
    tensors = [each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)]
    # Of parameters not those on `meta`: frozen ones are there that are held in another form.
    return any(each.is_meta for each in tensors) or any(
        isinstance(getattr(each, "_local_tensor", each), FakeTensor)
        for each in itertools.chain(tensors, unit.parameters())
    )


def _lacks_memory(error: Exception) -> bool:
    """Whether an error says that memory is full; PyTorch has no type of its own on processors."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "DefaultCPUAllocator" in str(error)


class _Drawn:
    """The states of PyTorch's generators, on the processor and where some tensors are."""

    def __init__(self, values: Any) -> None:
        """`values` have the tensors, as far as there are any."""
        self._type = next(
            (
                each.device.type
                for each in tree_leaves(values)
                if isinstance(each, torch.Tensor) and each.device.type not in ("cpu", "meta")
            ),
            "meta",
        )
        self._state = torch.get_rng_state()
        self._devices, self._states = get_device_states(values)

    def restore(self) -> None:
        """Give the generators these states."""
        torch.set_rng_state(self._state)
        set_device_states(self._devices, self._states, device_type=self._type)


def _differ(first: Any, second: Any) -> bool:
    """Whether two outputs of a module have other numbers, beyond those of another order of sums."""
    tensors = [
        [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        for output in (first, second)
    ]
    if len(tensors[0]) != len(tensors[1]):
        return True
    with _disable_current_modes(), torch.no_grad():
        return any(map(_is_another, *tensors))


def _is_another(first: torch.Tensor, second: torch.Tensor) -> bool:
    first, second = (getattr(each, "to_local", each.detach)().detach() for each in (first, second))
    if first.shape != second.shape or first.dtype is not second.dtype:
        return True
    if not first.is_floating_point() or first.layout is not torch.strided or not first.numel():
        return False
    first, second = (each.nan_to_num() for each in (first, second))
    tolerance = _tolerance(first.device.type, first.dtype)
    # In float32 at least: the squares of half precision overflow.
    precision = torch.promote_types(first.dtype, torch.float32)
    distance = torch.linalg.vector_norm(first - second, dtype=precision)
    return bool(distance > tolerance * torch.linalg.vector_norm(first, dtype=precision))


def _tolerance(device_type: str, dtype: torch.dtype) -> float:
    """The most difference of two outputs that are of the same numbers, as a part of them.

    >>> _tolerance("cpu", torch.bfloat16), _tolerance("cuda", torch.float32)
    (1e-05, 0.001)
    >>> _tolerance("cuda", torch.bfloat16)
    0.03125
    """
    if device_type == "cpu":
        return _TOLERANCE
    return max(_GPU_TOLERANCE, _ROUNDINGS * torch.finfo(dtype).eps)


def _contexts(unit: nn.Module, keep_products: bool, given: Any) -> tuple[Any, Any]:
    """What the two calls run within; `given` are the arguments of both."""
    before = HostGenerators.now() if torch.is_grad_enabled() else None
    kept: _Kept = []
    changes: list[Changes] = []
    first: Any = _noting(unit, given, kept, changes)
    second: Any = _Repeating(kept, changes, before)
    if not keep_products:
        return first, second
    keeping, using = create_selective_checkpoint_contexts(output_policy)  # type: ignore[no-untyped-call]  # PyTorch's own
    # The buffers are copied outside of what counts the operators of a call.
    return _within(first, keeping), _within(second, _refusing_changes(unit), using)


def output_policy(
    context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Whether the output of an operator is kept.

    One that draws random numbers, such as attention with dropout, is not: if the second call left
    it out, whatever draws after it would get other numbers than in the first.
    """
    keeps = operator in _PRODUCTS and not _draws(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operator: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("dropout_p", 0.0))


@contextlib.contextmanager
def _within(*contexts: Any) -> Iterator[None]:
    with contextlib.ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context)
        yield


@contextlib.contextmanager
def _refusing_changes(unit: nn.Module) -> Iterator[None]:
    """Say what to do where a kept output is no longer what the operator returned.

    Raises:
        TaskError: the model has changed it in place.
    """
    try:
        yield
    except RuntimeError as error:
        if _CHANGED not in str(error):
            raise
        raise TaskError(
            'checkpoint_activations="operators": the output of a matrix product or convolution '
            f"in a {type(unit).__name__} was changed in place (as nn.ReLU(inplace=True) does), so "
            "that it cannot be kept; use inplace=False there, or set checkpoint_activations = true"
        ) from error


@contextlib.contextmanager
def _noting(unit: nn.Module, given: Any, kept: _Kept, changes: list[Changes]) -> Iterator[None]:
    """Keep the values of the buffers that may change, and of attributes that have changed.

    So are containers and objects in what the unit is `given`, such as a list of losses.
    """
    if not torch.is_grad_enabled():  # there is no second call
        yield
        return
    tables = [(module._buffers, dict(module._buffers)) for module in unit.modules()]
    before = [
        (table, name, buffer, _version(buffer), buffer.clone())
        for table, buffers in tables
        for name, buffer in buffers.items()
        if buffer is not None
    ]
    named, *given = given
    attributes = KeptValues(unit.modules(), (), given, named)
    yield
    changes.append(attributes.changed())
    for table, name, buffer, version, values in before:
        # The versions of running statistics stay: batch_norm does not declare what it changes. A
        # comparison of values would wait for the device.
        may_change = buffer.is_floating_point() or _version(buffer) != version
        if may_change or table.get(name) is not buffer:
            kept.append((table, name, values))
    for table, buffers in tables:
        for name, now in table.items():
            if now is not None and buffers.get(name) is None:  # the call has made it
                kept.append((table, name, buffers.get(name, _ABSENT)))


def _version(buffer: torch.Tensor) -> int:
    """How often a buffer was changed; 0 for one that was made in inference mode, and cannot be."""
    return 0 if buffer.is_inference() else buffer._version


def _put(table: dict[str, torch.Tensor | None], name: str, buffer: Any) -> None:
    """Have a module have a buffer, or not."""
    if buffer is _ABSENT:
        table.pop(name, None)
    else:
        table[name] = buffer


class _Repeating:
    """Has the kept values in place of what the first call has made of them.

    It can be entered again: a schedule that computes the gradients of inputs and of parameters one
    after the other (`zero_bubble`) calls the module for each.
    """

    def __init__(self, kept: _Kept, changes: list[Changes], before: HostGenerators | None) -> None:
        """`before` are the generators before the first call; PyTorch sets its own back itself."""
        self._kept = kept
        self._changes = changes
        self._before = before
        self._attributes: list[Changes] = []
        self._after: HostGenerators | None = None
        self._now: _Kept = []

    def __enter__(self) -> None:
        if self._before is not None:
            self._after = HostGenerators.now()
            self._before.restore()
        self._now = [(table, name, table.get(name, _ABSENT)) for table, name, _ in self._kept]
        for table, name, values in self._kept:
            # A copy, as the values are needed again if the backward pass is.
            _put(table, name, values.clone() if isinstance(values, torch.Tensor) else values)
        self._attributes = [each.exchange() for each in self._changes]

    def __exit__(self, *_: object) -> None:
        for each in self._attributes:
            each.exchange()
        if self._after is not None:
            self._after.restore()
        for table, name, buffer in self._now:
            _put(table, name, buffer)
