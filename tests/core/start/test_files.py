"""The files of a start: what is found in a folder, what is refused, and the digest."""

import hashlib
import json
import os
import struct
import subprocess

import pytest
import torch
from safetensors.torch import save_file

from isthmus.errors import UserError
from isthmus.start.files import StartFiles
from isthmus.start.safetensors_file import SafetensorsFile, stored_dtype, torch_dtype

TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def write_sharded(folder, shards):
    """Files and index as transformers writes them."""
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_values_of_every_type_are_those_that_the_library_wrote(tmp_path, dtype):
    values = (torch.arange(35) % 7 - 3).view(5, 7)
    tensors = {"a": values.to(dtype), "none": torch.empty(0, 3, dtype=dtype)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile.open(tmp_path / "model.safetensors")
    assert file.metadata == {"format": "pt"}
    for name, stored in file.tensors.items():
        assert torch_dtype(stored.dtype) == dtype
        assert stored_dtype(dtype) == stored.dtype
        read = file.read(stored)
        assert read.shape == tensors[name].shape
        assert read.view(torch.uint8).equal(tensors[name].view(torch.uint8))


def test_a_tensor_larger_than_a_piece_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("isthmus.start.safetensors_file.PIECE_BYTES", 64)
    values = torch.randn(10, 10)
    save_file({"a": values}, tmp_path / "model.safetensors")
    file = SafetensorsFile.open(tmp_path / "model.safetensors")
    assert file.read(file.tensors["a"]).equal(values)


def test_the_digest_is_what_sha256sum_says(tmp_path):
    save_file({"a": torch.zeros(3)}, tmp_path / "one.safetensors")
    data = (tmp_path / "one.safetensors").read_bytes()
    assert (
        StartFiles.find(tmp_path / "one.safetensors").digest() == hashlib.sha256(data).hexdigest()
    )
    folder = write_sharded(tmp_path / "two", [{"a": torch.zeros(3)}, {"b": torch.ones(2)}])
    printed = subprocess.run(
        "sha256sum *.safetensors | sha256sum",
        shell=True,
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    assert StartFiles.find(folder).digest() == printed.stdout.split()[0]


def header_of(table, data=b""):
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is no safetensors file, or only the beginning of one: its header would have 0 byt"),
        (b"\xff" * 8, "its header would have 18446744073709551615 bytes, and the file has 8"),
        (header_of({"a": F32}), r"has 69 bytes and is shorter than its header says \(77 bytes\)"),
        (header_of({"a": F32}, bytes(9)), "is longer than its header says"),
        (header_of({"a": F32 | {"shape": [3]}}, bytes(8)), r"'a' of shape \(3,\) in F32 does not"),
        (header_of({"a": F32 | {"dtype": "F4"}}, bytes(8)), "the type 'F4', which this version"),
        (header_of({"a": F32 | {"shape": [-2]}}, bytes(8)), "that is no whole number"),
        (header_of({"a": F32 | {"shape": [1] * 65}}, bytes(4)), "'a' has more than 64 dimensions"),
        (
            header_of({"a": F32 | {"shape": [0, 1 << 63], "data_offsets": [0, 0]}}),
            "that is no whole number of at most 63 bits",
        ),
        (
            header_of({"a": F32, "b": F32}, bytes(8)).replace(b'"b"', b'"a"'),
            "is no safetensors file: its header has a name twice",
        ),
        (header_of({"a": F32, "b": F32}, bytes(8)), "'b' is not where it should"),
        (header_of({"a": F32 | {"data_offsets": [8, 16]}}, bytes(16)), "'a' is not where"),
        (header_of({"a": F32, "__metadata__": [1]}, bytes(8)), "is no safetensors file: "),
        (header_of({"a": F32, "__metadata__": "ab"}, bytes(8)), "is no safetensors file: "),
        (header_of([1]), "is no safetensors file: "),
        (header_of({"a": 3}), "is no safetensors file: "),
        (struct.pack("<Q", 3) + b"[[[", "is no safetensors file: "),
    ],
)
def test_a_damaged_file_is_refused_by_one_sentence(tmp_path, data, sentence):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(UserError, match=sentence) as refused:
        StartFiles.find(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_file_that_was_changed_and_changed_back_with_its_time_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3)}, path)
    data = path.read_bytes()
    found = StartFiles.find(path)
    before = path.stat()
    for content in (bytes(len(data)), data):
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match="has changed while it was read"):
        found.check_unchanged()


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    files = StartFiles.find(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(UserError, match="has become shorter while it was read"):
        files.digest()


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([], "has no weights: neither model.safetensors nor model.safetensors.index.json nor"),
        (["pytorch_model.bin"], "pytorch_model.bin is pickled, and reading it could execute code"),
        (["part-1.safetensors", "part-2.safetensors"], "whether part-1.safetensors, part-2.safe"),
        (["job.json"], "has no final model yet"),
        (["model.safetensors", "model.safetensors.index.json"], "has both model.safetensors and"),
        (["model.safetensors", "adapter_config.json"], "and an adapter of PEFT; name the file"),
        (["adapter_config.json"], "adapter_model.safetensors cannot be read: No such file"),
        (["model.safetensors.index.json"], "has no weight_map"),
    ],
)
def test_a_folder_without_one_model_is_refused(tmp_path, names, sentence):
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=sentence):
        StartFiles.find(tmp_path)


def test_a_path_that_does_not_exist_or_is_another_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is neither a file nor a folder"):
        StartFiles.find(tmp_path / "model")
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"is no .safetensors file; name such a file"):
        StartFiles.find(tmp_path / "model.pt")


def test_an_index_that_does_not_describe_its_files_is_refused(tmp_path):
    folder = write_sharded(tmp_path / "model", [{"a": torch.zeros(3)}, {"b": torch.ones(2)}])
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    other = table["weight_map"] | {"c": "model-00001-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": other}))
    with pytest.raises(
        UserError, match=r"has 'c' in no file, and model.safetensors.index.json say"
    ):
        StartFiles.find(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../model-00001-of-00002.safetensors"}}))
    with pytest.raises(UserError, match="which is no file's name"):
        StartFiles.find(folder)
    index.write_text(json.dumps({"weight_map": {"a": "b\x1b[2J\n.safetensors"}}))
    with pytest.raises(UserError, match=r"in 'b\\x1b\[2J\\n\.safetensors'; rename that file"):
        StartFiles.find(folder)
    index.write_text(json.dumps(table))
    save_file(
        {"a": torch.zeros(3), "b": torch.ones(2)}, folder / "model-00002-of-00002.safetensors"
    )
    with pytest.raises(UserError, match="both have the tensor 'a'"):
        StartFiles.find(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"model-00002-of-00002.safetensors cannot be read: No such"
    ):
        StartFiles.find(folder)
