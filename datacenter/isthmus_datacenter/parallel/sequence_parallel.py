"""Keep activations between the layers of a block in shards along the sequence.

With tensor parallelism alone each rank has all of what passes between attentions and MLPs: the
residual stream, and what norms and dropout make of it. *Sequence parallelism* (Korthikanti et al.
2022) gives each rank a part of the positions there. Where a layer's inputs were whole they are now
gathered, and where its partial outputs were summed the sum is scattered, so that no more is sent.

Blocks are the children of the model's containers, such as `nn.ModuleList`, that have an attention
whose heads are sharded. The hidden states are divided before the first block of a container and
gathered after the last one, so that embeddings, heads and the task see whole sequences. Hidden
states are (batch, positions, width). That a block computes the same on a part of the positions is
compared for a sample, like the rest of a partitioned model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from isthmus.errors import TaskError
from isthmus.task.scoring.blocks import outermost_containers

POSITIONS = Shard(1)
"""The part of the positions that a rank has of hidden states."""


@dataclasses.dataclass(frozen=True)
class BlockRun:
    """Blocks of one stage that pass hidden states on to each other, in order."""

    stage: nn.Module
    blocks: Sequence[nn.Module]


@dataclasses.dataclass(frozen=True)
class SequenceBlocks:
    """The blocks between whose layers activations are sharded along the sequence."""

    runs: Sequence[BlockRun]
    modules: frozenset[int]
    """By `id`, all modules within blocks."""

    @classmethod
    def find(
        cls, model: nn.Module, stages: Sequence[nn.Module], attending: Set[int], key: str
    ) -> SequenceBlocks:
        """Find the blocks of a model.

        Args:
            model: the whole model.
            stages: its pipeline stages, between which hidden states are whole.
            attending: by `id`, modules whose attention can be partitioned.
            key: of the job, for messages.

        Raises:
            TaskError: there are none, or a container has also children of another kind.
        """
        runs: list[BlockRun] = []
        modules: set[int] = set()
        for container in outermost_containers(model):
            blocks = list(container.children())
            inside = [{id(each) for each in block.modules()} for block in blocks]
            attend = [not attending.isdisjoint(each) for each in inside]
            if not any(attend):
                continue
            if not all(attend):
                kind = type(blocks[attend.index(False)]).__name__
                raise TaskError(
                    f"{key}: a {kind} is in one list with blocks whose attention can be "
                    f"partitioned, and has none of its own; remove {key}"
                )
            modules.update(*inside)
            for stage in stages:
                members = {id(each) for each in stage.modules()}
                own = [block for block in blocks if id(block) in members]
                if own:
                    runs.append(BlockRun(stage, own))
        if not runs:
            needed = "sharded by heads" if key == "sequence_parallel" else "shared by positions"
            raise TaskError(
                f"{key}: no block of the model has an attention that can be {needed}; remove {key}"
            )
        return cls(runs, frozenset(modules))

    def is_block(self, module: nn.Module) -> bool:
        """Whether a module is a block itself, and not a part of one."""
        return any(module is block for run in self.runs for block in run.blocks)

    def styles(self) -> Iterator[tuple[nn.Module, ParallelStyle]]:
        """What divides the hidden states before the first block of each run, and gathers them."""
        for run in self.runs:
            yield run.stage, ChecksCalls(run.blocks)
            yield run.blocks[0], DividesPositions()
            yield run.blocks[-1], GathersOutputs()


class ChecksCalls(ParallelStyle):
    """Refuses a forward pass of a stage that calls its blocks unlike the pass that was compared.

    The sample passes through all of them, and layerdrop skips some in some steps only: positions
    would be gathered that nobody has divided, or the ranks would go on with different ones. And
    what a model does with hidden states between two blocks, such as a mean over positions where
    there is padding, it does with a rank's part.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self._blocks = blocks
        self._divided = False
        """Whether each rank has a part of the positions now."""
        self._output: torch.Tensor | None = None
        """Hidden states that the last block has returned."""
        self._version = 0
        """Version of these hidden states, which changes with them."""
        self._passed_on: dict[tuple[int, bool], bool] = {}
        """By block and mode, whether in the comparison it got what the one before had returned."""
        self._compared = False

    def end_comparison(self) -> None:
        """Refuse from now on what was not compared."""
        self._compared = True

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda *_: self._begin())
        module.register_forward_hook(lambda *_: self._finish())
        for block in self._blocks:
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            block.register_forward_hook(lambda block, args, output: self._leave(block, output))
        return module

    def _begin(self) -> None:
        # A pass that failed may have ended between two blocks.
        self._divided = False
        self._output = None

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        # A recomputation may end as soon as it has what the backward pass needs.
        if _recomputes():
            return
        if self._divided == (block is self._blocks[0]):
            raise TaskError(_LEFT_OUT)
        if self._divided:
            self._compare(block, first_tensor(args, kwargs))
        self._output = None
        self._divided = block is not self._blocks[-1]

    def _compare(self, block: nn.Module, hidden: torch.Tensor) -> None:
        """Compare the inputs of a block with the outputs of the one before.

        Raises:
            TaskError: they are others, and were the same in the comparison.
        """
        output = self._output
        # Hidden states have another type where `fully_shard` has converted them.
        if output is None or not _is_plain(hidden) or hidden.dtype != output.dtype:
            return
        # By address: `fully_shard` passes them on as views.
        is_same = hidden.data_ptr() == output.data_ptr() and hidden._version == self._version
        key = (id(block), block.training)
        if not self._compared:
            self._passed_on[key] = is_same and self._passed_on.get(key, True)
        elif self._passed_on.get(key, False) and not is_same:
            raise TaskError(_CHANGED)

    def _leave(self, block: nn.Module, output: Any) -> None:
        if _recomputes() or block is self._blocks[-1]:
            return
        first = output[0] if isinstance(output, tuple) and output else output
        if _is_plain(first):
            # Until the next block, which gets it: without it the address may be another tensor's.
            self._output = first
            self._version = first._version

    def _finish(self) -> None:
        self._output = None
        if self._divided:
            raise TaskError(_LEFT_OUT)


