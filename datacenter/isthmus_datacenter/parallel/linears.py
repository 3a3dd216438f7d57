"""Linear layers as tensor parallelism sees them: PyTorch's own, and the transposed ones of GPT-2.

The `Conv1D` of Hugging Face's transformers multiplies by a matrix of shape (inputs, outputs) where
`nn.Linear` has (outputs, inputs), and PyTorch's styles know only the latter. Cut along the other
dimension it is the same: column-wise is along the outputs, row-wise along the inputs (Shoeybi et
al. 2019). The shards are plain ones, which checkpoints and the exchange of models go by.

A `Conv1D` is known by what it has, so that transformers need not be installed.

>>> widths(nn.Linear(3, 5))
(3, 5)
>>> widths(nn.ReLU()) is None
True
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
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


def widths(module: nn.Module | None) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer; None for any other module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if module is None or type(module).__name__ != "Conv1D":
        return None
    weight = getattr(module, "weight", None)
    outputs = getattr(module, "nf", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or weight.shape[1] != outputs:
        return None
    return weight.shape[0], weight.shape[1]


def by_outputs(layer: nn.Module, *, gathered: bool = False) -> ParallelStyle:
    """Each rank makes a part of the outputs; `gathered`, all ranks then have all of them."""
    output = Replicate() if gathered else Shard(-1)
    if isinstance(layer, nn.Linear):
        return ColwiseParallel(output_layouts=output)
    return _Transposed(cut=1, given=Replicate(), output=output)


def by_inputs(layer: nn.Module) -> ParallelStyle:
    """Each rank has a part of the inputs; all ranks then have the sum of what they make of it."""
    if isinstance(layer, nn.Linear):
        return RowwiseParallel()
    return _Transposed(cut=0, given=Shard(-1), output=Replicate())


def lay_out(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    """Apply a style to a module that all ranks have already, however it is called.

    Styles of layers look for the inputs where they are if they came by position.
    """
    if isinstance(style, (ColwiseParallel, RowwiseParallel, SequenceParallel, _Transposed)):
        module.register_forward_pre_hook(_by_position, with_kwargs=True)
    parallelize_module(module, mesh, style, src_data_rank=None)


def _by_position(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return ((*given, *named.values()), {}) if not given else None


class _Transposed(ParallelStyle):
    """Of a layer with a weight (inputs, outputs) and a bias (outputs)."""

    def __init__(self, *, cut: int, given: Placement, output: Placement) -> None:
        """`cut` is the dimension of the weight that ranks share.

        `given` is how its inputs lie on the ranks, `output` how its outputs are handed on.
        """
        super().__init__()
        self._cut, self._given, self._output = cut, given, output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            self._distribute,
            self._prepare,
            self._hand_on,  # type: ignore[arg-type]  # what it returns is what the layer returns
        )

    def _distribute(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            cut = self._cut if key == "weight" else 0 if self._cut == 1 else None
            placement = Replicate() if cut is None else Shard(cut)
            # With no source rank nothing is sent: all ranks have the same layer already.
            shard = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            setattr(module, key, nn.Parameter(shard, requires_grad=parameter.requires_grad))

    def _prepare(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [self._given], run_check=False)

    def _hand_on(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return output.redistribute(placements=[self._output]).to_local()
