"""Distribute a newly built model over the ranks.

The order of the steps matters: split into pipeline stages, divide experts, shard matrices, tie
again the parameters that this untied, compile and recompute the sharding units, apply
`fully_shard`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

from isthmus.errors import TaskError, UserError
from isthmus.task import Task, user_code
from isthmus.task.scoring.blocks import default_units
from isthmus.task.scoring.host_generators import seeded
from isthmus.task.scoring.kept_values import first_difference, numbers_kept
from isthmus.tensors.structure import Structure
from isthmus_datacenter.parallel.built_parameters import BuiltParameters, refuse_kept_views
from isthmus_datacenter.parallel.context_parallel import SharesAttention, context_plan
from isthmus_datacenter.parallel.equivalence_check import (
    PartitionError,
    RunModule,
    StageTrace,
    check_sharded,
    first_line,
    on_device,
    run_in_eval_mode,
    while_exchanging,
)
from isthmus_datacenter.parallel.expert_parallel import (
    are_alike,
    check_experts,
    divide_experts,
    find_experts,
    refuse_undividable,
)
from isthmus_datacenter.parallel.float8_layers import refuse_without_float8, use_float8
from isthmus_datacenter.parallel.fully_sharded import (
    apply_zero_stage,
    parts_of,
    shard_experts,
    units_in_stage,
    wrap_unit,
)
from isthmus_datacenter.parallel.given_values import values_while_called
from isthmus_datacenter.parallel.gradient_check import (
    Reductions,
    compare_gradients,
    exchange_records,
    in_training,
    record_gradients,
)
from isthmus_datacenter.parallel.host_messages import FreedActivations
from isthmus_datacenter.parallel.model_shard import (
    GradientAllReduce,
    ModelShard,
    ParameterNames,
    TiedParameters,
    is_tensor_sharded,
)
from isthmus_datacenter.parallel.module_calls import (
    CallOrder,
    SharedCalls,
    changes_parameter,
    find_units,
    refuse_changed_parameters,
)
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.pipeline_stages import split_into_stages
from isthmus_datacenter.parallel.random_draws import draw_apart, drawing_modules
from isthmus_datacenter.parallel.sequence_parallel import ChecksCalls
from isthmus_datacenter.parallel.tensor_plans import default_tensor_plan, resolve_plan
from isthmus_datacenter.parallel.tensor_styles import apply_style
from isthmus_datacenter.parallel.unfilled_model import UnfilledModel
from isthmus_datacenter.rank_messages import TEXT_CHARACTERS, RankMessages

_REMEDY_FOR_EXPERTS = (
    "ranks exchange tokens when all of them call the experts, in each micro-batch; set "
    "expert_parallel = 1"
)
_REFUSALS: RankMessages[str | None] = RankMessages("refusals of a model", str | None)
SMALLEST_UNIT = 1 << 16
"""Parameters below which a block is gathered with the root: a separate all-gather costs more."""
SMALLEST_PART = 1 << 19
"""Parameters from which a layer of a block may be gathered by itself: 2 MiB of them."""


def parallelize(
    task: Task,
    model: nn.Module,
    dims: ParallelDims,
    rank: int,
    device: torch.device,
    *,
    sample: Callable[[], Any],
    try_batch: Callable[[nn.Module, int, bool], object] | None = None,
    unfilled: UnfilledModel | None = None,
    smallest_unit: int = SMALLEST_UNIT,
    backend: Any = "inductor",
    compared: bool = True,
    saves_memory: bool = False,
) -> ModelShard:
    """Build this rank's shard of the model, on the device. All ranks call this together.

    Args:
        task: may give its own stages, tensor-parallel plan and sharding units.
        model: the whole model, initialised from the seed; its modules are modified.
        dims: how to distribute it.
        rank: this rank.
        device: where the shard is placed.
        sample: returns inputs of a few examples; called only where outputs must be compared.
        try_batch: passes a number of examples through the model, in training mode or not; called
            only where sharding units must be called by every batch. None for units that are.
        unfilled: where the values of a model without memory are; None for a model with values.
        smallest_unit: number of parameters below which a block is no sharding unit.
        backend: of `torch.compile`.
        compared: whether a partitioned model is compared with the whole one. Tensors without values
            cannot be; what is made of them is not to be trained. What the stages of a pipeline take
            for the sample is in the result then.
        saves_memory: whether memory matters more than time: large layers of a block are gathered
            one by one where they may be, and freed memory is returned in the backward pass.

    Raises:
        TaskError: the model cannot be distributed like this, and what to do about it.
        NeedsWholeModel: it has no memory, and cannot be called in parts.
    """
    if dims.float8:
        refuse_without_float8(device)
    refuse_unshardable(model, dims, device.type)
    mesh = dims.mesh(device.type) if dims.ranks > 1 or dims.needs_fully_shard else None
    # By identity, so before anything below replaces a parameter by its shard.
    names = ParameterNames.of(model)
    built = BuiltParameters.of(model)
    together = _refused_together if compared and dims.ranks > 1 else contextlib.nullcontext
    with together(), user_code("shard_units()"):
        task_units = task.shard_units(model)
    fully_shards = dims.applies_fully_shard(device.type)
    shared_calls = None
    experts = find_experts(model) if dims.expert > 1 else {}
    expert_mesh = dims.expert_mesh(device.type) if experts else None
    if unfilled is not None:
        unfilled.fill_buffers()
        if try_batch is not None:
            try_batch = unfilled.trying(try_batch)
    run = run_in_eval_mode if unfilled is None else unfilled.run_in_eval_mode
    flop_counter = FlopCounterMode(display=False)
    with together(), _agreed(unfilled):
        # A pipeline's stages call all their blocks, as was compared with the whole model.
        if fully_shards and dims.data > 1 and dims.pipeline == 1 and try_batch is not None:
            parts = saves_memory and unfilled is not None and _may_gather_parts(dims, device)
            shared_calls = _units_of_every_batch(
                model, task_units, smallest_unit, try_batch, experts, parts=parts
            )
        elif fully_shards and dims.pipeline == 1 and try_batch is not None:
            refuse_changed_parameters(model, functools.partial(try_batch, model))
        # What outputs are compared with later is computed here, while the model is whole.
        if compared or (dims.tensor == 1 and dims.pipeline == 1):
            stages, traces = _stages(
                task, model, dims, sample, flop_counter, run, unfilled, gathered=fully_shards
            )
        elif dims.pipeline > 1:
            stages, traces = split_into_stages(
                task, model, dims, sample(), None, run, compared=False
            )
        else:
            stages = [model]
            traces = [((sample(),), None)]
        expert_calls = None
        if experts and dims.pipeline > 1 and compared:
            (inputs,), _ = traces[0]
            expert_calls = _calls_of_experts(task, model, experts, inputs, run, unfilled)
        plan, notes = _tensor_plan(task, model, dims, stages, traces, run, compared=compared)
    stage_names = [_parameter_names(names, stage) for stage in stages]
    _check_complete(names, stage_names)
    own_stages = {index: stages[index] for index in dims.stages_of(rank)}
    own_names = {index: names.in_stage(stage) for index, stage in own_stages.items()}
    # From the stages of all ranks: process groups are created by all ranks, in one order.
    tied = TiedParameters.find(dims, stage_names, rank)
    all_reduce = None
    if dims.needs_fully_shard and not fully_shards:
        assert mesh is not None
        all_reduce = GradientAllReduce(mesh.get_group("replicate"))
    freed = FreedActivations() if saves_memory else None
    reductions: list[Reductions] = []
    for index, stage in own_stages.items():
        if task_units is None:
            groups = default_units(stage, smallest_unit, shared=not fully_shards)
            units = [unit for group in groups for unit in group]
        else:
            units = units_in_stage(stage, task_units)
        own_experts = _divide_experts(stage, experts, expert_mesh, device, compared=compared)
        if dims.tensor > 1 and not compared:
            assert mesh is not None
            _place(stage, device)
            _shard_matrices(stage, plan, mesh["tensor"])
        elif dims.tensor > 1:
            assert mesh is not None
            called = _CalledByTask(task, stage) if dims.pipeline == 1 else stage
            with _named_by_its_key(dims):
                reductions.append(
                    _shard_stage(
                        stage,
                        called,
                        plan,
                        mesh=mesh["tensor"],
                        device=device,
                        names=own_names[index],
                        trace=traces[index],
                        units=units,
                        unfilled=unfilled,
                        first=index == 0,
                    )
                )
            if dims.compile:
                _complete_embedding_outputs(stage, plan)
        elif unfilled is None and not dims.offload:
            # Only this rank's stages: the whole model may not fit on one device. With offload,
            # `fully_shard` moves one unit after the other.
            _place(stage, device)
        if dims.float8:
            use_float8(stage, units or [stage])
        # A stage without units is one by itself. Units are wrapped before `fully_shard`, whose
        # hooks then are outside of what is compiled and recomputed.
        for number, unit in enumerate(units or [stage]):
            wrap_unit(unit, number, dims, backend)
        if fully_shards:
            assert mesh is not None
            if shared_calls is not None:
                units = units_in_stage(stage, shared_calls.units)
            if expert_mesh is not None:
                shard_experts(own_experts, dims, expert_mesh, freed=freed)
            is_last = index == dims.stages - 1
            apply_zero_stage(stage, units, dims, mesh, is_last_stage=is_last, freed=freed)
            if shared_calls is not None:
                CallOrder(stage, shared_calls)
        if expert_calls is not None:
            CallOrder(stage, expert_calls.of(own_experts), _REMEDY_FOR_EXPERTS)
        if unfilled is not None:
            unfilled.fill(stage, own_names[index], device, offload=dims.offload)
        built.give_attributes(stage, own_names[index])
    return ModelShard(
        dims,
        own_stages,
        own_names,
        mesh=mesh,
        expert_mesh=expert_mesh,
        tied=tied,
        all_reduce=all_reduce,
        reductions=Reductions(
            frozenset().union(*(each.summed for each in reductions)),
            frozenset().union(*(each.unknown for each in reductions)),
        ),
        sample_flops=int(flop_counter.get_total_flops()),
        all_names=list(names.parameters.values()),
        built=built,
        stage_inputs={} if compared or not traces else {at: traces[at][0] for at in own_stages},
        notes=[*notes, *(shared_calls.notes if shared_calls is not None else ())],
    )


def _agreed(unfilled: UnfilledModel | None) -> contextlib.AbstractContextManager[None]:
    """Within it a model without memory is called in parts; all ranks leave it together.

    Raises:
        NeedsWholeModel: that was not possible on some rank.
    """
    return contextlib.nullcontext() if unfilled is None else unfilled.agreed()


@contextlib.contextmanager
def _refused_together() -> Iterator[None]:
    """Within it each rank looks at the model by itself; all ranks leave it together.

    A rank that refuses the model would otherwise keep the others waiting where they exchange
    something next.

    Raises:
        TaskError: some rank refuses it; with the sentence of the first one.
    """
    refusal: UserError | None = None
    try:
        yield
    except UserError as error:
        refusal = error
    texts = _REFUSALS.all_gather(None if refusal is None else str(refusal)[:TEXT_CHARACTERS])
    if refusal is not None:
        raise refusal
    if (first := next((each for each in texts if each is not None), None)) is not None:
        raise TaskError(first)


# -- units ----------------------------------------------------------------------------------------


def _may_gather_parts(dims: ParallelDims, device: torch.device) -> bool:
    """Whether the parts of a block may be gathered one by one.

    Only where that saves memory and costs no time: between processors, whose messages end before
    the computation goes on; and not where blocks are changed as a whole.
    """
    changed = (
        dims.compile,
        dims.checkpoint_activations,
        dims.offload,
        dims.float8,
        dims.precision != "fp32",
        dims.tensor > 1,
        dims.expert > 1,
        dims.shares_positions,
    )
    gathers_again = dims.reshard_after_forward and not dims.overlaps_messages(device.type)
    return gathers_again and not any(changed)


def _units_of_every_batch(
    model: nn.Module,
    task_units: Sequence[Any] | None,
    smallest_unit: int,
    try_batch: Callable[[nn.Module, int, bool], object],
    experts: Mapping[str, nn.Module],
    *,
    parts: bool,
) -> SharedCalls:
    """The sharding units that all ranks call in one order, whatever their batches.

    `parts`: whether large parts of the units that are found are units of their own.

    Raises:
        TaskError: `experts`, which ranks divide, are not among them.
    """
    if task_units is None:
        groups = default_units(model, smallest_unit)
    else:
        groups = [[unit] for unit in units_in_stage(model, task_units)]
    within: list[list[nn.Module]] = []
    if parts and task_units is None:
        within = [parts_of(unit, SMALLEST_PART) for group in groups for unit in group]
    groups += [[each] for each in experts.values()]
    calls = find_units(
        model,
        groups,
        functools.partial(try_batch, model),
        given=task_units is not None,
        parts=[group for group in within if group],
    )
    for name, each in experts.items():
        if not any(each is unit for unit in calls.units):
            # Where it is not about these experts.
            note = next((each for each in calls.notes if name not in each), "")
            why = f" ({note})" if note else ""
            raise TaskError(
                f"expert_parallel: ranks exchange tokens when all of them call the experts {name!r}"
                f", which not every batch does{why}; set expert_parallel = 1"
            )
    return calls


# -- experts --------------------------------------------------------------------------------------


def _divide_experts(
    stage: nn.Module,
    experts: Mapping[str, nn.Module],
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    compared: bool,
) -> list[nn.Module]:
    """Divide the experts of a stage over the ranks; returns them.

    `compared`: whether they are compared with the whole ones.

    Raises:
        TaskError: they compute something else when they are divided.
    """
    if mesh is None:
        return []
    modules = {id(each) for each in stage.modules()}
    own = {name: each for name, each in experts.items() if id(each) in modules}
    checked: list[nn.Module] = []
    for name, module in own.items():
        # The experts of most blocks are alike.
        if compared and not any(are_alike(module, each) for each in checked):
            check_experts(name, module, mesh["expert"], device)
            checked.append(module)
    # Afterwards: divided experts are not like whole ones.
    for module in own.values():
        divide_experts(module, mesh["expert"], device)
    return list(own.values())


@dataclasses.dataclass(frozen=True)
class _ExpertCalls:
    """The calls of experts in a pass of the whole model, in order."""

    training: Sequence[nn.Module]
    evaluation: Sequence[nn.Module]

    def of(self, experts: Sequence[nn.Module]) -> SharedCalls:
        """The calls of a stage's experts, which each of its micro-batches has to make."""
        index = {id(each): number for number, each in enumerate(experts)}
        training = [index[id(each)] for each in self.training if id(each) in index]
        evaluation = [index[id(each)] for each in self.evaluation if id(each) in index]
        return SharedCalls(experts, training, evaluation)


