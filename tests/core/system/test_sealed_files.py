"""Sealed files: every change of their bytes is noticed."""

import pytest

from isthmus.errors import DamagedError
from isthmus.system.sealed_files import (
    read_sealed,
    read_sealed_bytes,
    write_sealed,
    write_sealed_bytes,
)


def test_every_changed_or_missing_byte_is_noticed(tmp_path):
    path, values = tmp_path / "file", {"name": "é", "count": 3, "ratio": 0.5, "more": [None]}
    write_sealed(path, values)
    assert read_sealed(path) == values
    data = path.read_bytes()
    damaged = [data[:end] for end in range(len(data))]
    damaged += [
        data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(len(data))
    ]
    for changed in (*damaged, b"[]", b"null", data + b" ", b"[" * 100_000):
        path.write_bytes(changed)
        with pytest.raises(DamagedError, match=r"file is damaged: it is not what was written"):
            read_sealed(path)


@pytest.mark.parametrize("contents", [b"", b"any bytes \xff"])
def test_every_changed_or_missing_byte_of_binary_contents_is_noticed(tmp_path, contents):
    path = tmp_path / "file"
    write_sealed_bytes(path, contents)
    assert read_sealed_bytes(path) == contents
    data = path.read_bytes()
    damaged = [data[:end] for end in range(len(data))]
    damaged += [
        data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(len(data))
    ]
    for changed in (*damaged, data + b" "):
        path.write_bytes(changed)
        with pytest.raises(DamagedError, match=r"file is damaged: it is not what was written"):
            read_sealed_bytes(path)