_LEFT_OUT = (
    "positions are divided before the first block of a list and gathered after the last one, and "
    "the model left out one of these two, or called them in another order (as layerdrop does); "
    "have it call both, or remove sequence_parallel or context_parallel"
)
_CHANGED = (
    "the model changes hidden states between two blocks, where each rank has a part of the "
    "positions, and did not for the two examples by which it was compared with the whole model; "
    "have it do the same for all batches, or remove sequence_parallel or context_parallel"
)


def _recomputes() -> bool:
    """Whether a backward pass calls the model."""
    return torch._C._current_graph_task_id() != -1


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor that has an address and a version."""
    return type(value) is torch.Tensor and not value.is_inference()


class DividesPositions(ParallelStyle):
    """Gives a module the rank's part of the positions of its first tensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def divide(hidden: torch.Tensor) -> torch.Tensor:
            if hidden.ndim != 3 or hidden.shape[1] % device_mesh.size():
                raise TaskError(
                    f"hidden states of shape {tuple(hidden.shape)} have no positions that "
                    f"{device_mesh.size()} ranks can share in equal parts; pad the sequences, or "
                    "remove sequence_parallel or context_parallel"
                )
            return _redistributed(hidden, device_mesh, Replicate(), POSITIONS)

        module.register_forward_pre_hook(
            lambda module, args, kwargs: _with_first(args, kwargs, divide), with_kwargs=True
        )
        return module


class ChecksHiddenStates(ParallelStyle):
    """Refuses inputs of a layer that are no hidden states, before ranks gather their positions.

    An expert gets the words that chose it, of which each rank has another number: an exchange of
    different sizes ends the ranks, or has them wait for each other.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def check(hidden: torch.Tensor) -> torch.Tensor:
            if hidden.ndim != 3:
                raise TaskError(
                    f"sequence_parallel: a {type(module).__name__} in a block gets inputs of shape "
                    f"{tuple(hidden.shape)} and not (batch, positions, width), such as the words "
                    "of an expert; set sequence_parallel = false"
                )
            return hidden

        module.register_forward_pre_hook(
            lambda module, args, kwargs: _with_first(args, kwargs, check),
            with_kwargs=True,
            prepend=True,
        )
        return module


class GathersPositions(ParallelStyle):
    """Gives a module, such as an attention, all positions of its first tensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(hidden: torch.Tensor) -> torch.Tensor:
            return _redistributed(hidden, device_mesh, POSITIONS, Replicate())

        module.register_forward_pre_hook(
            lambda module, args, kwargs: _with_first(args, kwargs, gather), with_kwargs=True
        )
        return module


class GathersOutputs(ParallelStyle):
    """Gathers all positions of a module's output, of a tuple those of the first tensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(hidden: torch.Tensor) -> torch.Tensor:
            return _redistributed(hidden, device_mesh, POSITIONS, Replicate())

        def gather_output(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, torch.Tensor):
                return gather(output)
            if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
                return (gather(output[0]), *output[1:])
            raise TaskError(
                f"a block whose positions are shared returns {type(output).__name__}, and neither "
                "a tensor nor a tuple that begins with one; remove sequence_parallel or "
                "context_parallel"
            )

        module.register_forward_hook(gather_output)
        return module


def _redistributed(
    hidden: torch.Tensor, mesh: DeviceMesh, before: Shard | Replicate, after: Shard | Replicate
) -> torch.Tensor:
    """Hidden states in another placement; gradients go the other way."""
    given = DTensor.from_local(hidden, mesh, [before], run_check=False)
    moved: torch.Tensor = given.redistribute(placements=[after]).to_local()
    return moved


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The first tensor among the arguments of a block, its hidden states.

    Raises:
        TaskError: there is none.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    raise TaskError(
        "a block whose positions are shared is called without a tensor; remove sequence_parallel "
        "or context_parallel"
    )


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> Any:
    """The arguments of a call, the first tensor changed; layers may be called by keyword."""
    hidden = first_tensor(args, kwargs)
    changed = change(hidden)
    return (
        tuple(changed if value is hidden else value for value in args),
        {name: changed if value is hidden else value for name, value in kwargs.items()},
    )
