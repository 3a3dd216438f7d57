"""Distributed checkpoints of PyTorch become safetensors files, and execute nothing."""

import enum
import os
import pickle
import re
import tracemalloc
import zipfile
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file
from tests.warm_ranks import Ranks
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from isthmus.errors import UserError
from isthmus.start.distributed_checkpoint import DistributedCheckpoint
from isthmus.task.model_commands import model as command


def write_sharded(rank, path):
    """On each rank: a checkpoint of a sharded model in torchtitan's form; returns the values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3).to(torch.bfloat16), nn.BatchNorm1d(3))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for each in model:
        fully_shard(each, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {
        **model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "train_state": {"step": torch.tensor(3)},
        "dataloader": {"position": 17},
    }
    dcp.save(state, checkpoint_id=path)
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
        for name, value in model.state_dict().items()
    }


def write(path, state):
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def change(folder, edit):
    """Write the description anew after a change."""
    path = folder / ".metadata"
    described = pickle.loads(path.read_bytes())
    edit(described)
    path.write_bytes(pickle.dumps(described))


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_a_sharded_model_is_joined_and_the_state_of_training_left_out(tmp_path):
    with Ranks(2) as ranks:
        expected, _ = ranks.run(Path(__file__), "write_sharded", str(tmp_path / "step-10"))
    assert len(list((tmp_path / "step-10").glob("*.distcp"))) == 2
    output = tmp_path / "model.safetensors"
    result = CliRunner().invoke(command, ["convert", str(tmp_path / "step-10"), str(output)])
    assert result.exit_code == 0, result.output
    found = load_file(output)
    assert {name: each.tolist() for name, each in found.items()} == expected
    assert found["1.weight"].dtype == torch.bfloat16
    assert found["2.num_batches_tracked"].shape == ()
    assert re.match(r"left out: \d+ values that are not the model's \(", result.output)
    checkpoint = DistributedCheckpoint.open(tmp_path / "step-10")
    with pytest.raises(UserError, match=r"model\.safetensors exists already; name another file"):
        checkpoint.write(output)
    with pytest.raises(UserError, match=r"cannot be written: File name too long"):
        checkpoint.write(tmp_path / ("m" * 300))


class Command:
    def __reduce__(self):
        import os

        return os.system, ("touch executed",)


@pytest.mark.parametrize("where", ["planner_data", "storage_meta", "version"])
def test_code_in_a_description_is_not_executed(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "a", {"w": torch.ones(2)})
    change(folder, lambda described: setattr(described, where, Command()))
    with pytest.raises(UserError, match=r"it names posix\.system, which PyTorch does not write"):
        DistributedCheckpoint.open(folder)
    assert not (tmp_path / "executed").exists()


class OfOldPython(pickle.Pickler):
    """Stores members of enumerations as Python 3.11.2 does."""

    def reducer_override(self, each):
        if isinstance(each, enum.Enum):
            return getattr, (type(each), each.name)
        return NotImplemented


class Attribute:
    def __reduce__(self):
        return getattr, (Metadata, "__init__")


def test_a_description_of_python_3_11_2_is_read_and_no_other_attribute(tmp_path):
    folder = write(tmp_path / "a", {"w": torch.ones(2)})
    path = folder / ".metadata"
    described = pickle.loads(path.read_bytes())
    with path.open("wb") as file:
        OfOldPython(file).dump(described)
    assert DistributedCheckpoint.open(folder).read("w").tolist() == [1.0, 1.0]
    change(folder, lambda described: setattr(described, "version", Attribute()))
    with pytest.raises(UserError, match="it reads an attribute, which could execute code"):
        DistributedCheckpoint.open(folder)


def named(module, name):
    """Operators of a pickle that put a global on the stack."""
    return (
        pickle.SHORT_BINUNICODE
        + bytes([len(module)])
        + module.encode()
        + (pickle.SHORT_BINUNICODE + bytes([len(name)]) + name.encode() + pickle.STACK_GLOBAL)
    )


def described_by(folder, *operators):
    data = pickle.PROTO + bytes([4]) + b"".join(operators) + pickle.STOP
    (folder / ".metadata").write_bytes(data)


TEXT = pickle.SHORT_BINUNICODE + bytes([4]) + b"open"


@pytest.mark.parametrize(
    "owner",
    [
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
    ],
)
def test_a_description_changes_no_class_and_no_function(tmp_path, owner):
    slots = pickle.EMPTY_DICT + TEXT + pickle.NEWTRUE + pickle.SETITEM
    state = pickle.NONE + slots + pickle.TUPLE2  # by which pickle sets an attribute of any object
    described_by(tmp_path, named(*owner), state, pickle.BUILD)
    before = PosixPath.open
    with pytest.raises(UserError, match="it changes an object that PyTorch does not write there"):
        DistributedCheckpoint.open(tmp_path)
    assert PosixPath.open is before
    assert not hasattr(Metadata, "open")
    assert not hasattr(torch.serialization._get_layout, "open")


def test_a_description_of_a_few_bytes_takes_no_more_memory(tmp_path):
    place = (1 << 24).to_bytes(4, "little")
    described_by(tmp_path, pickle.NONE, pickle.LONG_BINPUT, place)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="it is no description of a distributed checkpoint"):
            DistributedCheckpoint.open(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_keys_are_names_alone(tmp_path):
    deep = pickle.EMPTY_TUPLE + 10 * pickle.TUPLE1  # of a million of them, the hash is a crash
    for add in (deep + pickle.NONE + pickle.SETITEM, pickle.MARK + deep + b"N" + pickle.SETITEMS):
        described_by(tmp_path, pickle.EMPTY_DICT, add)
        with pytest.raises(UserError, match="it has a key that PyTorch does not write there"):
            DistributedCheckpoint.open(tmp_path)


def test_code_in_a_piece_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "a", {"w": torch.ones(2)})
    torch.save(Command(), folder / "__0_0.distcp")
    size = (folder / "__0_0.distcp").stat().st_size

    def edit(described: Metadata):
        for each in described.storage_data.values():
            each.length = size

    change(folder, edit)
    with pytest.raises(UserError, match="is damaged or not whole where 'w' should be"):
        DistributedCheckpoint.open(folder).read("w")
    assert not (tmp_path / "executed").exists()


def first(table):
    return next(iter(table.values()))


def chunk(described):
    return described.state_dict_metadata["w"].chunks[0]


def rename(described, name):
    described.state_dict_metadata[name] = described.state_dict_metadata.pop("w")
    where = MetadataIndex(name, torch.Size([0, 0]))
    described.storage_data = {where: first(described.storage_data)}


CHANGES = {
    "not all pieces": lambda each: each.state_dict_metadata["w"].chunks.clear(),
    "is not within": lambda each: setattr(chunk(each), "sizes", torch.Size([9, 9])),
    "another number of dimensions": lambda each: setattr(chunk(each), "sizes", torch.Size([6])),
    "no name of a file": lambda each: setattr(
        first(each.storage_data), "relative_path", "../a/__0_0.distcp"
    ),
    "more bytes than are stored": lambda each: setattr(first(each.storage_data), "length", 3),
    "no whole number": lambda each: setattr(first(each.storage_data), "offset", -1),
    "does not say where 'w' is": lambda each: each.storage_data.clear(),
    "has no tensors of a model": lambda each: each.state_dict_metadata.clear(),
    "is compressed": lambda each: setattr(
        first(each.storage_data), "transform_descriptors", ["zstd"]
    ),
    "it does not say of which type 'w' is": lambda each: setattr(
        each.state_dict_metadata["w"].properties, "dtype", torch.Size([1])
    ),
    "which is no name of a file": lambda each: setattr(
        first(each.storage_data), "relative_path", "a\0b"
    ),
    "number of at most 63 bits": lambda each: setattr(first(each.storage_data), "offset", 1 << 70),
    "has more than 64 dimensions": lambda each: setattr(
        each.state_dict_metadata["w"], "size", torch.Size([1] * 65)
    ),
    "'__metadata__' is no name of a tensor": lambda each: rename(each, "__metadata__"),
    "is no name of a tensor: it is no text": lambda each: rename(each, "\ud800"),
}


@pytest.mark.parametrize("sentence", CHANGES)
def test_a_description_that_does_not_fit_is_refused(tmp_path, sentence):
    folder = write(tmp_path / "a", {"w": torch.ones(2, 3)})
    change(folder, CHANGES[sentence])
    sentence = sentence.replace("not all pieces", "does not have all pieces")
    with pytest.raises(UserError, match=re.escape(sentence)):
        DistributedCheckpoint.open(folder)


def test_pieces_that_overlap_are_refused(tmp_path):
    folder = write(tmp_path / "a", {"w": torch.ones(2, 3)})

    def edit(described):
        whole = chunk(described)
        whole.sizes = torch.Size([1, 3])
        described.state_dict_metadata["w"].chunks.append(whole)

    change(folder, edit)
    torch.save(torch.ones(1, 3), folder / "__0_0.distcp")
    size = (folder / "__0_0.distcp").stat().st_size
    change(folder, lambda each: setattr(first(each.storage_data), "length", size))
    with pytest.raises(UserError, match="has pieces of 'w' that overlap"):
        DistributedCheckpoint.open(folder).read("w")


def test_a_tensor_is_as_large_as_its_file_before_it_takes_memory(tmp_path):
    folder = write(tmp_path / "a", {"w": torch.ones(2, 3)})

    def edit(described):
        large = torch.Size([10**6, 10**6])
        described.state_dict_metadata["w"].size = large
        chunk(described).sizes = large
        first(described.storage_data).length = 1 << 60

    change(folder, edit)
    with pytest.raises(UserError, match=r"not whole where 'w' should be: it has \d+ bytes; copy"):
        DistributedCheckpoint.open(folder).read("w")
    path = folder / "__0_0.distcp"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"__0_0\.distcp cannot be read: it is no file"):
        DistributedCheckpoint.open(folder).read("w")


def test_pieces_without_values_or_of_more_bytes_than_the_file_are_refused(tmp_path):
    folder = write(tmp_path / "a", {"w": torch.ones(3000)})
    path = folder / "__0_0.distcp"

    def whole_file(described):
        found = first(described.storage_data)
        found.offset = 0
        found.length = path.stat().st_size

    torch.save(torch.zeros(3000), path)
    with zipfile.ZipFile(path) as archive:
        members = {each.filename: archive.read(each) for each in archive.infolist()}
    members["noise"] = os.urandom(12_500)  # so that the file is as large as the tensor
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    change(folder, whole_file)
    with pytest.raises(UserError, match=r"__0_0\.distcp is compressed, which this version does"):
        DistributedCheckpoint.open(folder).read("w")

    folder = write(tmp_path / "b", {"w": torch.ones(2, 3)})
    path = folder / "__0_0.distcp"
    torch.save(torch.empty(2, 3, device="meta"), path)
    change(folder, whole_file)
    with pytest.raises(UserError, match="has other values than its description says for 'w'"):
        DistributedCheckpoint.open(folder).read("w")


def test_every_file_that_is_cut_short_is_refused_and_leaves_nothing(tmp_path):
    folder = write(tmp_path / "a", {"w": torch.ones(2, 3), "v": torch.zeros(50)})
    output = tmp_path / "out.safetensors"
    for path in (folder / "__0_0.distcp", folder / ".metadata"):
        data = path.read_bytes()
        for length in range(0, len(data), 97):
            path.write_bytes(data[:length])
            with pytest.raises(UserError):
                DistributedCheckpoint.open(folder).write(output)
        path.write_bytes(data)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(UserError, match=r"__0_0\.distcp cannot be read: No such file"):
        DistributedCheckpoint.open(folder).write(output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path):
    folder = write(tmp_path / "a", {"w": torch.ones(2, 3)})
    (tmp_path / ".out.safetensors.part").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"out\.safetensors cannot be written: No space left on"):
        DistributedCheckpoint.open(folder).write(tmp_path / "out.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_of_another_kind_is_refused(tmp_path):
    with pytest.raises(UserError, match="name the folder of a distributed checkpoint of PyTorch"):
        DistributedCheckpoint.open(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(UserError, match="it is no description of a distributed checkpoint"):
        DistributedCheckpoint.open(tmp_path)
