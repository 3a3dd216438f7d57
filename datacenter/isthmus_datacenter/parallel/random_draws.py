"""Random draws of a tensor-parallel model: dropout of sharded activations differs between ranks.

Tensor-parallel ranks have generators in the same state, because what is replicated has to stay
identical: the mask of a dropout that all of them apply to the same activations. Of sharded
activations each rank has another part, and with the same generator all parts would get the same
mask. So draws for sharded activations come from a stream of the rank's own, as in Megatron-LM
(Shoeybi et al. 2019) and in the generator of PyTorch's DTensor.

Which draws these are is not declared by models. `FixedDraws` records the shape of every draw of a
sample, in the whole and in the sharded model: a sharded activation is smaller than the whole one.
A rank's own stream begins anew for each call, from the state of the common generator and the rank.
So only the common state has to be kept in checkpoints, and recomputation repeats the draws.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus_datacenter.parallel.called_modules import called_modules
from isthmus_datacenter.parallel.equivalence_check import PartitionError

DrawsByModule = Mapping[str, Sequence[tuple[int, ...]]]
"""Shapes of the random draws in the `forward()` of each module itself, without its children."""

_MAX_SEED = 1 << 62


class FixedDraws(TorchDispatchMode):
    """Within it random numbers are their expected values, and dropout is off; draws are recorded.

    A whole and a sharded model compute the same only without randomness. The models stay in
    training mode, in which they may compute something else than in evaluation.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's own
        self.draws: dict[str, list[tuple[int, ...]]] = {}
        """Filled in forward passes."""
        self.recording = True
        self._model = model
        self._names = {module: name for name, module in model.named_modules()}
        self._called: Sequence[nn.Module] = ()
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> FixedDraws:
        self._called = self._hooks.enter_context(called_modules(self._model))
        super().__enter__()  # type: ignore[no-untyped-call]  # PyTorch's own
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # PyTorch's own
        self._hooks.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation, without its randomness."""
        kwargs = kwargs or {}
        names = [each.name for each in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if "dropout_p" in names:  # of attention, and of its backward pass
            if given.get("dropout_p", 0.0) > 0:
                self._record((*given["query"].shape[:-1], given["key"].shape[-2]))
                given["dropout_p"] = 0.0
                args, kwargs = (), given
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout_backward.default:
            return func(given["grad_output"], given["mask"], 1.0)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:
            inputs = given["input"]
            if given["train"]:
                self._record(inputs.shape)
            return inputs.clone(), torch.ones_like(inputs, dtype=torch.bool)
        output = func(*args, **kwargs)
        if isinstance(output, torch.Tensor):
            self._record(
                output._local_tensor.shape if isinstance(output, DTensor) else output.shape
            )
            expected = _expected(func.overloadpacket.__name__, given)
            if expected is not None:
                output.copy_(expected) if isinstance(expected, torch.Tensor) else output.fill_(
                    expected
                )
        return output

    def _record(self, shape: Sequence[int]) -> None:
        if self.recording:
            # A draw outside of modules' calls, as in a hook of the model, is the model's own.
            name = self._names[self._called[-1]] if self._called else ""
            self.draws.setdefault(name, []).append(tuple(shape))


def _expected(name: str, given: Mapping[str, Any]) -> Any:
    """The expected value of a random operation, a number or a tensor; None to leave its result."""
    match name:
        # Not 1: dropout divides by this probability.
        case "bernoulli_":
            return given.get("p", 0.5)
        case "bernoulli":
            return given.get("p", given["self"])
        case "rand" | "rand_like":
            return 0.5
        case "randn" | "randn_like":
            return 0.0
        case "uniform_":
            return 0.5 * (float(given.get("from", 0.0)) + float(given.get("to", 1.0)))
        case "normal_":
            return float(given.get("mean", 0.0))
        case "exponential_":
            return 1.0
    return None


@dataclasses.dataclass(frozen=True)
class DrawingModules:
    """Names of the modules that draw random numbers in their own forward()."""

    apart: frozenset[str] = frozenset()
    """Modules that draw for sharded activations."""
    alike: frozenset[str] = frozenset()
    """Modules that draw for activations that are the same on all ranks."""


def drawing_modules(whole: DrawsByModule, sharded: DrawsByModule) -> DrawingModules:
    """Compare the draws of a whole and of a sharded model.

    Raises:
        PartitionError: a module draws for sharded and for whole activations, or not equally often.
    """
    apart = set()
    for name in sorted({*whole, *sharded}):
        before = whole.get(name, ())
        after = sharded.get(name, ())
        if len(before) != len(after):
            raise PartitionError(
                f"module {name!r} draws random numbers {len(after)} times, and {len(before)} times "
                "as a whole",
                "set tensor_parallel = 1",
            )
        smaller = {first != second for first, second in zip(before, after, strict=True)}
        if len(smaller) > 1:
            raise PartitionError(
                f"module {name!r} draws random numbers (dropout) for activations that are sharded "
                "and for others that are whole",
                "use a module for each, such as two nn.Dropout, or set tensor_parallel = 1",
            )
        if smaller == {True}:
            apart.add(name)
    return DrawingModules(frozenset(apart), frozenset({*whole} - apart))


def draw_apart(
    model: nn.Module, drawing: DrawingModules, tensor_rank: int, device: torch.device
) -> None:
    """Have modules draw from a stream of this rank, and those within them from the common one.

    Their forward() is replaced instead of using hooks, so that an exception leaves the generators
    right.
    """
    if not drawing.apart:
        return
    streams = _Streams(tensor_rank, device)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in sorted(drawing.apart):
        # Compiled code draws all its seeds at once, so the generator is changed outside of it.
        apart = _within(streams.apart, modules[name])
        modules[name].forward = torch.compiler.disable(apart)  # type: ignore[no-untyped-call]  # PyTorch's own
        for inner, module in modules[name].named_modules(prefix=name):
            if inner in drawing.alike:
                module.forward = _within(streams.alike, module)


def _within(
    context: Callable[[], contextlib.AbstractContextManager[None]], module: nn.Module
) -> Callable[..., Any]:
    """The module's forward(), in training within a context."""
    forward = module.forward

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return forward(*args, **kwargs)
        with context():
            return forward(*args, **kwargs)

    return call


class _Streams:
    """The common and the rank's own random numbers of a device."""

    def __init__(self, tensor_rank: int, device: torch.device) -> None:
        self._rank = tensor_rank
        self._generator = torch.default_generator
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generator = torch.cuda.default_generators[index]
        self._is_device = device.type == "cuda"
        self._common: torch.Tensor | None = None
        """State of the common stream while the generator has the rank's own."""

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Within it the generator draws from the rank's own stream."""
        if self._common is not None:
            yield
            return
        generator = self._generator
        if self._is_device:
            # Read from the host's copy of the state: drawing would wait for the device.
            start = (generator.initial_seed(), generator.get_offset())
            # Calls without a draw in between must not begin with the same state.
            generator.set_offset(start[1] + 4)
        else:
            start = (int(torch.randint(_MAX_SEED, (), generator=generator)), 0)
        self._common = generator.get_state()
        text = "/".join(map(str, (*start, self._rank)))
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(self._common)
            self._common = None

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        """Within it the generator draws from the common stream."""
        if self._common is None:
            yield
            return
        own = self._generator.get_state()
        self._generator.set_state(self._common)
        self._common = None
        try:
            yield
        finally:
            self._common = self._generator.get_state()
            self._generator.set_state(own)
