"""Encode the records of a Flower message as one blob of the link.

The format is eight bytes of length, a JSON header, and the concatenated data of all arrays::

    [["arrays", "arrays", [["w", "float32", [2], "numpy.ndarray", 0, 136]]], ...

Flower's own encoding is one protobuf (at most 2 GiB, with several copies of each byte) or a tree of
hashed objects that its runtime fetches one by one; the link has chunks, digests and resumption.

>>> record = RecordDict({"arrays": ArrayRecord([np.ones(2)]), "more": ConfigRecord({"lr": 0.1})})
>>> back = decode(encode(record))
>>> back["arrays"]["0"].numpy(), back["more"]
(array([1., 1.]), {'lr': 0.1})
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from isthmus.errors import UpdateError
from isthmus.tensors.exchange_set import MAX_HEADER_BYTES
from isthmus.transport.blobs import Buffer
from isthmus_flower.messages import (
    NUMPY,
    Array,
    ArrayRecord,
    ConfigRecord,
    MetricRecord,
    RecordDict,
)

_LENGTH = struct.Struct("<Q")
_DTYPES = frozenset(
    ["bool", "complex64", "complex128", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
"""Data types allowed in arrays on the link."""

_KINDS = {"arrays": ArrayRecord, "metrics": MetricRecord, "config": ConfigRecord}


def encode(records: RecordDict) -> bytes:
    """Encode all records, with one copy of their arrays."""
    table: list[tuple[str, str, Any]] = []
    data: list[bytes] = []
    offset = 0
    for name, record in records.items():
        kind = next(kind for kind, made in _KINDS.items() if isinstance(record, made))
        if isinstance(record, ArrayRecord):
            entries = []
            for key, array in record.items():
                end = offset + len(array.data)
                entries.append([key, array.dtype, list(array.shape), array.stype, offset, end])
                data.append(array.data)
                offset = end
            table.append((name, kind, entries))
        else:
            values = {key: _to_json(value) for key, value in record.items()}
            table.append((name, kind, values))
    header = json.dumps(table).encode()
    return b"".join((_LENGTH.pack(len(header)), header, *data))


def decode(payload: Buffer | bytes) -> RecordDict:
    """Decode records; arrays are copied from the payload.

    Raises:
        UpdateError: `encode` does not write this, or the header and data of an array disagree.
    """
    view = memoryview(payload)
    try:
        (length,) = _LENGTH.unpack_from(view)
        if length > min(len(view) - _LENGTH.size, MAX_HEADER_BYTES):
            raise ValueError("its header is truncated")
        table = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + length]))
        body = _Body(view[_LENGTH.size + length :])
        records = RecordDict({name: _record(kind, content, body) for name, kind, content in table})
        if body.read != len(body.view):
            raise ValueError(f"{len(body.view) - body.read} bytes of it belong to no array")
        return records
    except UpdateError:
        raise
    except (
        struct.error,
        AttributeError,
        KeyError,
        OverflowError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise UpdateError(
            f"these are not the records of a Flower message: {' '.join(str(error).split())}"
        ) from error


@dataclasses.dataclass
class _Body:
    """The data of all arrays, read once and in order.

    The decoded records therefore take no more memory than the message.
    """

    view: memoryview
    read: int = 0

    def take(self, key: str, start: int, end: int) -> bytes:
        if start != self.read or not start <= end <= len(self.view):
            raise ValueError(f"the array {key!r} does not begin where the previous one ends")
        self.read = end
        return bytes(self.view[start:end])


def _record(kind: str, content: Any, body: _Body) -> ArrayRecord | MetricRecord | ConfigRecord:
    if kind == "metrics":
        return MetricRecord(content)
    if kind == "config":
        return ConfigRecord({key: _from_json(value) for key, value in content.items()})
    if kind != "arrays":
        raise ValueError(f"there is no record of kind {kind!r}")
    record = ArrayRecord()
    for key, dtype, shape, stype, start, end in content:
        data = body.take(key, start, end)
        array = Array(dtype=dtype, shape=tuple(shape), stype=stype, data=data)
        check(key, array)
        record[key] = array
    return record


def check(key: str, array: Array) -> None:
    """Refuse a `.npy` array whose header is not the one that NumPy writes for its type and shape.

    Nothing of an untrusted header is evaluated, and no memory beyond the received size allocated.

    Raises:
        UpdateError: a type that is not allowed, or another size or header.
    """
    if array.stype != NUMPY:
        return  # only the app that wrote it can read it
    if array.dtype not in _DTYPES or any(size < 0 for size in array.shape):
        raise UpdateError(
            f"the array {key!r} holds {array.dtype} of shape {array.shape}, which is not supported"
        )
    dtype = np.dtype(array.dtype)
    for fortran in (False, True):
        file = io.BytesIO()
        head = {"descr": dtype.str, "fortran_order": fortran, "shape": array.shape}
        np.lib.format.write_array_header_1_0(file, head)
        size = file.tell() + math.prod(array.shape) * dtype.itemsize
        if len(array.data) == size and array.data.startswith(file.getvalue()):
            return
    raise UpdateError(
        f"the array {key!r} is not a .npy file of {array.dtype} of shape {array.shape}"
    )


def _to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        return {"list": [base64.b64encode(item).decode() for item in value]}
    return value


def _from_json(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    ((kind, text),) = value.items()
    if kind == "bytes":
        return base64.b64decode(text, validate=True)
    if kind == "list":
        return [base64.b64decode(item, validate=True) for item in text]
    raise ValueError(f"there is no value of kind {kind!r}")
