"""Tensor-parallel styles for linear layers, transposed linear layers and fused attention layers.

A *style* (`torch.distributed.tensor.parallel.ParallelStyle`) shards the weights of one module over
the tensor-parallel ranks and redistributes its inputs and outputs. PyTorch has styles for
`nn.Linear` and `nn.Embedding`; this module adds two:

  * The `Conv1D` of Hugging Face's transformers (GPT-2) has a weight of shape (inputs, outputs)
    where `nn.Linear` has (outputs, inputs). Column-wise sharding is along the outputs, row-wise
    along the inputs (Shoeybi et al. 2019), so each shards the other dimension of the weight.
    A `Conv1D` is recognised by its attributes, so that transformers need not be installed.
  * One layer that computes queries, keys and values. The heads of a rank are a part of each third
    of the outputs, and no contiguous shard of the weight produces that. The weight is sharded
    contiguously all the same, because checkpoints and model files rely on it; the outputs are then
    exchanged all-to-all. That sends one part of the outputs, where an all-gather sends all of them.

>>> linear_widths(nn.Linear(3, 5))
(3, 5)
>>> linear_widths(nn.ReLU()) is None
True
>>> outputs = torch.arange(12.0)  # of four heads: queries, then keys, then values
>>> heads_of_part(outputs, part=1, degree=2, pieces=3)
tensor([ 2.,  3.,  6.,  7., 10., 11.])
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils.parametrize import is_parametrized


def linear_widths(module: nn.Module | None) -> tuple[int, int] | None:
    """Numbers of inputs and outputs of an `nn.Linear` or `Conv1D`; None for any other module.

    Also None for one with a parametrization, such as weight norm: it computes its matrix from
    parameters that it does not hold itself, so that there is nothing in it to shard.
    """
    if module is not None and is_parametrized(module):
        return None
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if module is None or type(module).__name__ != "Conv1D":
        return None
    weight = getattr(module, "weight", None)
    outputs = getattr(module, "nf", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or weight.shape[1] != outputs:
        return None
    return weight.shape[0], weight.shape[1]


def column_wise(
    layer: nn.Module, *, gather_output: bool = False, inputs: Placement | None = None
) -> ParallelStyle:
    """A style that shards a linear layer along its outputs.

    With `gather_output`, every rank then receives all outputs. `inputs` is what a rank has of the
    inputs, which are gathered if it is a shard; None for all of them.
    """
    output = Replicate() if gather_output else Shard(-1)
    given = inputs or Replicate()
    if isinstance(layer, nn.Linear):
        return ColwiseParallel(input_layouts=given, output_layouts=output)
    return _TransposedLinearParallel(
        weight_dim=1, input_layout=given, needed_layout=Replicate(), output_layout=output
    )


def row_wise(layer: nn.Module, *, outputs: Placement | None = None) -> ParallelStyle:
    """A style that shards a linear layer along its inputs and sums the ranks' partial outputs.

    `outputs` is what a rank gets of the sums; None for all of them.
    """
    wanted = outputs or Replicate()
    if isinstance(layer, nn.Linear):
        return RowwiseParallel(output_layouts=wanted)
    return _TransposedLinearParallel(
        weight_dim=0, input_layout=Shard(-1), needed_layout=Shard(-1), output_layout=wanted
    )


def apply_style(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Shard a module that is identical on all ranks of a one-dimensional mesh.

    Styles of single layers read the inputs by position only, so keyword arguments are made
    positional first.
    """
    layer_styles = (ColwiseParallel, RowwiseParallel, SequenceParallel, _TransposedLinearParallel)
    if isinstance(style, layer_styles):
        module.register_forward_pre_hook(_keywords_to_positions, with_kwargs=True)
    parallelize_module(module, mesh, style, src_data_rank=None)


