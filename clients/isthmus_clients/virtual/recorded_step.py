"""Make the recorded computation of a step faster, and tell how much memory it takes.

Shape legend: K = devices of a stack.
"""

from __future__ import annotations

import math
import operator
from typing import cast

import torch
from torch.fx.passes.shape_prop import TensorMetadata

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
"""No-ops on a tensor that already has the shape."""
_TIMES_ONE = (aten.mul.Scalar, aten.div.Scalar)


def simplified(recorded: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Replace operations of a recorded step by faster ones with the same result.

    Those without effect come from vmap (views of a batch) and from factors of 1 in addmm, and are a
    third of a step of a small model.
    """
    nodes = [node for node in recorded.graph.nodes if node.op == "call_function"]
    if any(node.target._schema.is_mutable for node in nodes if hasattr(node.target, "_schema")):
        return recorded  # an in-place operation may need the copy
    for node in nodes:
        if node.target in _RESHAPES or (node.target in _TIMES_ONE and node.args[1] == 1):
            operand = node.args[0]
            if _memory_format(operand) == _memory_format(node):
                node.replace_all_uses_with(operand)
                recorded.graph.erase_node(node)
    for node in nodes:
        if node.target is aten.clone.default:
            _without_copy(recorded.graph, node)
        elif node.target is aten.max_pool2d_with_indices.default:
            node.target = _max_pool2d
    recorded.graph.eliminate_dead_code()
    recorded.recompile()
    return recorded


def step_bytes(recorded: torch.fx.GraphModule) -> int:
    """Most bytes of tensors that exist at the same time while a recorded step is computed."""
    sizes: dict[torch.fx.Node, int] = {}
    owners: dict[torch.fx.Node, torch.fx.Node] = {}
    ends: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in recorded.graph.nodes:
        if _has_memory_of_operand(node):
            owners[node] = owners[node.all_input_nodes[0]]
        else:
            owners[node] = node
            sizes[node] = _nbytes(node.meta.get("tensor_meta"))
        for used in (node, *node.all_input_nodes):
            ends[owners[used]] = node
    freed: dict[torch.fx.Node, int] = {}
    for owner, end in ends.items():
        freed[end] = freed.get(end, 0) + sizes.get(owner, 0)
    now = most = 0
    for node in recorded.graph.nodes:
        now += sizes.get(node, 0)
        most = max(most, now)
        now -= freed.get(node, 0)
    return most


def _has_memory_of_operand(node: torch.fx.Node) -> bool:
    """Whether a node is a view, or one of the results of its operand."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info for result in schema.returns)


def _nbytes(values: object) -> int:
    """Bytes of a tensor, or of several, by what was recorded of them."""
    if isinstance(values, TensorMetadata):
        return math.prod(values.shape) * values.dtype.itemsize
    return sum(map(_nbytes, values)) if isinstance(values, list | tuple) else 0


def _without_copy(graph: torch.fx.Graph, clone: torch.fx.Node) -> None:
    """Replace a contiguous copy of (A B)^T by B^T A^T, which is contiguous.

    The gradient of the weight of a Linear is such a copy, which takes longer than the product.
    """
    if clone.kwargs != {"memory_format": torch.contiguous_format}:
        return
    transposed = clone.all_input_nodes[0]
    product = transposed.all_input_nodes[0] if transposed.all_input_nodes else transposed
    if not _is_transpose(transposed) or product.target is not aten.bmm.default:
        return
    if len(transposed.users) > 1 or len(product.users) > 1:
        return
    left, right = (cast("torch.fx.Node", factor) for factor in product.args)
    with graph.inserting_before(clone):
        factors = _transposed(graph, right), _transposed(graph, left)
        clone.replace_all_uses_with(graph.call_function(aten.bmm.default, factors))


def _is_transpose(node: torch.fx.Node) -> bool:
    """Whether a node has the transposed matrices of another one: (K, N, M) of (K, M, N)."""
    return node.target is aten.transpose.int and node.args[1:] == (1, 2)


def _transposed(graph: torch.fx.Graph, matrices: torch.fx.Node) -> torch.fx.Node:
    """A node with the transposed matrices of a node."""
    if _is_transpose(matrices):
        return matrices.all_input_nodes[0]
    return graph.call_function(aten.transpose.int, (matrices, 1, 2))


def _max_pool2d(inputs: torch.Tensor, *settings: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The same values and places; PyTorch's CPU kernel is vectorised over channels only."""
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    pooled, places = aten.max_pool2d_with_indices.default(inputs, *settings)
    return pooled.contiguous(), places.contiguous()


def _memory_format(node: torch.fx.Node) -> tuple[object, ...]:
    """Shape, strides and dtype of a node's tensor."""
    tensor = node.meta["tensor_meta"]
    return tensor.shape, tensor.stride, tensor.dtype
