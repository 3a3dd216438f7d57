"""Write and read the files of a sharded checkpoint, as `torch.distributed.checkpoint` plans them.

Planners, files and their metadata are PyTorch's, and so are the checkpoints. Its `save` and `load`
are not used: they exchange plans and results as pickles, which execute what anyone sends who has
taken a rank's place. Here ranks describe their tensors to the first one in messages of a known form
(`rank_messages`), and are told which of them they write; to read, each plans for itself, as
PyTorch's own planner leaves such plans unchanged.

The metadata file of a checkpoint is a pickle. It is read from the state directory, whose files are
as trusted as the code that reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from isthmus_datacenter.rank_messages import RankMessages

T = TypeVar("T")

_PLAN_BYTES = 1 << 26
"""Most bytes of a message about a plan: some hundred for each tensor of a rank."""


class OtherRankFailedError(Exception):
    """Another rank could not plan or write its part; it knows why."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a rank could write: one object, or its part of one tensor."""

    name: str
    kind: str
    """Name of a `WriteItemType`."""
    offset: tuple[int, ...] | None = None
    """Place of the part in its tensor; None for an object that is no tensor, which has none of the
    following either."""
    sizes: tuple[int, ...] = ()
    """Shape of the part."""
    shape: tuple[int, ...] = ()
    """Shape of the tensor."""
    dtype: str = ""
    requires_grad: bool = False
    pinned: bool = False

    @classmethod
    def of(cls, item: WriteItem) -> _Part:
        """Describe one of PyTorch's items."""
        name = item.index.fqn
        if item.tensor_data is None:
            return cls(name, item.type.name)
        tensor = item.tensor_data
        properties = tensor.properties
        assert item.index.offset is not None
        return cls(
            name,
            item.type.name,
            tuple(item.index.offset),
            tuple(tensor.chunk.sizes),
            tuple(tensor.size),
            str(properties.dtype).removeprefix("torch."),
            properties.requires_grad,
            properties.pin_memory,
        )

    def item(self) -> WriteItem:
        """What it was made of.

        Raises:
            ValueError: it describes nothing that PyTorch knows.
        """
        try:
            kind = WriteItemType[self.kind]
        except KeyError:
            raise ValueError(f"{self.kind!r} is no kind of an item") from None
        if self.offset is None:
            return WriteItem(MetadataIndex(self.name), kind)
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{self.dtype!r} is no type of a tensor")
        offset = torch.Size(self.offset)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offset, sizes=torch.Size(self.sizes)),
            properties=TensorProperties(
                dtype=dtype, requires_grad=self.requires_grad, pin_memory=self.pinned
            ),
            size=torch.Size(self.shape),
        )
        return WriteItem(MetadataIndex(self.name, offset), kind, tensor_data=data)


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """A part that its rank writes."""

    part: int
    """Position among the parts of the rank."""
    chunk: int | None
    """Position among the parts of the tensor in the metadata."""


@dataclasses.dataclass(frozen=True)
class _Written:
    """Where a part was written."""

    chosen: int
    """Position among those chosen for the rank."""
    bytes: int
    file: str
    offset: int
    length: int


_PLANS: RankMessages[Sequence[_Part] | None] = RankMessages(
    "the parts of a checkpoint", Sequence[_Part] | None, _PLAN_BYTES
)
_CHOICES: RankMessages[Sequence[_Chosen] | None] = RankMessages(
    "who writes a checkpoint", Sequence[_Chosen] | None, _PLAN_BYTES
)
_RESULTS: RankMessages[Sequence[_Written] | None] = RankMessages(
    "the files of a checkpoint", Sequence[_Written] | None, _PLAN_BYTES
)
_DONE: RankMessages[bool] = RankMessages("the end of a checkpoint", bool)