def _keywords_to_positions(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return ((*args, *kwargs.values()), {}) if not args else None


class _TransposedLinearParallel(ParallelStyle):
    """Shards a linear layer with a weight (inputs, outputs) and a bias (outputs)."""

    def __init__(
        self,
        *,
        weight_dim: int,
        input_layout: Placement,
        needed_layout: Placement,
        output_layout: Placement,
    ) -> None:
        """`weight_dim` is the dimension of the weight to shard; the layouts are of activations.

        Inputs come in `input_layout`, and are multiplied in `needed_layout`.
        """
        super().__init__()
        self._weight_dim = weight_dim
        self._input_layout = input_layout
        self._needed_layout = needed_layout
        self._output_layout = output_layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            self._shard_parameters,
            self._distribute_input,
            self._redistribute_output,  # type: ignore[arg-type]  # its result replaces the output
        )

    def _shard_parameters(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            bias_dim = 0 if self._weight_dim == 1 else None
            dim = self._weight_dim if key == "weight" else bias_dim
            placement = Replicate() if dim is None else Shard(dim)
            # Without a source rank nothing is sent: all ranks have the same layer already.
            shard = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            setattr(module, key, nn.Parameter(shard, requires_grad=parameter.requires_grad))

    def _distribute_input(
        self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh
    ) -> Any:
        given = DTensor.from_local(inputs[0], mesh, [self._input_layout], run_check=False)
        return given.redistribute(placements=[self._needed_layout])

    def _redistribute_output(
        self, module: nn.Module, output: DTensor, mesh: DeviceMesh
    ) -> torch.Tensor:
        return output.redistribute(placements=[self._output_layout]).to_local()


# -- fused queries, keys and values ---------------------------------------------------------------


def heads_of_part(outputs: torch.Tensor, *, part: int, degree: int, pieces: int) -> torch.Tensor:
    """One of `degree` parts of each of the `pieces` that are concatenated in the last dimension."""
    return torch.cat([each.chunk(degree, -1)[part] for each in outputs.chunk(pieces, -1)], -1)


class FusedAttentionParallel(ParallelStyle):
    """Shards the fused layer of an attention module by heads."""

    def __init__(
        self,
        layer: str,
        pieces: int,
        width_attributes: tuple[str, ...],
        inputs: Placement | None = None,
    ) -> None:
        """Describe the attention module.

        Args:
            layer: name of the fused layer, a child of the module.
            pieces: equally wide pieces that the layer's outputs consist of: 3 for queries, keys and
                values one after another, 1 if they are interleaved by head.
            width_attributes: integer attributes of the module that hold the width of a piece.
            inputs: what a rank has of the layer's inputs, see `column_wise`.
        """
        super().__init__()
        self._layer = layer
        self._pieces = pieces
        self._width_attributes = width_attributes
        self._inputs = inputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = module.get_submodule(self._layer)
        apply_style(layer, column_wise(layer, inputs=self._inputs), device_mesh)
        # The module splits the outputs by this number, and each rank has only a part of them.
        for name in self._width_attributes:
            setattr(module, name, getattr(module, name) // device_mesh.size())
        # A contiguous shard of queries, keys and values one after another is not a part of each of
        # them.
        if self._pieces > 1:
            exchange = FusedOutputExchange(device_mesh.get_group(), self._pieces)
            layer.register_forward_hook(lambda layer, args, output: exchange(output))
        return module


class FusedOutputExchange:
    """All-to-all from contiguous shards of the outputs to each rank's part of every piece.

    The outputs are `pieces * degree` blocks. A rank computes `pieces` consecutive blocks and
    needs every `degree`-th one. Differentiable.
    """

    def __init__(self, group: dist.ProcessGroup, pieces: int) -> None:
        self._group = group
        self._pieces = pieces
        rank = group.rank()
        degree = group.size()
        blocks = range(pieces * degree)
        producer = [block // pieces for block in blocks]
        consumer = [block % degree for block in blocks]
        produced = [block for block in blocks if producer[block] == rank]
        consumed = [block for block in blocks if consumer[block] == rank]
        self._send_order = sorted(range(pieces), key=lambda at: (consumer[produced[at]], at))
        self._send_counts = [
            sum(consumer[block] == peer for block in produced) for peer in range(degree)
        ]
        self._receive_counts = [
            sum(producer[block] == peer for block in consumed) for peer in range(degree)
        ]

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        """Shape: (..., pieces * width) in and out, contiguous shard in, this rank's heads out."""
        blocks = output.reshape(*output.shape[:-1], self._pieces, -1).movedim(-2, 0)
        blocks = torch.stack([blocks[at] for at in self._send_order])
        received: Any = all_to_all_single_autograd(
            blocks, self._receive_counts, self._send_counts, self._group
        )
        heads: torch.Tensor = received.movedim(0, -2).flatten(-2)
        return heads
