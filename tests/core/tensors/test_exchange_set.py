import json
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isthmus.errors import TaskError, UpdateError
from isthmus.tensors.exchange_set import MAX_HEADER_BYTES, TensorLayout, digest

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
layouts = st.dictionaries(names, shapes, max_size=6).map(TensorLayout.from_shapes)


@st.composite
def layouts_with_vectors(draw):
    layout = draw(layouts)
    bits = draw(st.lists(st.integers(0, 2**32 - 1), min_size=layout.size, max_size=layout.size))
    raw = bytearray(struct.pack(f"<{layout.size}I", *bits))
    vector = torch.frombuffer(raw, dtype=torch.float32) if bits else torch.empty(0)
    return layout, vector


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def framed(text):
    return struct.pack("<Q", len(text)) + text


# -- round trips ---------------------------------------------------------------------------------


@given(layouts)
def test_a_header_is_parsed_to_its_layout(layout):
    assert TensorLayout.from_header(layout.header) == layout
    assert len(layout.header) % 8 == 0


@given(layouts_with_vectors())
def test_a_vector_survives_its_encoding_bit_by_bit_nan_payloads_included(pair):
    layout, vector = pair
    payload = layout.encode(vector)
    assert len(payload) == layout.nbytes
    assert same_bits(layout.decode(payload), vector)


@given(layouts_with_vectors())
def test_the_encoding_is_a_safetensors_file_with_the_same_tensors(pair):
    layout, vector = pair
    opened = safetensors.torch.load(bytes(layout.encode(vector)))
    assert opened.keys() == {entry.name for entry in layout.entries}
    for name, part in layout.parts(vector):
        assert same_bits(opened[name], part.contiguous())


def test_the_encoding_equals_that_of_the_safetensors_library():
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    layout = TensorLayout.of(model)
    theirs = safetensors.torch.load(safetensors.torch.save(model.state_dict()))
    ours = dict(layout.parts(layout.decode(layout.encode(layout.gather(model)))))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_gather_and_scatter_copy_a_model():
    one, other = (nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)) for _ in range(2))
    layout = TensorLayout.of(one)
    assert layout == TensorLayout.of(other)
    layout.scatter(layout.gather(one), other)
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_a_decoded_vector_shares_the_payloads_memory():
    layout = TensorLayout.from_shapes({"a": (2,)})
    payload = layout.encode(torch.zeros(2))
    layout.decode(payload).fill_(1.0)
    assert layout.decode(payload).tolist() == [1.0, 1.0]


# -- hostile bytes -------------------------------------------------------------------------------


@given(st.binary(max_size=64) | st.binary(max_size=64).map(framed))
def test_random_bytes_are_refused_as_a_header(raw):
    with pytest.raises(UpdateError):
        TensorLayout.from_header(raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.text(max_size=3), json_values | st.fixed_dictionaries({"shape": json_values})
    )
)
def test_invalid_json_headers_are_refused(table):
    raw = framed(json.dumps(table).encode())
    try:
        layout = TensorLayout.from_header(raw)
    except UpdateError:
        return
    assert layout.header == raw


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 2**64 - 1) + b"{}",
        struct.pack("<Q", MAX_HEADER_BYTES + 8),
        framed(b"[" * 100_000),
        framed(b'{"a":{"shape":[-1]}}'),
        framed(b'{"a":{"shape":[1e999]}}'),
        framed(b'{"a":{"shape":[' + b"9" * 10_000 + b"]}}"),
        framed(b'{"a":{"shape":"12"}}'),
        framed(b"[]"),
        framed(b"null"),
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_a_malicious_header_is_refused(raw):
    with pytest.raises(UpdateError):
        TensorLayout.from_header(raw)


def test_only_the_canonical_form_of_a_header_is_accepted():
    header = TensorLayout.from_shapes({"a": (1,), "b": (1,)}).header
    table = json.loads(header[8:])
    for other in (
        json.dumps(table).encode(),
        json.dumps({"__metadata__": {}, **table}, separators=(",", ":")).encode(),
        json.dumps(dict(reversed(table.items())), separators=(",", ":")).encode(),
        json.dumps(table, separators=(",", ":")).replace("F32", "F64").encode(),
    ):
        with pytest.raises(UpdateError, match="does not have the form that Isthmus writes"):
            TensorLayout.from_header(framed(other))


def test_a_truncated_or_foreign_payload_is_refused():
    layout = TensorLayout.from_shapes({"a": (2,)})
    other = TensorLayout.from_shapes({"b": (2,)})
    assert layout.nbytes == other.nbytes == 72
    payload = layout.encode(torch.zeros(2))
    with pytest.raises(UpdateError, match=r"71 bytes were received, .* has 72 \(2 float32 p"):
        layout.decode(payload[:-1])
    with pytest.raises(
        UpdateError, match="another exchange set was received: parameter 'a' is there and"
    ):
        layout.decode(other.encode(torch.zeros(2)))
    payload[20] ^= 1
    with pytest.raises(UpdateError):
        layout.decode(payload)


@pytest.mark.parametrize(
    ("theirs", "half_a_sentence"),
    [
        ({"a": (2,), "b": (3,)}, None),
        ({"a": (2,)}, "parameter 'b' is here and not there"),
        ({"a": (2,), "b": (3,), "c": ()}, "parameter 'c' is there and not here"),
        ({"a": (2,), "b": (3, 1)}, "parameter 'b' has shape (3,) here and (3, 1) there"),
    ],
)
def test_the_difference_of_two_layouts_is_explained(theirs, half_a_sentence):
    mine = TensorLayout.from_shapes({"a": (2,), "b": (3,)})
    assert mine.explain_difference(TensorLayout.from_shapes(theirs)) == half_a_sentence


# -- what travels --------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_exchanged_once():
    model = Tied()
    layout = TensorLayout.of(model)
    assert [entry.name for entry in layout.entries] == ["embedding.weight"]
    layout.scatter(torch.ones(8), model)
    assert model.head.weight.tolist() == [[1.0, 1.0]] * 4


def test_frozen_parameters_are_not_exchanged():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    assert [entry.name for entry in TensorLayout.of(model).entries] == ["1.bias", "1.weight"]


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (lambda: nn.LazyLinear(2), r"'0\.weight' has no shape before the first forward pass; give"),
        (lambda: nn.Linear(2, 2, device="meta"), r"'0\.weight' is on the device 'meta', which"),
    ],
)
def test_parameters_without_values_are_refused(layer, sentence):
    with pytest.raises(TaskError, match=sentence):
        TensorLayout.of(nn.Sequential(layer()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_parameters_of_every_precision_are_exchanged_as_float32(dtype):
    model = nn.Linear(3, 2).to(dtype)
    layout = TensorLayout.of(model)
    vector = layout.gather(model)
    assert vector.dtype == torch.float32
    assert torch.equal(vector, torch.cat([model.bias, model.weight.flatten()]).float())
    layout.scatter(torch.full((8,), 0.5), model)
    assert model.weight.dtype == dtype
    assert model.bias.tolist() == [0.5, 0.5]


def test_parameters_that_are_not_real_numbers_are_refused():
    model = nn.ParameterDict({"phase": nn.Parameter(torch.zeros(2, dtype=torch.complex64))})
    with pytest.raises(TaskError, match=r"'phase' is of dtype torch\.complex64"):
        TensorLayout.of(model)


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(TaskError, match="nothing to train"):
        TensorLayout.of(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(TaskError, match="nothing to train"):
        TensorLayout.of(nn.ReLU())


def test_the_digest_is_sha256():
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digest(b"").hex() == digest(bytearray()).hex() == empty
