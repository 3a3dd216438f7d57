"""Find which modules a model calls for every batch: only those can be sharding units.

`fully_shard` gathers the parameters of a unit when the unit is called, on all ranks together. A
rank that does not call it, such as an expert that no example of its batch chose, would keep the
others waiting, or would seem to gather it with its next unit, and give them other parameters.

Code cannot be proved to call a module always. So a few examples pass through the model before
training, and what looks conditional is gathered with the root (`find_units`). While training, each
rank compares its calls with those that it saw then, before it gathers anything (`CallOrder`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.errors import TaskError
from isthmus.task.scoring.kept_values import KeptValues
from isthmus.task.scoring.recomputation import watch_repeats
from isthmus_datacenter.rank_messages import RankMessages

log = logging.getLogger(__name__)

REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether this PyTorch can reduce gradients that only some ranks have."""

TRY_EXAMPLES = (2, 3)
"""Sizes of the batches that are tried: rows are divided alike by chance in one of them at most."""

_NOT_ALWAYS = "which a batch does not call, or not in the order of others"
_REMEDY = (
    "ranks gather the parameters of a module when all of them call it; have the task's "
    "shard_units(model) return modules that every batch calls, or [] to gather the whole model"
)


@dataclasses.dataclass(frozen=True)
class SharedCalls:
    """Units that every batch calls, and the calls in the order of a forward pass."""

    units: Sequence[nn.Module]
    training: Sequence[int] | None
    """Indices of the units; None if the order is not known, and so not compared."""
    evaluation: Sequence[int] | None
    notes: Sequence[str] = ()
    """For the user, on modules that are gathered with the root."""


@dataclasses.dataclass(frozen=True)
class _Findings:
    """What one rank has found of the candidates, without the modules, to compare with others."""

    kept: Sequence[int] = ()
    training: Sequence[int] | None = None
    evaluation: Sequence[int] | None = None
    notes: Sequence[str] = ()
    refusal: str | None = None