def _calls_of_experts(
    task: Task,
    model: nn.Module,
    experts: Mapping[str, nn.Module],
    inputs: Any,
    run: RunModule,
    unfilled: UnfilledModel | None,
) -> _ExpertCalls:
    """The calls of experts for a few examples, in a pipeline.

    Ranks of different data exchange tokens in each of them: one that calls others would exchange
    those of other layers.
    """
    calls: list[nn.Module] = []

    def called(module: nn.Module, *_: Any) -> None:
        calls.append(module)

    whole = _CalledByTask(task, model)
    with contextlib.ExitStack() as hooks:
        for each in experts.values():
            hooks.callback(each.register_forward_pre_hook(called).remove)
        hooks.enter_context(user_code("the model's forward pass on two examples"))
        run(whole, inputs)
        evaluation = list(calls)
        calls.clear()
        with (
            in_training(whole),
            torch.no_grad(),
            contextlib.nullcontext() if unfilled is None else unfilled.called_in_parts(whole),
        ):
            whole(inputs)
    return _ExpertCalls(list(calls), evaluation)


# -- stages ---------------------------------------------------------------------------------------


def _stages(
    task: Task,
    model: nn.Module,
    dims: ParallelDims,
    sample: Callable[[], Any],
    flop_counter: FlopCounterMode,
    run: RunModule,
    unfilled: UnfilledModel | None,
    *,
    gathered: bool,
) -> tuple[list[nn.Module], list[StageTrace]]:
    """All pipeline stages, and their outputs for the sample where they must be compared later.

    `gathered`: whether parameters are gathered for each pass.
    """
    if dims.pipeline == 1 and dims.tensor == 1:
        return [model], []
    inputs = sample()
    structure = Structure.of(model)
    with user_code("the model's forward pass on two examples"), flop_counter:
        output = run(_CalledByTask(task, model), inputs)
    structure.check(model)
    if dims.pipeline == 1:
        return [model], [((inputs,), output)]
    _check_calls_change_nothing(_CalledByTask(task, model), inputs, unfilled, gathered=gathered)
    return split_into_stages(task, model, dims, inputs, output, run, unfilled=unfilled)


