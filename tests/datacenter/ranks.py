"""Functions that the tests run on each rank of a group (`on_ranks`)."""

import contextlib
import ctypes
import dataclasses
import functools
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

import isthmus_datacenter.parallel.optimizer
import isthmus_datacenter.training.engine
from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.system.process import keep_freed_memory, return_freed_memory
from isthmus.task import Participant, Task, load_task
from isthmus.task.scoring import build_model, losses
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_datacenter.checkpointing.checkpoints import ShardedCheckpoints
from isthmus_datacenter.checkpointing.digests import HashingWriter
from isthmus_datacenter.checkpointing.model_file import load_shards, store_shards
from isthmus_datacenter.checkpointing.named_state import named_state
from isthmus_datacenter.checkpointing.shard_files import read_shards, write_shards
from isthmus_datacenter.messages import Command, ControlSignal
from isthmus_datacenter.parallel import expert_parallel, host_messages
from isthmus_datacenter.parallel.gradient_check import Reductions
from isthmus_datacenter.parallel.host_messages import send_without_overlap
from isthmus_datacenter.parallel.model_shard import GradientAllReduce, ModelShard, local
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.parallel.parallelize import parallelize
from isthmus_datacenter.parallel.tensor_styles import FusedOutputExchange, heads_of_part
from isthmus_datacenter.training.consensus import StoppedError
from isthmus_datacenter.training.data import ExampleOrder
from isthmus_datacenter.training.engine import Engine, RankPlacement
from isthmus_datacenter.training.mean_gradient import mean_gradient
from isthmus_datacenter.training.memory_report import memory_of_tensors
from isthmus_datacenter.training.round import train_round

CPU = torch.device("cpu")
Operation = tuple[dict[str, Any], dict[str, Any], str]
"""The command that opens a run, the command to execute, and the state directory."""


def build_engine(rank: int, open_command: dict[str, Any], state: str) -> Engine:
    placement = RankPlacement(
        rank=rank,
        ranks=dist.get_world_size(),
        device=torch.device("cpu"),
        participant="test",
        state=Path(state),
    )
    return Engine(Command(**open_command), placement)


def shard_every_block() -> None:
    """Make each block a sharding unit, however small; avoid overflow in the first fp16 steps."""
    isthmus_datacenter.parallel.optimizer.INITIAL_LOSS_SCALE = 256.0

    isthmus_datacenter.training.engine.parallelize = functools.partial(
        parallelize, smallest_unit=1, backend="aot_eager"
    )


def train(rank: int, operations: list[Operation]) -> list[dict[str, object]]:
    """Train several runs one after the other; return the values of each."""
    shard_every_block()
    return [_train(build_engine(rank, each, state), command) for each, command, state in operations]


def trained_units(rank: int, operation: Operation) -> list[str]:
    """Train as a large model; return the modules whose parameters are gathered together."""
    open_command, command, state = operation
    # The ranks stay warm: with a large model they would keep no freed memory from now on.
    with (
        mock.patch.object(isthmus_datacenter.training.engine, "_LARGE_BYTES", 0),
        mock.patch.object(isthmus_datacenter.training.engine, "return_freed_memory"),
    ):
        engine = build_engine(rank, open_command, state)
    _train(engine, command)
    return [
        name
        for stage in engine.shard.stages.values()
        for name, module in stage.named_modules()
        if isinstance(module, FSDPModule)
    ]


def memory_returned(rank: int, operation: Operation, large: bool, without: str) -> list[float]:
    """Train as a large model or a small one, after every second of many small blocks was freed.

    `without` is a module that returns no memory. The share of what was freed that this process had
    returned to the kernel before the round, and after it.
    """
    open_command, command, state = operation
    least = 0 if large else 1 << 40
    try:
        with (
            mock.patch.object(isthmus_datacenter.training.engine, "_LARGE_BYTES", least),
            mock.patch.object(host_messages, "TRIMMED_BYTES", 0),
            mock.patch(f"{without}.trim_freed_memory"),
        ):
            engine = build_engine(rank, open_command, state)
            blocks = [torch.ones(32 << 10, dtype=torch.uint8) for _ in range(4096)]
            whole = _status("RssAnon")
            freed = sum(each.nbytes for each in blocks[::2])
            del blocks[::2]
            before = whole - _status("RssAnon")
            _train(engine, command)
            after = whole - _status("RssAnon")
        return [before / freed, after / freed]
    finally:
        keep_freed_memory()  # the ranks stay warm