def write_shards(
    state: dict[str, Any], writer: FileSystemWriter, group: dist.ProcessGroup | None = None
) -> None:
    """Write a state to files, each part by one rank that has it. All ranks of a group call this.

    Args:
        state: tensors, distributed tensors, and other objects, by name.
        writer: of this rank.
        group: has gloo, and no other messages meanwhile.

    Raises:
        OtherRankFailedError: another rank failed.
        Exception: this rank failed.
        RankMessageError: a message is not of a rank.
    """
    rank = dist.get_rank(group)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def plan_own() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    own, error = _tried(plan_own)
    parts = None if own is None else [_Part.of(item) for item in own.items]
    gathered = _PLANS.gather(parts, group)
    choices: Sequence[Sequence[_Chosen] | None] | None = None
    all_plans: list[SavePlan] = []
    metadata = None
    if gathered is not None:
        choices = [None] * len(gathered)
        plans = [each for each in gathered if each is not None]
        if len(plans) == len(gathered):
            found, error = _tried(lambda: _plan_all(planner, plans))
            if found is not None:
                choices, all_plans, metadata = found
    chosen = _CHOICES.scatter(choices, group)
    if chosen is None:
        raise error or OtherRankFailedError
    assert own is not None

    def write() -> list[_Written]:
        # Files are named by the position of the plan among those of all ranks.
        plans = [SavePlan([])] * dist.get_world_size(group)
        plans[rank] = dataclasses.replace(
            own, items=[_with_chunk(own.items[each.part], each.chunk) for each in chosen]
        )
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[rank])
        return _written(plan, writer.write_data(plan, planner).wait())

    results, error = _tried(write)
    everything = _RESULTS.gather(results, group)
    done = False
    if everything is not None and metadata is not None:
        written = [each for each in everything if each is not None]
        if len(written) == len(everything):
            _, error = _tried(lambda: _finish(writer, metadata, all_plans, written))
            done = error is None
    if not _DONE.broadcast(done, group):
        raise error or OtherRankFailedError


def read_shards(state: dict[str, Any], reader: FileSystemReader, metadata: Metadata) -> None:
    """Read a state from files, each rank what it has; without a message to others.

    Args:
        state: tensors and distributed tensors to read into; other objects are replaced.
        reader: of this rank.
        metadata: of the checkpoint.

    Raises:
        Exception: a file cannot be read, or does not fit.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    loaded = dict(state)
    planner.set_up_planner(loaded, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
    state.update(loaded)


def _tried(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What a call returned, or raised: other ranks wait for a message either way."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - raised by the caller, after its message
        return None, error


def _plan_all(
    planner: DefaultSavePlanner, gathered: Sequence[Sequence[_Part]]
) -> tuple[list[list[_Chosen]], list[SavePlan], Metadata]:
    """Choose who writes what; returns also the plans that follow, with the metadata."""
    plans = [SavePlan([part.item() for part in parts]) for parts in gathered]
    chosen, metadata = planner.create_global_plan(plans)
    choices = []
    for plan, whole in zip(chosen, plans, strict=True):
        # An index is found by name and offset.
        positions = {item.index: position for position, item in enumerate(whole.items)}
        choices.append([_Chosen(positions[item.index], item.index.index) for item in plan.items])
    return choices, chosen, metadata


def _with_chunk(item: WriteItem, chunk: int | None) -> WriteItem:
    return dataclasses.replace(item, index=dataclasses.replace(item.index, index=chunk))


def _written(plan: SavePlan, results: Sequence[WriteResult]) -> list[_Written]:
    positions = {item.index: position for position, item in enumerate(plan.items)}
    return [
        _Written(
            positions[result.index],
            result.size_in_bytes,
            result.storage_data.relative_path,
            result.storage_data.offset,
            result.storage_data.length,
        )
        for result in results
    ]


def _finish(
    writer: FileSystemWriter,
    metadata: Metadata,
    plans: Sequence[SavePlan],
    written: Sequence[Sequence[_Written]],
) -> None:
    """Write the metadata, once all ranks have written their parts."""
    results = [
        [
            WriteResult(
                plan.items[each.chosen].index,
                each.bytes,
                _StorageInfo(each.file, each.offset, each.length),
            )
            for each in rows
        ]
        for plan, rows in zip(plans, written, strict=True)
    ]
    writer.finish(metadata, results)
