"""Record the computation of a step, make it faster, and tell how much memory it takes.

Shape legend: K = devices of a stack.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.shape_prop import TensorMetadata

aten = torch.ops.aten

_VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.permute.default,
)
"""No-ops on a tensor that already has the shape and strides."""
_RESHAPES = (*_VIEWS, aten.clone.default, aten.mean.dim, aten.sum.dim_IntList)
"""Operations that change at most the shape, if the result has as many elements as the operand and
both are contiguous."""
_TIMES_ONE = (aten.mul.Scalar, aten.div.Scalar)
_CREATED: dict[object, float] = {
    aten.ones_like.default: 1,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
}
"""The values of what is made from the shape and dtype of an operand."""
_CONSTANT_BYTES = 1 << 16
"""Most bytes of a constant that is kept."""


def trace(step: Callable[..., Any], arguments: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Record the operations of a step while it is computed with these arguments."""
    # `make_fx` describes each result by a fake tensor. Without a mode for all of them it makes a
    # mode for each, with the stack of its caller, which takes half of the time.
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        return make_fx(step)(*arguments)


def simplified(recorded: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Replace operations of a recorded step by faster ones with the same result.

    A call takes microseconds, and half of the calls in a step of a small model have no effect: they
    come from vmap (views of a batch), from factors of 1, and from constants.
    """
    # An in-place operation may need a copy that seems to have no effect.
    if not any(map(_is_in_place, recorded.graph.nodes)):
        _fold_constants(recorded)
        _remove_repetitions(recorded.graph)
        for node in list(recorded.graph.nodes):
            _simplify(recorded, node)
        recorded.graph.eliminate_dead_code()
    _own_results(recorded.graph)
    recorded.recompile()
    return recorded


def _is_in_place(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_random(recorded: torch.fx.GraphModule) -> bool:
    """Whether a recorded step draws random numbers."""
    return any(map(_is_random, recorded.graph.nodes))


def _fold_constants(recorded: torch.fx.GraphModule) -> None:
    """Compute once what does not depend on the arguments."""
    constants: dict[torch.fx.Node, torch.Tensor] = {}
    for node in recorded.graph.nodes:
        result = node.meta.get("val")
        if node.op != "call_function" or not 0 < _nbytes(result) <= _CONSTANT_BYTES:
            continue
        if node.target in _CREATED:
            kind = {"dtype": result.dtype, "device": result.device}
            created = torch.empty_strided(result.shape, result.stride(), **kind)
            constants[node] = created.fill_(_CREATED[node.target])
        elif not _is_random(node) and all(each in constants for each in node.all_input_nodes):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), constants.__getitem__)
            constants[node] = node.target(*args, **kwargs)
    for number, (node, constant) in enumerate(constants.items()):
        recorded.register_buffer(f"constant_{number}", constant)
        with recorded.graph.inserting_before(node):
            replacement = recorded.graph.get_attr(f"constant_{number}")
        replacement.meta = node.meta
        node.replace_all_uses_with(replacement)
    recorded.graph.eliminate_dead_code()


def _remove_repetitions(graph: torch.fx.Graph) -> None:
    """Compute once what is the same."""
    first: dict[object, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and not _is_random(node):
            # As text, because 1, 1.0 and True are equal.
            same = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def _simplify(recorded: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    """Remove an operation without effect, or replace it by a faster one."""
    graph = recorded.graph
    if (same := _same_values(recorded, node)) is not None:
        node.replace_all_uses_with(same)
        graph.erase_node(node)
    elif _is_reshape(node):
        node.args = (_source_of_reshapes(node), list(_shape(node)))
        node.kwargs = {}
        node.target = aten.view.default
    elif node.target is aten.clone.default:
        _without_copy(graph, node)


def _same_values(recorded: torch.fx.GraphModule, node: torch.fx.Node) -> torch.fx.Node | None:
    """The node whose tensor has the same values in the same places, if there is one."""
    operands = node.all_input_nodes
    if node.target is aten.mul.Tensor:
        for one, other in itertools.permutations(operands, 2):
            if _is_one(recorded, one) and _same_format(other, node):
                return other
    elif node.target is aten.transpose.int:
        earlier = operands[0]
        if earlier.target is node.target and earlier.args[1:] == node.args[1:]:
            return earlier.all_input_nodes[0]
    elif _is_reshape(node):
        source = _source_of_reshapes(node)
        return source if _shape(source) == _shape(node) else None
    elif node.target in _VIEWS or (node.target in _TIMES_ONE and node.args[1] == 1):
        return operands[0] if _same_format(operands[0], node) else None
    return None


def _shape(node: torch.fx.Node) -> torch.Size:
    shape: torch.Size = node.meta["tensor_meta"].shape
    return shape


def _is_one(recorded: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Whether a node is a constant of ones."""
    if node.op != "get_attr":
        return False
    constant = operator.attrgetter(str(node.target))(recorded)
    return isinstance(constant, torch.Tensor) and bool((constant == 1).all())


def _source_of_reshapes(node: torch.fx.Node) -> torch.fx.Node:
    """The first operand of a sequence of reshapes."""
    while _is_reshape(node):
        node = node.all_input_nodes[0]
    return node


def _is_reshape(node: torch.fx.Node) -> bool:
    """Whether a node has the elements of its operand in the same order, both contiguous."""
    if node.target not in _RESHAPES or len(node.all_input_nodes) != 1:
        return False
    before = node.all_input_nodes[0].meta.get("tensor_meta")
    after = node.meta.get("tensor_meta")
    return (
        isinstance(before, TensorMetadata)
        and isinstance(after, TensorMetadata)
        and before.dtype == after.dtype
        and math.prod(before.shape) == math.prod(after.shape)
        and _is_contiguous(before)
        and _is_contiguous(after)
    )


def _is_contiguous(tensor: TensorMetadata) -> bool:
    return torch.empty_strided(tensor.shape, tensor.stride, device="meta").is_contiguous()


def _own_results(graph: torch.fx.Graph) -> None:
    """Copy results whose memory is an argument's, a constant's or another result's.

    The caller may change them.
    """
    output = next(iter(reversed(graph.nodes)))
    results = []
    owners = set()
    for node in output.args[0]:
        owner = _owner(node)
        if owner.op != "call_function" or owner in owners:
            with graph.inserting_before(output):
                copy_of_it = graph.call_function(aten.clone.default, (node,))
            copy_of_it.meta = node.meta
            results.append(copy_of_it)
        else:
            owners.add(owner)
            results.append(node)
    output.args = (tuple(results),)


def _owner(node: torch.fx.Node) -> torch.fx.Node:
    """The node that has made the memory of a node's tensor."""
    while _is_view(node) or (node.target is operator.getitem and _is_view(node.all_input_nodes[0])):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: torch.fx.Node) -> bool:
    """Whether a node's result has the memory of its operand."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info for result in schema.returns)


def descent(gradients: torch.fx.GraphModule, parameters: int) -> torch.fx.GraphModule:
    """A recorded step that subtracts gradients from its parameters, in place.

    A gradient that is a product of matrices is subtracted while it is computed, without being
    written to memory.

    Args:
        gradients: a simplified step that computes the gradients. Its first arguments are the
            parameters, its first results their gradients.
        parameters: number of parameters. The new step has as many further arguments: the negative
            learning rate of each.
    """
    step = torch.fx.GraphModule(gradients, copy.deepcopy(gradients.graph))  # with its constants
    *arguments, output = (n for n in step.graph.nodes if n.op in ("placeholder", "output"))
    changed = arguments[:parameters]
    computed = output.args[0][:parameters]
    output.args = (output.args[0][parameters:],)
    rates: list[torch.fx.Node] = []
    for number in range(parameters):
        with step.graph.inserting_after((arguments + rates)[-1]):
            rates.append(step.graph.placeholder(f"rate_{number}"))
    with step.graph.inserting_before(output):
        for parameter, gradient, rate in zip(changed, computed, rates, strict=True):
            factors = gradient.args if gradient.target is aten.bmm.default else ()
            if factors and not gradient.users and not {*changed} & {*map(_owner, factors)}:
                step.graph.erase_node(gradient)
                change = aten.baddbmm_.default, (parameter, *factors)
            else:
                change = aten.add_.Tensor, (parameter, gradient)
            step.graph.call_function(*change, {"alpha": rate})
    step.recompile()
    return step


def step_bytes(recorded: torch.fx.GraphModule) -> int:
    """Most bytes of tensors that exist at the same time while a recorded step is computed."""
    sizes: dict[torch.fx.Node, int] = {}
    owners: dict[torch.fx.Node, torch.fx.Node] = {}
    ends: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in recorded.graph.nodes:
        if _is_view(node) or node.target is operator.getitem:
            owners[node] = owners[node.all_input_nodes[0]]
        else:
            owners[node] = node
            sizes[node] = _nbytes(node.meta.get("val"))
        for used in (node, *node.all_input_nodes):
            ends[owners[used]] = node
    freed: dict[torch.fx.Node, int] = {}
    for owner, end in ends.items():
        if owner.op == "call_function":  # the caller has the arguments
            freed[end] = freed.get(end, 0) + sizes[owner]
    now = most = 0
    for node in recorded.graph.nodes:
        now += sizes.get(node, 0)
        most = max(most, now)
        now -= freed.get(node, 0)
    return most


def _nbytes(values: object) -> int:
    """Bytes of a tensor, or of several, by what was recorded of them."""
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
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
        result = graph.call_function(aten.bmm.default, factors)
    result.meta = clone.meta
    clone.replace_all_uses_with(result)


def _is_transpose(node: torch.fx.Node) -> bool:
    """Whether a node has the transposed matrices of another one: (K, N, M) of (K, M, N)."""
    return node.target is aten.transpose.int and node.args[1:] == (1, 2)


def _transposed(graph: torch.fx.Graph, matrices: torch.fx.Node) -> torch.fx.Node:
    """A node with the transposed matrices of a node."""
    if _is_transpose(matrices):
        return matrices.all_input_nodes[0]
    return graph.call_function(aten.transpose.int, (matrices, 1, 2))


def _same_format(one: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Whether the tensors of two nodes have the same shape, strides and dtype."""
    first = one.meta.get("tensor_meta")
    second = other.meta.get("tensor_meta")
    if not isinstance(first, TensorMetadata) or not isinstance(second, TensorMetadata):
        return False
    return (first.shape, first.stride, first.dtype) == (second.shape, second.stride, second.dtype)