def train_interrupted(rank: int, operation: Operation, step: int) -> dict[str, object]:
    """Train until a signal has the state saved after a step, and then anew, from there."""
    open_command, command, state = operation
    signals = iter([*[ControlSignal.CONTINUE] * (step - 1), ControlSignal.SAVE])
    engine = build_engine(rank, open_command, state)
    with contextlib.suppress(StoppedError):
        train_round(engine, Command(**command), lambda report: None, lambda: next(signals))
    assert next(signals, None) is None
    return _train(build_engine(rank, open_command, state), command)


def memory_of_state(rank: int, open_command: dict[str, Any], state: str) -> list[int]:
    """Bytes of parameters and buffers, of trained parameters, and of the optimizer after a step."""
    engine = build_engine(rank, open_command, state)
    _train(engine, {"op": "train_steps", "run_id": "run", "from_step": 0, "until_step": 1})
    parameters = engine.shard.parameters().values()

    def count(tensors: Any) -> int:
        return sum(local(each).numel() * each.element_size() for each in tensors)

    kept = [
        each
        for parameter in parameters
        for each in engine.optimizer.state_of(parameter).values()
        if isinstance(each, torch.Tensor)
    ]
    trained = [each for each in parameters if each.requires_grad]
    buffers = engine.shard.buffers().values()
    return [count([*parameters, *buffers]), count(trained), count(kept)]


def messages_of_processors(rank: int) -> tuple[bool, list[int]]:
    """Whether gradients are those of PyTorch's own messages, and peaks with its and with ours."""
    host_messages.GATHERED_BYTES = 1000  # several messages for each unit
    gradients = []
    peaks = []
    for overlaps in (True, False):
        torch.manual_seed(1)
        # Rows that two and three ranks share unevenly.
        model = nn.Sequential(*(nn.Linear(45, 45) for _ in range(6)))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
            if not overlaps:
                send_without_overlap(module)
        batch = torch.randn(4, 45, generator=torch.Generator().manual_seed(rank))
        model(batch).square().sum().backward()  # prepares the units
        model.zero_grad()
        tracker = MemTracker()
        tracker.track_external(model, batch)
        with tracker, _messages_are_let_go():
            model(batch).square().sum().backward()
        (kinds,) = tracker.get_tracker_snapshot("peak").values()
        peaks.append(kinds["Total"])
        gradients.append([local(each.grad) for each in model.parameters()])
    return all(map(torch.equal, *gradients)), peaks


def unit_without_elements(rank: int) -> bool:
    """Whether a model whose root has no element of its own gets a gradient."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_parameter("none", nn.Parameter(torch.empty(0, 3), requires_grad=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
        send_without_overlap(module)
    model(torch.ones(2, 4)).sum().backward()
    return all(each.grad is not None for each in model.parameters() if each.requires_grad)


@contextlib.contextmanager
def _messages_are_let_go() -> Iterator[None]:
    """Within it, messages return when Gloo has let go of their tensors.

    Its thread says that a message has ended just before it does so. If the thread has to wait for
    its turn then, a unit that was freed is in memory for a while.
    """

    def patient(name: str) -> Any:
        call = getattr(dist, name)

        @functools.wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            tensors = [
                each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
            ]
            counts = [each._use_count() for each in tensors]
            result = call(*args, **kwargs)
            while any(
                each._use_count() > count for each, count in zip(tensors, counts, strict=True)
            ):
                time.sleep(0)  # other threads have their turn
            return result

        return called

    names = ("all_gather", "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor")
    with contextlib.ExitStack() as restored:
        for name in names:
            restored.callback(setattr, dist, name, getattr(dist, name))
            setattr(dist, name, patient(name))
        yield


def memory_of_real_tensors(rank: int, open_command: dict[str, Any], rows: int) -> dict[str, int]:
    """What the report finds on ranks that are there, with tensors that have values."""
    job = Job.model_validate_json(open_command["job"])
    task = load_task(job.task.source, job.task.settings, base=Path(open_command["base"]))
    data: Any = task.local_data(Participant(name="test", regime="datacenter"))
    examples = [data[index] for index in range(rows)]
    with _messages_are_let_go():
        found = memory_of_tensors(task, job, examples, dist.get_world_size())
    return dataclasses.asdict(found)


def memory_and_parts_of_experts(
    rank: int, open_command: dict[str, Any], rows: int
) -> tuple[dict[str, int], list[tuple[list[int], list[int]]]]:
    """`memory_of_real_tensors`, and how many tokens each call of experts sent and received."""
    parts = []
    exchange = expert_parallel._exchange

    def counted(
        tokens: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        parts.append((sent, received))
        output: torch.Tensor = exchange(tokens, received, sent, group)
        return output

    expert_parallel._exchange = counted
    try:
        memory = memory_of_real_tensors(rank, open_command, rows)
    finally:
        expert_parallel._exchange = exchange
    # Each call of experts has two exchanges, of which the second brings the tokens back.
    return memory, parts[::2]


def refused_training(rank: int, operation: Operation) -> str:
    """The sentence with which a run cannot be trained."""
    open_command, command, state = operation
    engine = build_engine(rank, open_command, state)
    try:
        _train(engine, command)
    except UserError as error:
        return str(error)
    raise AssertionError


def _train(engine: Engine, command: dict[str, Any]) -> dict[str, object]:
    return train_round(
        engine, Command(**command), lambda report: None, lambda: ControlSignal.CONTINUE
    )


class _Listed(Dataset[Any]):
    """A dataset that lists what is read."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.indices: list[int] = []

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        self.indices.append(index)
        return self._data[index]