def _check_calls_change_nothing(
    called: nn.Module, inputs: Any, unfilled: UnfilledModel | None, *, gathered: bool
) -> None:
    """Refuse a model that counts its calls in training, of which micro-batches are more.

    An attribute that each call fills with the same, such as a table that is made when it is
    needed, counts nothing.

    Raises:
        TaskError: a buffer changes, such as the vectors of spectral norm, or what is kept in an
            attribute; or a parameter does that is gathered for each pass.
    """
    versions = {name: each._version for name, each in called.named_parameters()}
    before = {name: each.clone() for name, each in called.named_buffers()}
    with (
        user_code("the model's forward pass on two examples"),
        in_training(called),
        torch.no_grad(),
        contextlib.nullcontext() if unfilled is None else unfilled.called_in_parts(called),
    ):
        with seeded(0):
            called(inputs)
        changed = [
            name
            for name, each in called.named_buffers()
            if name in before and not torch.equal(each, before[name])
        ]
        kept = numbers_kept(called)
        with seeded(0):
            called(inputs)
        counted = first_difference(kept, numbers_kept(called))
    for name, each in called.named_parameters():
        if gathered and each._version != versions[name]:
            raise TaskError(changes_parameter(name.removeprefix("model.")))
    if changed:
        raise TaskError(
            f"each call of the model in training changes its buffer "
            f"{changed[0].removeprefix('model.')!r}, and a pipeline calls it for every micro-batch "
            "instead of once; set pipeline_parallel = 1"
        )
    if counted is not None:
        raise TaskError(
            f"each call of the model in training changes its attribute "
            f"{counted.removeprefix('model.')!r}, and a pipeline calls it for every micro-batch "
            "instead of once; set pipeline_parallel = 1"
        )