_FINDINGS: RankMessages[_Findings] = RankMessages("the calls of modules", _Findings, 1 << 22)


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of a candidate."""

    index: int
    rows: Fraction | None
    """Size of the first dimension of its first tensor, for each example of the batch."""
    after_decision: bool
    """Whether Python read values of tensors since the forward pass began."""
    follows_decision: bool
    """Whether Python read values, or drew random numbers, since the candidate called before."""
    always: bool = False
    """For a part: whether a candidate called it, and Python had done neither until then."""


def find_units(
    model: nn.Module,
    candidates: Sequence[Sequence[nn.Module]],
    try_batch: Callable[[int, bool], object],
    *,
    given: bool,
    parts: Sequence[Sequence[nn.Module]] = (),
) -> SharedCalls:
    """Select the candidates that every batch calls. All ranks call this together.

    Args:
        model: the whole model, on one device.
        candidates: groups of modules, each of one container, of which all or none become units.
        try_batch: passes a number of examples through the model, in training or evaluation mode.
        given: whether the task chose the candidates, so that none may be left out.
        parts: groups of modules within one candidate each, of which all or none become units,
            too: if the candidate decides nothing. Those that become units are first.

    Raises:
        TaskError: a candidate that the task chose is not called by every batch, or the model
            changes its parameters.
    """
    candidates = [*parts, *candidates]
    modules = [module for group in candidates for module in group]
    chosen = range(sum(map(len, parts)), len(modules))
    own = _find(model, candidates, modules, try_batch, given=given, parts=len(parts))
    by_rank = _FINDINGS.all_gather(own)
    refusal = next((each.refusal for each in by_rank if each.refusal is not None), None)
    if refusal is not None:
        raise TaskError(refusal)
    # The model may have failed on some ranks only, whose examples differ.
    if modules and any(each != by_rank[0] for each in by_rank):
        note = "the model is gathered as one, because its ranks call different modules"
        own = _Findings(chosen) if given else _Findings(notes=[note])
    units = [modules[index] for index in own.kept]
    return SharedCalls(units, own.training, own.evaluation, own.notes)


def _find(
    model: nn.Module,
    candidates: Sequence[Sequence[nn.Module]],
    modules: Sequence[nn.Module],
    try_batch: Callable[[int, bool], object],
    *,
    given: bool,
    parts: int,
) -> _Findings:
    """What the batches that are tried show of the candidates, on this rank.

    `parts` is the number of groups, the first ones, that are within others.
    """
    within = sum(map(len, candidates[:parts]))
    everything = _Findings(range(within, len(modules)))
    try:
        trained = [
            calls
            for examples in TRY_EXAMPLES
            for calls in _record(model, modules, examples, True, try_batch, within)
        ]
        evaluated = _record(model, modules, TRY_EXAMPLES[0], False, try_batch, within)
    except _ParameterChangedError as changed:
        return _Findings(refusal=changes_parameter(changed.name))
    except Exception as error:  # noqa: BLE001 - it may work with batches of the job's size only
        why = " ".join(str(error).split())[:200] or type(error).__name__
        note = (
            f"the model is gathered as one, because it failed with a batch of a few examples: {why}"
        )
        return everything if given or not modules else _Findings(notes=[note])
    if not trained:  # the task calls parts of the model only
        return everything
    kept: list[int] = []
    notes = []
    ends = list(itertools.accumulate(map(len, candidates)))
    groups = [range(end - len(group), end) for end, group in zip(ends, candidates, strict=True)]
    for indices in groups[:parts]:
        if _always_calls(indices, trained, evaluated):
            kept += indices
    groups = groups[parts:]
    conditionals = [_conditional(each, trained, evaluated, given=given) for each in groups]
    if any(each is not None for each in conditionals) and not given:
        # The decision that left some out may be the one that led to others.
        decided = {call.index for call in itertools.chain(*trained) if call.after_decision}
        kept.clear()  # parts of what is gathered with the root, and of others for simplicity
        for number, indices in enumerate(groups):
            if conditionals[number] is None:
                conditionals[number] = next((each for each in indices if each in decided), None)
    for indices, conditional in zip(groups, conditionals, strict=True):
        if conditional is None:
            kept += indices
            continue
        name = name_in(model, modules[conditional])
        if given:
            return _Findings(refusal=f"shard_units() returned {name!r}, {_NOT_ALWAYS}; {_REMEDY}")
        notes.append(
            f"{name!r} and the modules of the same list are gathered with the rest of the model, "
            "because a batch may not call all of them"
        )
    if notes and not REDUCES_UNUSED:
        return _Findings(refusal=f"{notes[0]}, for which ranks need PyTorch 2.13 or newer")
    position = {index: number for number, index in enumerate(kept)}
    training, evaluation = (
        [position[call.index] for call in calls[0] if call.index in position] if calls else None
        for calls in (trained, evaluated)
    )
    return _Findings(kept, training, evaluation, notes)


def refuse_changed_parameters(model: nn.Module, try_batch: Callable[[int, bool], object]) -> None:
    """Refuse a model whose forward pass changes a parameter, where a few examples show it.

    Raises:
        TaskError: it does.
    """
    try:
        _record(model, [], TRY_EXAMPLES[0], True, try_batch)
    except _ParameterChangedError as changed:
        raise TaskError(changes_parameter(changed.name)) from None
    except Exception as error:  # noqa: BLE001 - it may work with batches of the job's size only
        log.debug("parameters that the forward pass changes were not looked for: %s", error)


def changes_parameter(name: str) -> str:
    """The sentence for a parameter that a forward pass changes."""
    return (
        f"the forward pass of the model changes its parameter {name!r}, and here it changes a copy "
        "that is gathered for the pass and then forgotten; make it a buffer, or train on one rank "
        "in float32"
    )


def name_in(model: nn.Module, module: nn.Module) -> str:
    """The name of a module in a model."""
    names: dict[nn.Module, str] = {each: name for name, each in model.named_modules()}
    return names[module]


def _conditional(
    indices: Sequence[int],
    trained: Sequence[Sequence[_Call]],
    evaluated: Sequence[Sequence[_Call]],
    *,
    given: bool,
) -> int | None:
    """Index of a module of a container that some batch may not call; None if there is none."""
    for passes in (trained, evaluated):
        calls = [[call for call in each if call.index in indices] for each in passes]
        for each in calls:
            order = [call.index for call in each]
            if order != [call.index for call in calls[0]]:
                # One of the two may be empty; if none is missing, their order differs.
                missing = {*order} ^ {call.index for call in calls[0]}
                return next(iter(missing or order))
            # In evaluation, parts that only training needs are left out for all batches alike.
            for index in indices:
                if passes is trained and index not in order:
                    return index
            # The task knows its own units better than what follows, which may be wrong.
            if given:
                continue
            rows = {call.rows for call in each}
            for number, (call, first) in enumerate(zip(each, calls[0], strict=True)):
                if number and call.follows_decision:
                    return call.index
                # A part of the examples, or of their tokens, was chosen: it may be none. Each of
                # two batches has the same share of them by chance only.
                if call.after_decision and (len(rows) > 1 or call.rows != first.rows):
                    return call.index
    return None


def _always_calls(
    indices: Sequence[int],
    trained: Sequence[Sequence[_Call]],
    evaluated: Sequence[Sequence[_Call]],
) -> bool:
    """Whether a candidate calls all of its parts once, in one order, and decides nothing before."""
    passes = [[call for call in each if call.index in indices] for each in (*trained, *evaluated)]
    orders = [[call.index for call in each] for each in passes]
    return (
        sorted(orders[0]) == list(indices)
        and all(order == orders[0] for order in orders)
        and all(call.always for call in itertools.chain(*passes))
    )


def _record(
    model: nn.Module,
    modules: Sequence[nn.Module],
    examples: int,
    training: bool,
    try_batch: Callable[[int, bool], object],
    parts: int = 0,
) -> list[list[_Call]]:
    """The calls of the modules in each forward pass of the model, for one batch.

    The first `parts` of them are within others.
    """
    recorder = _Recorder(model, examples)
    handles = [
        model.register_forward_pre_hook(lambda *_: recorder.begin(), prepend=True),
        model.register_forward_hook(lambda *_: recorder.finish(), always_call=True),
    ]
    for index, module in enumerate(modules):
        if index < parts:
            part = recorder.enter_part(index)
            handles.append(module.register_forward_pre_hook(part, prepend=True))
            continue
        handles.append(
            module.register_forward_pre_hook(recorder.enter(index), with_kwargs=True, prepend=True)
        )
        handles.append(module.register_forward_hook(lambda *_: recorder.leave(), always_call=True))
    try:
        with _unchanged(model), _ReadInPython(recorder), _ReadByOperator(recorder):
            model.train(training)
            try_batch(examples, training)
    finally:
        for handle in handles:
            handle.remove()
    if recorder.changed is not None:
        raise _ParameterChangedError(recorder.changed)
    return recorder.passes


class _ParameterChangedError(Exception):
    """The forward pass of a model has changed a parameter in place."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Recorder:
    """Notes calls, and when Python could have decided by values which call is next."""

    def __init__(self, model: nn.Module, examples: int) -> None:
        self._parameters = dict(model.named_parameters())
        self._versions: dict[str, int] = {}
        self.changed: str | None = None
        """A parameter that was changed while the model was called."""
        self._examples = examples
        self.passes: list[list[_Call]] = []
        self._open = False
        self._depth = 0
        """Candidates that are being called: what they decide inside is their own matter."""
        self._decided = False
        self._decided_since = False
        self._decided_inside = False
        self._random: object = None
        """State of Python's generator when the last candidate ended, or the model was called."""
        self._random_inside: object = None
        """State of Python's generator when the candidate that is being called began."""

    def begin(self) -> None:
        self.passes.append([])
        self._open = True
        self._depth = 0
        self._decided = self._decided_since = False
        self._random = random.getstate()
        self._versions = {name: each._version for name, each in self._parameters.items()}

    def finish(self) -> None:
        self._open = False
        for name, each in self._parameters.items():
            if each._version != self._versions.get(name, each._version):
                self.changed = name

    def decide(self) -> None:
        if self._open and not self._depth:
            self._decided = self._decided_since = True
        self._decided_inside = True

    def enter(self, index: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._open:
                return
            if not self._depth:
                if random.getstate() != self._random:
                    self.decide()
                self._decided_inside = self._decided
                self._random_inside = random.getstate()
            tensors = [*args, *kwargs.values()]
            sizes = (
                Fraction(len(each), self._examples)
                for each in tensors
                if isinstance(each, torch.Tensor) and each.ndim
            )
            call = _Call(index, next(sizes, None), self._decided, self._decided_since)
            self.passes[-1].append(call)
            self._depth += 1

        return hook

    def leave(self) -> None:
        if not self._open:
            return
        self._depth -= 1
        if not self._depth:
            self._decided_since = False
            self._random = random.getstate()

    def enter_part(self, index: int) -> Callable[..., None]:
        """Note the call of a module within a candidate, which contains no candidates."""

        def hook(*_: object) -> None:
            if not self._open:
                return
            drew = random.getstate() != self._random_inside
            always = bool(self._depth) and not self._decided_inside and not drew
            call = _Call(index, None, self._decided, self._decided_since, always)
            self.passes[-1].append(call)

        return hook


class _ReadByOperator(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch has no types for it
    """Notes operators whose result, or its size, Python can decide by."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = func.tags
        if torch.Tag.data_dependent_output in tags:
            self._recorder.decide()
        elif torch.Tag.dynamic_output_shape in tags:
            # Indexing depends on values only where an index is a mask.
            masks = [
                each
                for each in (args[1] if func is torch.ops.aten.index.Tensor else [])
                if each is not None and each.dtype in (torch.bool, torch.uint8)
            ]
            if masks or func is not torch.ops.aten.index.Tensor:
                self._recorder.decide()
        return func(*args, **(kwargs or {}))


class _ReadInPython(TorchFunctionMode):
    """Notes methods that give values to Python without an operator."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _GIVE_VALUES:
            self._recorder.decide()
        return func(*args, **(kwargs or {}))


_GIVE_VALUES = frozenset(
    {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.item}
)


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore what a forward pass may change: modes, buffers and attributes of the modules."""
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    kept = KeptValues(modules)
    buffers = [
        (module._buffers, name, buffer, None if buffer is None else buffer.clone())
        for module in modules
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, before in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(before)
        kept.undo()
        with torch.no_grad():
            for table, name, buffer, values in buffers:
                table[name] = buffer
                if buffer is not None:
                    assert values is not None
                    buffer.copy_(values)


class CallOrder:
    """Compares the calls of this rank's units with those of the batches that were tried.

    Without a message to other ranks: all ranks have tried the same examples.
    """

    def __init__(self, root: nn.Module, calls: SharedCalls, remedy: str = _REMEDY) -> None:
        """Compare from now on; after `fully_shard` was applied, whose hooks then come later.

        `remedy` says what to do about other calls.
        """
        self._remedy = remedy
        self._root = root
        self._calls = calls
        self._names = [name_in(root, unit) for unit in calls.units]
        self._expected: Sequence[int] | None = None
        self._next = 0
        root.register_forward_pre_hook(lambda *_: self._begin(), prepend=True)
        root.register_forward_hook(lambda *_: self._finish())
        for index, unit in enumerate(calls.units):
            unit.register_forward_pre_hook(self._called(index), prepend=True)
        watch_repeats(root, self._begin_call)

    def _begin(self) -> None:
        if _recomputes():
            return
        self._expected = self._calls.training if self._root.training else self._calls.evaluation
        self._next = 0

    def _called(self, index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if self._expected is None or _recomputes():
                return
            if self._next == len(self._expected) or self._expected[self._next] != index:
                self._refuse(index)
            self._next += 1

        return hook

    def _finish(self) -> None:
        if self._expected is not None and not _recomputes() and self._next < len(self._expected):
            self._refuse(self._expected[self._next])

    def _begin_call(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Note where a call begins, whose repetition has to call the same units from there on."""
        begin = self._next

        @contextlib.contextmanager
        def repeat() -> Iterator[None]:
            end = self._next
            self._next = begin
            yield
            if self._expected is not None and self._next < end:
                self._refuse(self._expected[self._next])

        return repeat

    def _refuse(self, index: int) -> None:
        self._expected = None
        raise TaskError(f"the model has {self._names[index]!r}, {_NOT_ALWAYS}; {self._remedy}")


def _recomputes() -> bool:
    """Whether a module is called in the backward pass, to compute its activations again."""
    graph_task: int = torch._C._current_graph_task_id()
    return graph_task != -1
