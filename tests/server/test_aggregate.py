import contextlib
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.errors import UpdateError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.model.fixed_point_sum import (
    SUM_BYTES,
    TILE,
    Spool,
    StreamingUpdate,
    WeightedSum,
)
from isthmus_server.model.mmap_buffer import MmapBuffer

LAYOUT = TensorLayout.from_shapes({"bias": (1,), "weight": (2,)})

values = st.floats(-4095, 4095, width=32)
updates = st.tuples(st.tuples(values, values, values), st.integers(1, 1000))


def send(write, payload, piece=7, end=None):
    for start in range(0, len(payload) if end is None else end, piece):
        write(start, bytes(payload[start : start + piece]))


def add(tmp_path, total, vector, weight, layout=LAYOUT, in_memory=1 << 20, scale=1.0):
    payload = layout.encode(torch.as_tensor(vector, dtype=torch.float32))
    with Spool(tmp_path, in_memory) as spool:
        adding = StreamingUpdate(spool, total, layout, weight, scale)
        try:
            send(adding.write, payload, 7 if layout is LAYOUT else 12345)
        except UpdateError:
            adding.take_back()
            raise
        assert adding.whole


def mean_of(listed):
    total = WeightedSum(3, sum(weight for _, weight in listed))
    for vector, weight in listed:
        put(total, torch.tensor(vector, dtype=torch.float32), weight)
    return total


def put(total, vector, weight):
    total.hold(weight)
    total.add(0, vector, weight)