def train_and_list(
    rank: int, open_command: dict[str, Any], command: dict[str, Any], state: str
) -> list[int]:
    """Train a run; return the indices of the examples that this rank has read."""
    engine = build_engine(rank, open_command, state)
    listed = _Listed(engine.data)
    engine.batch_source.dataset = listed
    _train(engine, command)
    return listed.indices


def gradients(rank: int, operations: list[Operation]) -> list[dict[str, object]]:
    """Compute several mean gradients; return the values of each."""
    shard_every_block()
    return [
        mean_gradient(
            build_engine(rank, open_command, state),
            Command(**command),
            lambda: ControlSignal.CONTINUE,
        )
        for open_command, command, state in operations
    ]


def round_trip(rank: int, open_command: dict[str, Any], source: str, target: str) -> list[int]:
    """Load a model file and store it in another; return the number of elements of each shard."""
    shard_every_block()
    engine = build_engine(rank, open_command, target + ".state")
    load_shards(Path(source), engine.layout, engine.shard)
    store_shards(Path(target), engine.layout, engine.shard)
    dist.barrier()
    return [
        getattr(parameter, "_local_tensor", parameter).numel()
        for parameter in engine.shard.parameters().values()
    ]


def trained_from_start(
    rank: int, open_command: dict[str, Any], steps: int, target: str, whole: bool
) -> tuple[bool, int]:
    """Train some steps from the start, and store the model.

    Args:
        rank: this rank.
        open_command: the command that opens a run.
        steps: number of steps; 0 to store what the first step would begin with.
        target: the file of the model.
        whole: have every rank build the whole model.

    Returns:
        Whether it was built whole, and by how many bytes this process grew at most meanwhile.
    """
    shard_every_block()
    built = []

    class Watched(Engine):
        def _shard_in_parts(self) -> ModelShard | None:
            return None if whole else super()._shard_in_parts()

        def _shard_whole(self) -> ModelShard:
            built.append("whole")
            return super()._shard_whole()

    placement = RankPlacement(
        rank=rank,
        ranks=dist.get_world_size(),
        device=CPU,
        participant="test",
        state=Path(target + ".state"),
    )
    gc.collect()
    return_freed_memory()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: proc(5)
    before = _status("VmHWM")
    engine = Watched(Command(**open_command), placement)
    grown = _status("VmHWM") - before
    if steps:
        command = {"op": "train_steps", "run_id": "run", "until_step": steps}
        _train(engine, command)
    store_shards(Path(target), engine.layout, engine.shard)
    dist.barrier()
    return bool(built), grown