class _CalledByTask(nn.Module):
    """A model together with its task's forward()."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model

    def forward(self, inputs: Any) -> Any:
        return self.task.forward(self.model, inputs)


def _place(stage: nn.Module, device: torch.device) -> None:
    """Move a stage that is not there yet; tensors without values cannot be moved."""
    if any(each.device != device for each in (*stage.parameters(), *stage.buffers())):
        stage.to(device)


def _place_buffers(stage: nn.Module, device: torch.device) -> None:
    """Move the buffers of a stage whose parameters have no memory."""
    for module in stage.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _parameter_names(names: ParameterNames, stage: nn.Module) -> dict[str, str]:
    table = names.in_stage(stage)
    return {name: table[name] for name, _ in stage.named_parameters(remove_duplicate=False)}


def _check_complete(names: ParameterNames, stage_names: Sequence[dict[str, str]]) -> None:
    """Refuse stages that lack a parameter of the model, and stages without parameters."""
    in_stages = {name for table in stage_names for name in table.values()}
    missing = sorted(set(names.parameters.values()) - in_stages)
    if missing:
        raise TaskError(f"parameter {missing[0]!r} is in none of the pipeline's stages")
    for index, table in enumerate(stage_names):
        if not table:
            raise TaskError(
                f"pipeline stage {index} of {len(stage_names)} has no parameters; lower "
                "pipeline_parallel"
            )


def refuse_unshardable(model: nn.Module, dims: ParallelDims, device_type: str) -> None:
    """Refuse a model whose parameters cannot be distributed over the ranks.

    Raises:
        TaskError: a parameter has no dimension, one that is trained has no elements or is kept
            elsewhere, or a gradient is sparse or changed by a hook; the forward pass changes
            parameters; or experts cannot be divided.
    """
    if dims.expert > 1:
        refuse_undividable(model, dims.expert)
    if dims.ranks > 1:
        _refuse_renormalised(model)
    if not dims.needs_fully_shard and dims.tensor == 1:
        return
    shards = dims.applies_fully_shard(device_type)
    if shards or dims.tensor > 1:
        refuse_kept_views(model)
    for name, parameter in model.named_parameters():
        # `fully_shard` fails in the first backward pass.
        if shards and parameter.requires_grad and not parameter.numel():
            raise TaskError(
                f"parameter {name!r} has no elements (its shape is {tuple(parameter.shape)}), and "
                f"its gradient cannot be sharded with datacenter.zero_stage={dims.zero_stage} and "
                f"precision {dims.precision}; build the model without it, or set its "
                "requires_grad to False"
            )
        if parameter.ndim == 0:
            raise TaskError(
                f"parameter {name!r} has no dimension, and the datacenter shards along the "
                "first one; give it the shape (1,)"
            )
        if (shards or dims.tensor > 1) and (
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ):
            raise TaskError(
                f"parameter {name!r} has a hook that gets its gradient, and here each rank has a "
                "part of the parameter, without the hook; change gradients in the task's "
                "optimizer(), or train on one rank in float32"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TaskError(
                f"module {name!r} has sparse=True, and gradients of several ranks cannot be "
                "summed sparsely; set sparse=False"
            )


def _refuse_renormalised(model: nn.Module) -> None:
    """Refuse embeddings that change their rows when they are called.

    Each rank would change the rows of its own examples, and shards forget the change.

    Raises:
        TaskError: there is one.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise TaskError(
                f"module {name!r} has max_norm={module.max_norm:g}, which changes rows of its "
                "weight in the forward pass, and each of several ranks would change those of its "
                "own examples; scale the output of the embedding instead, or train on one rank"
            )


