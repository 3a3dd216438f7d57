"""Share the positions of long sequences among ranks that have whole layers.

Each rank computes the blocks of a model for its own part of the positions, and only attention needs
the others: the keys and values of all ranks are gathered, and the queries stay where they are, as
in the training of Llama 3 (Dubey et al. 2024, section 3.3.2). Memory of activations falls with the
number of ranks, and nothing of the parameters is sharded by it.

Attention is `torch.nn.functional.scaled_dot_product_attention`, which is replaced during calls of a
block. What else in a block sees several positions would be wrong; it is found by the comparison
with the whole model, like everything in a partitioned model that cannot be read off it. Ranks that
share positions take the place of tensor-parallel ranks, with no matrix sharded: the same comparison
finds which gradients are parts of a sum, and which random draws differ between the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_map_with_path

from isthmus.errors import TaskError
from isthmus_datacenter.parallel.called_modules import called_modules
from isthmus_datacenter.parallel.compared_calls import ComparedCalls
from isthmus_datacenter.parallel.sequence_parallel import SequenceBlocks, first_tensor

_REMEDY = "set context_parallel = 1"


def context_plan(
    model: nn.Module, stages: Sequence[nn.Module], run: Callable[[], Any]
) -> list[tuple[nn.Module, ParallelStyle]]:
    """The blocks of a model that attend, with what shares their positions.

    Args:
        model: the whole model.
        stages: its pipeline stages, between which hidden states are whole.
        run: sends a few examples through the whole model.

    Raises:
        TaskError: the model has no such blocks.
    """
    with called_modules(model) as called, _Attending(called) as attending:
        run()
    blocks = SequenceBlocks.find(model, stages, attending.modules, "context_parallel")
    shares = [(block, SharesAttention()) for run in blocks.runs for block in run.blocks]
    # First of all: what divides the inputs is called before the block is.
    return [*blocks.styles(), *shares]


class _Attending(TorchFunctionMode):
    """Notes the modules within whose calls attention is computed, by `id`."""

    def __init__(self, called: Sequence[nn.Module]) -> None:
        """`called`: those that are being called, see `called_modules`."""
        super().__init__()
        self.modules: set[int] = set()
        self._called = called

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.modules.update(map(id, self._called))
        return func(*args, **(kwargs or {}))


class SharesAttention(ParallelStyle):
    """Has a block, called with a part of the positions, attend to all of them."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: ComparedCalls | None = None

    def end_comparison(self) -> None:
        """Refuse from now on what the block has not done yet; once it was compared."""
        if self._calls is not None:
            self._calls.end()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward = module.forward
        calls = self._calls = ComparedCalls(module)

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            hidden = first_tensor(args, kwargs)
            own = hidden.shape[1]
            if own == 1:
                # Transformers then leave out the mask of causal attention, as in generation.
                raise TaskError(
                    f"context_parallel: a {type(module).__name__} gets one position on each rank, "
                    f"which blocks take for a generated one; pad the sequences, or {_REMEDY}"
                )
            part = _OwnPositions(own, device_mesh)
            args = part.of_arguments(args, hidden, calls)
            kwargs = part.of_arguments(kwargs, hidden, calls)
            attention = _Attention(part, device_mesh)
            with attention:
                output = forward(*args, **kwargs)
            calls.attended(attention.count)
            return output

        # A replaced `forward` and no hook: where activations are recomputed, it is called again.
        module.forward = call
        return module


class _OwnPositions:
    """A rank's positions of a sequence."""

    def __init__(self, own: int, mesh: DeviceMesh) -> None:
        """`own`: the number of this rank's positions, which is that of every rank."""
        self.own = own
        self.all = own * mesh.size()
        self.first = own * mesh.get_local_rank()

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The part of a tensor for all positions."""
        return tensor.narrow(dim, self.first, self.own)

    def of_arguments(self, arguments: Any, hidden: torch.Tensor, calls: ComparedCalls) -> Any:
        """A block's arguments with what belongs to all positions cut to this rank's.

        Such as rotary embeddings and numbers of positions, (batch, positions), (batch, positions,
        width) or (positions, width). Masks of attention have four dimensions, and are cut where
        they are used.

        Raises:
            TaskError: see `ComparedCalls.dim_of_positions`.
        """

        def cut(path: Any, value: Any) -> Any:
            if value is hidden or not isinstance(value, torch.Tensor):
                return value
            if value.ndim not in (1, 2, 3):
                return value
            dim = calls.dim_of_positions(keystr(path), tuple(value.shape), self.own, self.all)
            return value if dim is None else self.of(value, dim)

        return tree_map_with_path(cut, arguments)


class _Attention(TorchFunctionMode):
    """Within it, attention has the keys and values of all ranks."""

    def __init__(self, part: _OwnPositions, mesh: DeviceMesh) -> None:
        super().__init__()
        self.count = 0
        """Attentions until now."""
        self._part = part
        self._mesh = mesh

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.count += 1
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        """`scaled_dot_product_attention`; queries, keys and values are (..., positions, width).

        Raises:
            TaskError: it is not over the positions that the ranks share, or has two masks.
        """
        part = self._part
        if {query.shape[-2], key.shape[-2], value.shape[-2]} != {part.own}:
            raise TaskError(
                f"context_parallel: an attention of queries {tuple(query.shape)} and keys "
                f"{tuple(key.shape)} is not over the {part.own} positions of a rank; {_REMEDY}"
            )
        if is_causal and attn_mask is not None:
            # PyTorch combines both in some of its kernels, and others refuse it.
            raise TaskError(
                "context_parallel: an attention has a mask and is_causal; make one mask of both, "
                f"or {_REMEDY}"
            )
        if is_causal:
            rows = torch.arange(part.own, device=query.device) + part.first
            attn_mask = torch.arange(part.all, device=query.device) <= rows[:, None]
        elif attn_mask is not None:
            attn_mask = self._own_queries_all_keys(attn_mask)
        return functional.scaled_dot_product_attention(
            query, self._gathered(key, -2), self._gathered(value, -2), attn_mask, dropout_p, **more
        )

    def _own_queries_all_keys(self, mask: torch.Tensor) -> torch.Tensor:
        """A mask, shape (..., queries, keys), for this rank's queries and the keys of all ranks."""
        part = self._part
        rows = mask.shape[-2] if mask.ndim > 1 else 1
        columns = mask.shape[-1]
        if columns == part.own and rows in (1, part.all):
            # Made of an argument that was cut, such as the padding of (batch, positions).
            mask = self._gathered(mask, -1)
        elif columns not in (1, part.all) or rows not in (1, part.own, part.all):
            raise TaskError(
                f"context_parallel: an attention has a mask of shape {tuple(mask.shape)} for "
                f"{part.own} of {part.all} positions; make it outside of the block, for all of "
                f"them, or {_REMEDY}"
            )
        return part.of(mask, -2) if rows == part.all else mask

    def _gathered(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """What belongs to the keys of all ranks; each rank's queries add to its gradient."""
        dim += tensor.ndim
        own = DTensor.from_local(tensor, self._mesh, [Shard(dim)], run_check=False)
        whole = own.redistribute(placements=[Replicate()])
        gathered: torch.Tensor = whole.to_local(grad_placements=[Partial()])
        return gathered