@given(st.lists(updates, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_any_order_of_arrival_gives_the_same_bytes(listed, random):
    one = mean_of(listed).mean()
    random.shuffle(listed)
    other = mean_of(listed).mean()
    assert one.numpy().tobytes() == other.numpy().tobytes()


@given(st.lists(updates, min_size=1, max_size=8))
def test_the_mean_is_the_weighted_mean(listed):
    total = mean_of(listed)
    vectors = torch.tensor([vector for vector, _ in listed], dtype=torch.float64)
    weights = torch.tensor([weight for _, weight in listed], dtype=torch.float64)
    expected = (vectors * weights[:, None]).sum(0) / weights.sum()
    torch.testing.assert_close(
        total.mean().double(), expected, rtol=1e-6, atol=2.0**-total.fraction_bits
    )


@pytest.mark.parametrize("declared", [1, 3, 1000, 2**31, 2**48])
def test_the_largest_values_and_weights_do_not_wrap(declared):
    total = WeightedSum(2, declared)
    most = torch.tensor([4095.999, -4095.999])
    put(total, most, declared)
    put(total, most, declared)
    torch.testing.assert_close(total.mean(), most)


@pytest.mark.parametrize("in_memory", [1 << 20, 16], ids=["in memory", "on disk"])
def test_an_update_is_spooled_and_added(tmp_path, in_memory):
    total = WeightedSum(3, 30)
    add(tmp_path, total, [1.0, 2.0, 3.0], 10, in_memory=in_memory)
    add(tmp_path, total, [4.0, 5.0, 6.0], 20, in_memory=in_memory)
    assert total.mean().tolist() == [3.0, 4.0, 5.0]
    assert total.weight == 30


def test_a_large_update_waits_in_a_file_without_a_name(tmp_path):
    with Spool(tmp_path, in_memory=16) as spool:
        send(spool.write, LAYOUT.encode(torch.zeros(3)))
        opened = [
            str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
        ]
        assert [name for name in opened if name.startswith(str(tmp_path))]
        assert list(tmp_path.iterdir()) == []


def test_a_large_update_takes_no_memory_while_it_arrives(tmp_path):
    with Spool(tmp_path, in_memory=16, expected=17) as spool:
        spool.write(0, b"x")
        opened = [
            str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
        ]
        assert [name for name in opened if name.startswith(str(tmp_path))]
        with spool.view() as view:
            assert view == b"x"


def test_an_update_of_more_than_one_tile(tmp_path):
    layout = TensorLayout.from_shapes({"a": (TILE,), "b": (2 * TILE + 3,)})
    vector = torch.arange(layout.size, dtype=torch.float32) / 128
    total = WeightedSum(layout.size, 5)
    add(tmp_path, total, vector, 5, layout)
    bad = vector.clone()
    bad[TILE + 1] = torch.nan
    with pytest.raises(UpdateError, match=r"^its update of 'b' is not finite \(nan\)$"):
        add(tmp_path, total, bad, 1, layout)
    assert torch.equal(total.mean(), vector)


@pytest.mark.parametrize(
    ("vector", "weight", "sentence"),
    [
        ([0, torch.nan, 0], 1, r"^its update of 'weight' is not finite \(nan\)$"),
        ([torch.inf, 0, 0], 1, r"^its update of 'bias' is not finite \(inf\)$"),
        ([0, 0, -torch.inf], 1, r"^its update of 'weight' is not finite \(-inf\)$"),
        ([0, 0, 4096], 1, r"^its update of 'weight' is out of range \(4096, allowed is \+-4096\)$"),
        ([0, 0, -5000], 1, r"^its update of 'weight' is out of range"),
        ([0, 0, 0], 0, r"^its weight=0 does not fit: it must be at least 1"),
        ([0, 0, 0], -1, r"^its weight=-1 does not fit"),
        ([0, 0, 0], 11, r"^its weight=11 does not fit: .* at most 20, twice the examples"),
    ],
)
def test_a_bad_update_is_refused_and_leaves_the_sum_as_it_was(tmp_path, vector, weight, sentence):
    total = WeightedSum(3, 10)
    add(tmp_path, total, [1.0, 2.0, 3.0], 10)
    with pytest.raises(UpdateError, match=sentence):
        add(tmp_path, total, vector, weight)
    assert total.weight == 10
    assert total.mean().tolist() == [1.0, 2.0, 3.0]


def test_a_payload_of_another_size_or_header_is_refused(tmp_path):
    payload = LAYOUT.encode(torch.ones(3))
    other = TensorLayout.from_shapes({"bias": (2,), "weight": (1,)}).encode(torch.ones(3))
    assert len(other) == len(payload)
    refused = pytest.raises(UpdateError, match=r"^it is not an update of this exchange set")
    for wrong in (b"", payload[:-1], payload + b"\0", other):
        with Spool(tmp_path) as spool, refused:
            send(spool.write, wrong)
            spool.read(LAYOUT)
    total = WeightedSum(3, 10)
    with Spool(tmp_path) as spool:
        adding = StreamingUpdate(spool, total, LAYOUT, 1)
        with refused:
            send(adding.write, other)
        adding.take_back()
    assert total.weight == 0


LARGE = TensorLayout.from_shapes({"a": (TILE,), "b": (2 * TILE + 3,)})


@given(st.lists(st.integers(0, LARGE.nbytes), max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_taken_back_at_any_time_was_never_there(tmp_path, ends, random):
    """Updates arrive mixed; those that stop somewhere leave the bytes of the others' sum."""
    vectors = [torch.randn(LARGE.size) for _ in range(len(ends) + 1)]
    total, alone = (WeightedSum(LARGE.size, 100) for _ in range(2))
    with contextlib.ExitStack() as stack:
        under_way = []
        for vector, end in zip(vectors, [LARGE.nbytes, *ends], strict=True):
            spool = stack.enter_context(Spool(tmp_path))
            adding = StreamingUpdate(spool, total, LARGE, 3, scale=0.7)
            under_way.append((adding, bytes(LARGE.encode(vector)[:end]), [0]))
        while left := [one for one in under_way if one[2][0] < len(one[1])]:
            adding, payload, at = random.choice(left)
            piece = payload[at[0] : at[0] + 200_001]
            adding.write(at[0], piece)
            at[0] += len(piece)
        for adding, _, _ in under_way[1:]:
            adding.take_back()
    add(tmp_path, alone, vectors[0], 3, LARGE, scale=0.7)
    assert total.weight == 3
    assert torch.equal(total.mean(), alone.mean())


def test_a_sum_that_an_update_could_not_be_taken_out_of_has_no_mean(tmp_path):
    total = WeightedSum(3, 10)
    add(tmp_path, total, [1.0, 2.0, 3.0], 1)
    spool = Spool(tmp_path)
    adding = StreamingUpdate(spool, total, LAYOUT, 1)
    send(adding.write, LAYOUT.encode(torch.ones(3)))
    with spool:
        pass
    with pytest.raises(ValueError, match="closed file"):
        adding.take_back()
    with pytest.raises(OSError, match="could not be taken out of the sum"):
        total.mean()


def test_nothing_is_left_of_an_update_that_is_done_with(tmp_path):
    for in_memory in (16, 1 << 20):
        add(tmp_path, WeightedSum(3, 1), [0.0] * 3, 1, in_memory=in_memory)
    assert list(tmp_path.iterdir()) == []


def test_tiles_in_any_order_give_the_same_sum():
    vector = torch.arange(2 * TILE + 3, dtype=torch.float32) / 128
    used = MmapBuffer(SUM_BYTES * len(vector))
    used.view[:] = b"\x4d" * len(used.view)
    for order in itertools.permutations(range(3)):
        total = WeightedSum(len(vector), 7, used)
        total.hold(7)
        for i in order:
            total.add(i * TILE, vector[i * TILE : (i + 1) * TILE], 7)
        assert torch.equal(total.mean(), vector)