def _status(key: str) -> int:
    """A figure of this process' memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024


def exchange_fused_outputs(rank: int, pieces: int) -> bool:
    """Whether a rank receives its part of each piece, and gradients return to their producers."""
    ranks = dist.get_world_size()
    outputs = torch.arange(2.0 * 3 * pieces * ranks * 2).reshape(2, 3, -1)
    shard = outputs.chunk(ranks, -1)[rank].clone().requires_grad_()
    heads = FusedOutputExchange(dist.group.WORLD, pieces)(shard)
    (heads * heads.detach()).sum().backward()  # type: ignore[no-untyped-call]  # PyTorch has no types
    expected = heads_of_part(outputs, part=rank, degree=ranks, pieces=pieces)
    return torch.equal(heads, expected) and torch.equal(shard.grad, shard.detach())  # type: ignore[arg-type]


def sum_gradients(rank: int) -> tuple[list[list[float]], dict[str, list[float] | None]]:
    """Sum tensors of several sizes, types and strides, and gradients that one replica lacks."""
    factor = rank + 1
    tensors = [
        torch.full((2, 3), 1.0 * factor),
        torch.full((4, 2), 2.0 * factor)[:, 0],
        torch.full((4,), 3.0 * factor, dtype=torch.float64),
        torch.full((20,), 4.0 * factor),
        torch.full((2,), 5.0 * factor),
    ]
    GradientAllReduce(dist.group.WORLD, bucket_bytes=64).sum(tensors)
    stage = nn.ParameterDict({name: torch.zeros(1) for name in ("both", "one", "none")})
    shard = ModelShard(
        ParallelDims(ranks=2, zero_stage=0),
        {0: stage},
        {0: {name: name for name in stage}},
        all_reduce=GradientAllReduce(dist.group.WORLD),
    )
    (stage["both"] * factor + (stage["one"] * factor if rank else 0.0)).sum().backward()
    gradients = shard.gradients()
    shard.sum_over_replicas(gradients)
    by_name = {
        name: None if each.grad is None else each.grad.tolist() for name, each in stage.items()
    }
    assert {name: each.tolist() for name, each in gradients.items()} == {
        name: each for name, each in by_name.items() if each is not None
    }
    return [each.flatten().tolist() for each in tensors], by_name


def sum_partial_gradients(rank: int) -> dict[str, list[float] | None]:
    """Sum gradients of two tensor-parallel ranks of which each has some that the other lacks."""
    dims = ParallelDims(ranks=2, zero_stage=0, tensor=2, sequence=True)
    names = ("both", "first", "second", "none", "mean")
    stage = nn.ParameterDict({name: torch.zeros(2) for name in names})
    shard = ModelShard(
        dims,
        {0: stage},
        {0: {name: name for name in names}},
        mesh=dims.mesh("cpu"),
        reductions=Reductions(frozenset({"both", "first", "second", "none"})),
    )
    used = stage["first"] if rank == 0 else stage["second"]
    ((stage["both"] + used) * (rank + 1) + stage["mean"] * 3).sum().backward()
    gradients = shard.gradients()
    shard.reduce_replicated(gradients)
    return {name: None if each.grad is None else each.grad.tolist() for name, each in stage.items()}


def masks(rank: int, open_command: dict[str, Any], state: str) -> tuple[dict[str, Any], int]:
    """Where dropout keeps values in a pass of training, by place; and the next random number."""
    engine = build_engine(rank, open_command, state)
    engine.seed_generators(0)
    kept: dict[str, Any] = {}
    blocks: Any = engine.forward_backward.model.blocks
    with contextlib.ExitStack() as hooks:
        for at, block in enumerate(blocks):
            for name in ("inner", "outer"):

                def record(
                    module: Any, args: Any, output: Any, place: str = f"{at} {name}"
                ) -> None:
                    kept.setdefault(place, []).append((output.detach() != 0).tolist())

                hooks.callback(getattr(block, name).register_forward_hook(record).remove)
        engine.forward_backward.run(
            next(engine.batch_source.batches(0, 1)), 1.0, lambda: ControlSignal.CONTINUE
        )
    for at, block in enumerate(blocks):
        kept[f"{at} weights"] = block.weights_kept.tolist()
    return kept, int(torch.randint(1 << 60, ()))


# -- checkpoints ----------------------------------------------------------------------------------


def store_state(
    rank: int, open_command: dict[str, Any], states: list[str], step: int, directory: str
) -> None:
    """Write parameters and optimizer state of a step of each state directory, by name."""
    engine = build_engine(rank, open_command, states[0])
    for state in states:
        _restore(engine, state, step)
        torch.save(
            {name: _fields(engine, each) for name, each in engine.shard.parameters().items()},
            f"{directory}/{Path(state).name}",
        )


def compare_state(
    rank: int, readers: list[tuple[dict[str, Any], list[str]]], step: int, directory: str
) -> list[list[tuple[int, list[str]]]]:
    """Restore a step in several layouts and compare it with what `store_state` wrote.

    Args:
        rank: this rank.
        readers: commands that open a run, each with the state directories to restore from.
        step: the step to restore.
        directory: given to `store_state`.

    Returns:
        For each reader and state directory, the number of elements on this rank, and the names
        of the tensors that differ.
    """
    shard_every_block()
    return [
        [_compare(engine, state, step, f"{directory}/{Path(state).name}") for state in states]
        for engine, states in (
            (build_engine(rank, open_command, states[0]), states)
            for open_command, states in readers
        )
    ]


def _restore(engine: Engine, state: str, step: int) -> None:
    engine.checkpoints = ShardedCheckpoints(Path(state))
    engine.invalidate_state()
    engine.restore_step(step)


def _fields(engine: Engine, parameter: torch.nn.Parameter) -> dict[str, Any]:
    """A parameter's value and optimizer state."""
    return {"value": parameter.detach(), **engine.optimizer.state_of(parameter)}