# -- matrices -------------------------------------------------------------------------------------


def _tensor_plan(
    task: Task,
    model: nn.Module,
    dims: ParallelDims,
    stages: Sequence[nn.Module],
    traces: Sequence[StageTrace],
    run: RunModule,
    *,
    compared: bool,
) -> tuple[list[tuple[nn.Module, Any]], list[str]]:
    """Modules to shard with their styles, and notes for the user."""
    if dims.tensor == 1:
        return [], []
    task_plan = None
    if dims.context == 1:
        with user_code("tensor_parallel_plan()"):
            task_plan = task.tensor_parallel_plan(model)
    if task_plan is not None:
        if dims.sequence:
            raise TaskError(
                "sequence_parallel: the task gives a tensor_parallel_plan(), which says itself "
                "where activations are sharded; set sequence_parallel = false"
            )
        return resolve_plan(model, task_plan), []
    (inputs,), _ = traces[0]
    called = _CalledByTask(task, model)
    if dims.context > 1:
        return context_plan(model, stages, lambda: run(called, inputs)), []
    plan, notes = default_tensor_plan(
        model,
        dims.tensor,
        stages,
        lambda: run(called, inputs),
        sequence=dims.sequence,
        compared=compared,
    )
    if not plan:
        raise TaskError(
            f"no linear layer or embedding of the model can be divided into tensor_parallel="
            f"{dims.tensor} equal parts; lower it or give the task a tensor_parallel_plan(model)"
        )
    return plan, notes


