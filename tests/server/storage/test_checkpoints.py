import os
import random

import pytest

from isthmus_server.storage.checkpoints import Checkpoints, Written, replacing

MIB = 1 << 20


@pytest.mark.parametrize("sizes", [(), (5,), (MIB,), (7, 3 * MIB, 0, 11), (2 * MIB - 1, 1)])
def test_a_file_holds_what_was_written_in_whatever_pieces(tmp_path, sizes):
    pieces = [random.Random(size).randbytes(size) for size in sizes]
    with replacing(tmp_path / "file") as file:
        for piece in pieces:
            file.write(piece)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_go_past_the_page_cache_is_written_through_it(tmp_path):
    data = os.urandom(3 * MIB + 5)
    with (tmp_path / "file").open("wb", buffering=0) as file:
        file.write(b"!")  # from here on nothing is aligned as a disk wants it
        written = Written(file)
        written.write(data)
        written.sync()
    assert (tmp_path / "file").read_bytes() == b"!" + data


def test_a_file_that_was_not_written_to_its_end_does_not_take_the_old_ones_place(tmp_path):
    with replacing(tmp_path / "file") as file:
        file.write(b"old")
    with pytest.raises(TypeError), replacing(tmp_path / "file") as file:
        file.write("no bytes")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_model_is_named_by_what_is_in_its_file(tmp_path):
    payload = os.urandom(MIB + 3)
    checkpoints, found = Checkpoints(tmp_path), bytearray(MIB + 3)
    saved = checkpoints.write_model(1, payload)
    checkpoints.read_model(saved, found)
    assert found == payload