def _compare(engine: Engine, state: str, step: int, file: str) -> tuple[int, list[str]]:
    _restore(engine, state, step)
    stored = torch.load(file)
    elements, differing = 0, []
    for name, parameter in engine.shard.parameters().items():
        fields = _fields(engine, parameter)
        if fields.keys() != stored[name].keys():
            differing.append(f"{name}: {sorted(fields)}")
        for key, value in fields.items():
            expected = stored[name][key]
            if isinstance(value, DTensor):
                sizes, offsets = compute_local_shape_and_global_offset(
                    value.shape, value.device_mesh, value.placements
                )
                for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    expected = expected.narrow(dim, min(offset, expected.shape[dim] - size), size)
                value = value.to_local()
            elements += value.numel()
            if not torch.equal(value, expected):
                differing.append(f"{name}: {key}")
    return elements, differing


def save_until_killed(rank: int, open_command: dict[str, Any], state: str, progress: str) -> None:
    """Save step after step, with the step as the value of every number in its checkpoint.

    The last complete step is written into the file `progress`.
    """
    engine = build_engine(rank, open_command, state)
    step = 0
    while True:
        step += 1
        _fill(engine, float(step))
        engine.checkpoints.begin_save(step, engine.shard, engine.optimizer)
        engine.checkpoints.finish_save()
        if rank == 0:
            draft = Path(f"{progress}.draft")
            draft.write_text(str(step))
            draft.replace(progress)  # a kill leaves one number or the other
            engine.checkpoints.keep_only({step - 1, step})


def write_both(rank: int, open_command: dict[str, Any], directory: str) -> list[str]:
    """Write one state as the product does and as PyTorch does, and read each with the other.

    Returns the names of the tensors that are not as they were.
    """
    engine = build_engine(rank, open_command, directory)
    _fill(engine, 1.0)
    own, reference = Path(directory) / "own", Path(directory) / "reference"
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    write_shards(named_state(engine.shard, engine.optimizer), HashingWriter(own))
    checkpoint.save(
        named_state(engine.shard, engine.optimizer),
        storage_writer=HashingWriter(reference),
        planner=planner,
    )
    differing = []
    for written in (own, reference):
        _fill(engine, 2.0)
        state = named_state(engine.shard, engine.optimizer)
        reader = FileSystemReader(written)
        if written is own:
            unflattened = DefaultLoadPlanner(
                flatten_state_dict=False, flatten_sharded_tensors=False
            )
            checkpoint.load(state, storage_reader=reader, planner=unflattened)
        else:
            read_shards(state, reader, reader.read_metadata())
        for name, value in state.items():
            part = value.to_local() if isinstance(value, DTensor) else value
            if isinstance(part, torch.Tensor) and not bool((part == 1.0).all()):
                differing.append(f"{written.name}: {name}")
    return differing


def _fill(engine: Engine, value: float) -> None:
    for parameter in engine.shard.parameters().values():
        parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.apply({})  # creates the optimizer's state
    with torch.no_grad():
        for parameter in engine.shard.parameters().values():
            for each in _fields(engine, parameter).values():
                each.fill_(value)