@contextlib.contextmanager
def _named_by_its_key(dims: ParallelDims) -> Iterator[None]:
    """Name the key of the job that partitions the model, in an error that says what differs."""
    try:
        yield
    except PartitionError as error:
        if dims.context > 1:
            what = f"with context_parallel={dims.context} {error.fact}"
            raise TaskError(f"{what}; set context_parallel = 1") from error
        if dims.sequence:
            raise TaskError(
                f"with sequence_parallel {error.fact}; attention has to be a module of its own in "
                "each block, and a block may take nothing but the hidden states of the one before; "
                "otherwise set sequence_parallel = false"
            ) from error
        raise


def _shard_stage(
    stage: nn.Module,
    called: nn.Module,
    plan: Sequence[tuple[nn.Module, Any]],
    *,
    mesh: DeviceMesh,
    device: torch.device,
    names: Mapping[str, str],
    trace: StageTrace,
    units: Sequence[nn.Module],
    unfilled: UnfilledModel | None,
    first: bool,
) -> Reductions:
    """Shard the matrices of a stage, and check that it computes and trains what it did before.

    Args:
        stage: the stage.
        called: what takes its inputs.
        plan: modules to shard with their styles.
        mesh: the tensor-parallel ranks.
        device: where the stage is placed.
        names: the model's names of its parameters.
        trace: its inputs and outputs for the sample.
        units: parts of it to recompute one after the other.
        unfilled: where its values are, if it has no memory.
        first: whether it is the first stage, whose inputs are data.

    Raises:
        TaskError: it does not.
        NeedsWholeModel: it cannot be called in parts.
    """
    inputs, _ = trace
    with (
        _refused_together(),
        _agreed(unfilled),
        contextlib.nullcontext() if unfilled is None else unfilled.noting_failures(),
        user_code("the model's forward and backward pass on two examples"),
    ):
        whole = record_gradients(
            called,
            stage,
            names,
            inputs,
            units,
            differentiable_inputs=not first,
            read=None if unfilled is None else unfilled.read,
        )
    if unfilled is None:
        _place(stage, device)
    else:
        _place_buffers(stage, device)
    _shard_matrices(stage, plan, mesh)
    read = None
    if unfilled is not None:
        read = functools.partial(unfilled.read_shard, names, device)
    # Right after the matrices: with units compiled and sharded over the replicas, an error could
    # have other causes.
    with while_exchanging():
        with contextlib.nullcontext() if read is None else values_while_called(stage, read):
            check_sharded(called, trace, device)
        try:
            own = record_gradients(
                called,
                stage,
                names,
                on_device(inputs, device),
                units,
                differentiable_inputs=not first,
                zeros=whole.zeros,
                read=read,
            )
        except TaskError:  # has said what to change
            raise
        except Exception as error:
            raise PartitionError(
                f"the model fails in training ({first_line(error)})",
                "give the task a tensor_parallel_plan(model) that fits it, or set tensor_parallel "
                "= 1",
            ) from error
    drawing = drawing_modules(whole.draws, own.draws)
    replicated = [
        names[name]
        for name, each in stage.named_parameters()
        if each.requires_grad and not is_tensor_sharded(each)
    ]
    records = exchange_records(own, mesh.get_group())
    reductions = compare_gradients(whole, records, replicated)
    draw_apart(stage, drawing, mesh.get_local_rank(), device)
    modules = {id(module) for module in stage.modules()}
    for module, style in plan:
        if isinstance(style, SharesAttention | ChecksCalls) and id(module) in modules:
            style.end_comparison()
    return reductions


