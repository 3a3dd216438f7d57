"""Checkpoint files: written durably, and checked when they are read."""

import os
import random

import pytest
import torch
from tests.server.storage.rounds import checkpoint_files

from isthmus.errors import UserError
from isthmus_server.storage.checkpoints import Checkpoints, DirectWriter, Saved, replacing

MIB = 1 << 20


@pytest.mark.parametrize("sizes", [(), (5,), (MIB,), (7, 3 * MIB, 0, 11), (2 * MIB - 1, 1)])
def test_a_file_has_all_pieces_that_were_written(tmp_path, sizes):
    pieces = [random.Random(size).randbytes(size) for size in sizes]
    with replacing(tmp_path / "file") as file:
        for piece in pieces:
            file.write(piece)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_without_direct_io_is_written_through_the_page_cache(tmp_path):
    data = os.urandom(3 * MIB + 5)
    with (tmp_path / "file").open("wb", buffering=0) as file:
        file.write(b"!")  # from here on nothing is aligned as a disk wants it
        written = DirectWriter(file)
        written.write(data)
        written.sync()
    assert (tmp_path / "file").read_bytes() == b"!" + data


def test_an_interrupted_write_keeps_the_old_file(tmp_path):
    with replacing(tmp_path / "file") as file:
        file.write(b"old")
    with pytest.raises(TypeError), replacing(tmp_path / "file") as file:
        file.write("no bytes")
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_another_users_link_in_the_place_of_a_draft_is_not_written_to(tmp_path, link):
    """In a folder that others can write, such as that of a transcript."""
    other = tmp_path / "other"
    other.write_bytes(b"yours")
    link(other, tmp_path / "file.tmp")
    with replacing(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()
    assert other.read_bytes() == b"yours"


def test_a_model_is_read_back(tmp_path):
    payload = os.urandom(MIB + 3)
    checkpoints, found = Checkpoints(tmp_path), bytearray(MIB + 3)
    saved = checkpoints.write_model(1, payload)
    checkpoints.read_model(saved, found)
    assert found == payload


@pytest.mark.parametrize("value", [torch.zeros(()), torch.zeros(0), torch.randn(3, 2).t()])
def test_tensors_are_read_back_with_their_shapes(new_run, value):
    store = new_run()
    name = store.checkpoints.write_tensors(
        1, {"0.step": torch.tensor(7.0), "10.a": value, "2.b": torch.ones(2)}
    )
    found = store.checkpoints.read_tensors(name)
    assert found.keys() == {"0.step", "10.a", "2.b"}
    assert found["10.a"].shape == value.shape
    assert torch.equal(found["10.a"], value)
    assert found["0.step"].item() == 7.0


def test_tensors_of_another_type_are_refused(new_run):
    with pytest.raises(UserError, match=r"keeps '0\.a' as torch\.float64, which cannot be stored"):
        new_run().checkpoints.write_tensors(1, {"0.a": torch.zeros(1, dtype=torch.float64)})


def test_no_file_is_written_without_tensors(new_run):
    store = new_run()
    assert store.checkpoints.write_tensors(1, {}) is None
    assert checkpoint_files(store) == []


def test_a_missing_checkpoint_or_one_of_another_size_is_one_sentence(new_run):
    store = new_run()
    with pytest.raises(UserError, match=r"^the checkpoint .*nothing\.safetensors cannot be read"):
        store.checkpoints.read_model(Saved("nothing.safetensors", ""), bytearray(8))
    with pytest.raises(UserError, match="cannot be read"):
        store.checkpoints.read_tensors(Saved("nothing.safetensors", ""))
    name = store.checkpoints.write_model(1, b"12345678")
    with pytest.raises(UserError, match=r"is not a model of this task any more"):
        store.checkpoints.read_model(name, bytearray(9))
    with pytest.raises(UserError):
        store.checkpoints.read_tensors(name)


@pytest.mark.parametrize("at", [0, 9, 15])
def test_a_damaged_checkpoint_is_one_sentence(new_run, at):
    store = new_run()
    saved = store.checkpoints.write_model(1, bytes(16))
    tensors = store.checkpoints.write_tensors(1, {"0.momentum": torch.ones(4)})
    for one in (saved, tensors):
        path = store.directory / "checkpoints" / one.file
        damaged = bytearray(path.read_bytes())
        damaged[at] ^= 4
        path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"model-000001\.safetensors is damaged: its digest"):
        store.checkpoints.read_model(saved, bytearray(16))
    with pytest.raises(UserError, match=r"optimizer-000001\.safetensors is damaged"):
        store.checkpoints.read_tensors(tensors)
