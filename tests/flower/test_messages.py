"""Flower's messages and records, and internals of flwr that Isthmus relies on."""

import importlib
import json
import logging
import os
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import JobError, UpdateError
from isthmus_flower import messages
from isthmus_flower.records import decode, encode

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(SHAPES, st.integers(0, 2**31))
def test_an_array_equals_the_one_that_flower_creates_from_the_tensor(shape, seed):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    ours, theirs = messages.array_of(tensor), messages.Array(tensor.numpy())
    assert (ours.dtype, ours.shape, ours.stype) == (theirs.dtype, theirs.shape, theirs.stype)
    assert ours.data == theirs.data
    assert np.array_equal(ours.numpy(), tensor.numpy())


def test_a_record_is_read_back_unchanged():
    tensors = {"bias": torch.randn(3), "weight": torch.randn(3, 4)}
    back = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    messages.read_record(messages.record_of(tensors.items()), back.items())
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({}, "the array 'weight' is missing from the received record"),
        (
            {"weight": [1.0, 2.0], "more": [1.0]},
            "the array 'more' is unknown, but in the received record",
        ),
        ({"weight": [1.0]}, "the array 'weight' is float64 of shape (1,), not float32 of shape (2"),
        ({"weight": ["a", "b"]}, "the array 'weight' is <U1 of shape (2,)"),
        ({"weight": [1.0, float("inf")]}, "the array 'weight' is not finite"),
    ],
)
def test_a_record_with_other_names_shapes_or_types_is_refused(arrays, says):
    record = messages.ArrayRecord(
        {name: messages.Array(np.array(each)) for name, each in arrays.items()}
    )
    with pytest.raises(UpdateError) as refused:
        messages.read_record(record, [("weight", torch.empty(2))])
    assert str(refused.value).startswith(says)


def test_a_message_has_the_metadata_of_flowers_runtime():
    asked = messages.message(
        messages.RecordDict(), kind="train", source=1, to=7, id_="m", group="3"
    )
    assert (asked.metadata.src_node_id, asked.metadata.dst_node_id) == (1, 7)
    assert asked.has_content()
    reply = messages.Message(messages.RecordDict(), reply_to=asked)
    assert reply.metadata.reply_to_message_id == "m"
    assert (reply.metadata.src_node_id, reply.metadata.dst_node_id) == (7, 1)
    failed = messages.message(None, kind="train", source=7, to=1, error=messages.Error(2, "why"))
    assert failed.has_error()
    assert failed.error.reason == "why"


def test_a_process_gets_an_identity_for_creating_messages():
    messages.identify()
    made = messages.Message(messages.RecordDict(), dst_node_id=7, message_type="train")
    assert (made.metadata.run_id, made.metadata.src_node_id) == (messages.RUN, messages.SERVER_NODE)
    assert messages.the_run().run_id == messages.RUN


def test_flowers_log_is_suppressed_and_its_warnings_are_captured(capfd):
    log = logging.getLogger("flwr")
    before = list(log.handlers)
    with messages.captured_warnings() as warnings:
        log.info("a round")
        log.warning("too  few\nreplies")
    assert warnings == ["too few replies"]
    assert log.handlers == before
    assert capfd.readouterr() == ("", "")


def test_flowers_telemetry_is_off():
    from flwr.supercore import telemetry

    assert telemetry.FLWR_TELEMETRY_ENABLED == "0"
    assert os.environ["FLWR_DISABLE_UPDATE_CHECK"] == "1"


def test_without_flower_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    monkeypatch.delitem(sys.modules, "isthmus_flower.messages")
    with pytest.raises(JobError, match=r"pip install .*\[flower\]"):
        importlib.import_module("isthmus_flower.messages")


# -- records on the link ---------------------------------------------------------------------------

VALUES = st.one_of(st.integers(-(2**62), 2**62), st.floats(allow_nan=False))
METRICS = st.dictionaries(
    st.text(max_size=5),
    st.one_of(VALUES, st.lists(VALUES.filter(lambda value: isinstance(value, float)), max_size=3)),
    max_size=4,
)
CONFIG = st.dictionaries(
    st.text(max_size=5),
    st.one_of(
        VALUES,
        st.booleans(),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.lists(st.text(max_size=5), max_size=3),
        st.lists(st.binary(max_size=5), min_size=1, max_size=3),
    ),
    max_size=4,
)