def _shard_matrices(
    stage: nn.Module, plan: Sequence[tuple[nn.Module, Any]], mesh: DeviceMesh
) -> None:
    """Apply the plan to the modules of a stage and tie parameters again."""
    users_by_id: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for prefix, module in stage.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            users_by_id.setdefault(id(parameter), []).append((module, name, f"{prefix}.{name}"))
    # Noted before the styles are applied: each replaces the parameters of its module, and so unties
    # them.
    tied = [users for users in users_by_id.values() if len(users) > 1]
    modules = {id(module) for module in stage.modules()}
    # In evaluation mode, PyTorch's transformer layer would read the matrices without calling
    # the sharded layers.
    torch.backends.mha.set_fastpath_enabled(False)
    for module, style in plan:
        if id(module) in modules:
            with user_code("the tensor-parallel plan"):
                apply_style(module, style, mesh)
    for users in tied:
        (owner, attribute, owner_name), *others = users
        kept = owner._parameters[attribute]
        for module, name, other_name in others:
            replaced = module._parameters[name]
            if getattr(kept, "placements", None) != getattr(replaced, "placements", None):
                raise TaskError(
                    f"parameters {owner_name!r} and {other_name!r} are one, and the "
                    "tensor-parallel plan shards them differently"
                )
            module._parameters[name] = kept


def _complete_embedding_outputs(stage: nn.Module, plan: Sequence[tuple[nn.Module, Any]]) -> None:
    """Have embeddings return plain tensors: compiled code mishandles asynchronous ones.

    The gradient of an `AsyncCollectiveTensor` is lost without an error; waiting for the tensor
    loses the gradient, too. Adding zero keeps it.
    """
    modules = {id(module) for module in stage.modules()}
    for module, _ in plan:
        if id(module) in modules and isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda module, args, output: output + 0)