def read_checkpoints(
    rank: int, open_command: dict[str, Any], states: list[str]
) -> list[dict[int, set[float]]]:
    """Return the steps saved in each directory, with the distinct numbers in each checkpoint."""
    engine = build_engine(rank, open_command, states[0])
    contents = []
    for state in states:
        numbers: dict[int, set[float]] = {}
        for link in Path(state).glob("step-*"):
            step = int(link.name.removeprefix("step-"))
            if not ShardedCheckpoints(Path(state)).has(step):
                continue  # a link to one that failed on a rank, and was being removed
            _restore(engine, state, step)
            numbers[step] = {
                float(number)
                for parameter in engine.shard.parameters().values()
                for each in _fields(engine, parameter).values()
                for number in (each.min(), each.max())
            }
        contents.append(numbers)
    return contents


# -- whole runs -----------------------------------------------------------------------------------


def compare_with_one_process(
    rank: int, open_commands: list[dict[str, Any]], steps: int, batch: int, directory: str
) -> list[tuple[float, str]]:
    """Train each run on these ranks, and by hand in one process on the same examples.

    Args:
        rank: this rank.
        open_commands: without the models' layouts: the libraries of the models are imported only
            in the ranks.
        steps: number of steps.
        batch: examples of all replicas in one step.
        directory: for models and state.

    Returns:
        For each run the largest difference of parameters, and the engine's note on its layout.
    """
    shard_every_block()
    results = []
    for number, open_command in enumerate(open_commands):
        job = Job.model_validate_json(open_command["job"])
        base, data = Path(open_command["base"]), Path(open_command["data"])
        task = load_task(job.task.source, job.task.settings, base=base, data=data)
        model = build_model(task, job.seed)
        layout = TensorLayout.of(model)
        file = Path(directory) / f"{number}"
        if rank == 0:
            file.write_bytes(layout.header + bytes(4 * layout.size))
        header = layout.header.decode("latin-1")
        engine = build_engine(rank, {**open_command, "layout": header}, f"{file}.d")
        command = {"op": "train_steps", "run_id": "run", "until_step": steps, "result": str(file)}
        _train(engine, command)
        order = dataclasses.replace(engine.order, replicas=1, batch_size=batch)
        _train_by_hand(task, model, order, steps)
        parameters = layout.decode(bytearray(file.read_bytes()))
        difference = float((parameters - layout.gather(model)).abs().max())
        results.append((difference, engine.note))
    return results


def _train_by_hand(task: Task, model: nn.Module, order: ExampleOrder, steps: int) -> None:
    participant = Participant(name="test", regime="datacenter")
    optimizer = task.optimizer(model.parameters(), participant)
    data: Any = task.local_data(participant)
    for step in range(steps):
        rows = [data[index] for index in order.indices(step, step + 1, 0)]
        inputs, target = (torch.stack(column) for column in zip(*rows, strict=True))
        losses(task, model, inputs, target)[1].mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def note(rank: int, open_command: dict[str, Any], state: str) -> str:
    """What the user is told when a run is opened."""
    return build_engine(rank, open_command, state).note


def refusals(rank: int, open_commands: list[dict[str, Any]], state: str) -> list[str]:
    """Return the error message of each command that opens a run; empty if it succeeds."""
    messages = []
    for open_command in open_commands:
        try:
            build_engine(rank, open_command, state)
            messages.append("")
        except UserError as error:
            messages.append(str(error))
    return messages


def refusals_apart(rank: int, open_commands: list[dict[str, Any]], state: str) -> str:
    """The error message of opening a run by another command on each rank."""
    (message,) = refusals(rank, [open_commands[rank]], state)
    return message


# -- differential privacy -------------------------------------------------------------------------


def private_sums(
    rank: int, operations: list[tuple[dict[str, Any], list[list[int]], str]]
) -> list[dict[str, list[float]]]:
    """The gradients of one step of each run, of the examples that each rank is given.

    Args:
        rank: this rank.
        operations: the command that opens a run, the examples of each rank, a state directory.

    Returns:
        The sum over all ranks for each parameter.
    """
    shard_every_block()
    sums = []
    for open_command, draws, state in operations:
        engine = build_engine(rank, open_command, state)
        batch = engine.batch_source.read(draws[rank])  # type: ignore[union-attr]  # it is private
        engine.forward_backward.run(batch, 1.0, lambda: ControlSignal.CONTINUE)
        sums.append(
            {
                name: (each.full_tensor() if isinstance(each, DTensor) else each).flatten().tolist()
                for name, each in engine.shard.gradients().items()
            }
        )
    return sums