@given(SHAPES, METRICS, CONFIG)
def test_encoded_records_are_decoded_unchanged(shape, metrics, config):
    records = messages.RecordDict(
        {
            "arrays": messages.ArrayRecord(
                {"x": messages.array_of(torch.ones(shape)), "y": messages.Array(np.arange(3))}
            ),
            "metrics": messages.MetricRecord(metrics),
            "config": messages.ConfigRecord(config),
        }
    )
    back = decode(encode(records))
    assert list(back) == list(records)
    assert back["metrics"] == records["metrics"]
    assert back["config"] == records["config"]
    for key, array in records["arrays"].items():
        assert vars(back["arrays"][key]) | {"_is_dirty": 0} == vars(array) | {"_is_dirty": 0}


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_arbitrary_bytes_are_decoded_or_refused_in_one_sentence(noise, place, value):
    records = messages.RecordDict(
        {
            "a": messages.ArrayRecord({"x": messages.array_of(torch.ones(2))}),
            "c": messages.ConfigRecord(),
        }
    )
    damaged = bytearray(encode(records))
    damaged[place % len(damaged)] = value
    for payload in (noise, damaged, damaged[: place % len(damaged)]):
        try:
            found = decode(payload)
        except UpdateError as error:
            found = str(error)
        assert isinstance(found, messages.RecordDict) or "\n" not in found


RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=4)


@given(RANGES)
def test_every_received_byte_belongs_to_exactly_one_array(ranges):
    """Otherwise a small message could request any number of copies of one array."""
    entries = [[str(i), "float32", [], "mine", start, end] for i, (start, end) in enumerate(ranges)]
    header = json.dumps([["a", "arrays", entries]]).encode()
    payload = len(header).to_bytes(8, "little") + header + bytes(30)
    in_order = [0, *(place for both in ranges for place in both), 30]
    whole = in_order[::2] == in_order[1::2] and in_order == sorted(in_order)
    try:
        taken = [len(array.data) for array in decode(payload)["a"].values()]
    except UpdateError:
        assert not whole
    else:
        assert whole
        assert sum(taken) == 30


@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        ([(0, 30), (0, 30)], "the array '1' does not begin where the previous one ends"),
        ([(0, 20), (10, 30)], "the array '1' does not begin where the previous one ends"),
        ([(0, 31)], "the array '0' does not begin where the previous one ends"),
        ([(0, 29)], "1 bytes of it belong to no array"),
    ],
)
def test_arrays_that_overlap_or_leave_gaps_are_refused(ranges, says):
    entries = [[str(i), "float32", [], "mine", start, end] for i, (start, end) in enumerate(ranges)]
    header = json.dumps([["a", "arrays", entries]]).encode()
    with pytest.raises(UpdateError, match=says):
        decode(len(header).to_bytes(8, "little") + header + bytes(30))


FINE = messages.array_of(torch.ones(2)).data


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("float32", (10**12,), FINE),
        ("float32", (2,), FINE[:-1]),
        ("float32", (2,), FINE + b"0"),
        ("float32", (1,), b"pickle"),
        ("float32", (2,), FINE.replace(b"<f4", b"<i4")),
        ("object", (2,), FINE),
        ("float32", (-2,), FINE),
    ],
)
def test_an_array_with_a_wrong_header_is_refused_before_allocation(dtype, shape, data):
    array = messages.Array(dtype=dtype, shape=shape, stype=messages.NUMPY, data=data)
    payload = encode(messages.RecordDict({"arrays": messages.ArrayRecord({"x": array})}))
    with pytest.raises(UpdateError) as refused:
        decode(payload)
    assert str(refused.value).startswith("the array 'x' ")


@pytest.mark.parametrize("values", [np.zeros((2, 3), order="F"), np.zeros(2, "i8"), np.bool_(1)])
def test_every_supported_dtype_is_accepted(values):
    record = messages.ArrayRecord({"x": messages.Array(np.asarray(values))})
    back = decode(encode(messages.RecordDict({"arrays": record})))
    assert np.array_equal(back["arrays"]["x"].numpy(), values)
