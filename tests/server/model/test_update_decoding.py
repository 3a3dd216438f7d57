"""Updates are spooled, checked and added while they arrive, and can be withdrawn."""

import contextlib
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.errors import UpdateError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.model.fixed_point_sum import TILE, WeightedSum
from isthmus_server.model.update_decoding import StreamingUpdate, UpdateSpool

LAYOUT = TensorLayout.from_shapes({"bias": (1,), "weight": (2,)})


def send(write, payload, piece=7, end=None):
    for start in range(0, len(payload) if end is None else end, piece):
        write(start, bytes(payload[start : start + piece]))


def add(tmp_path, total, vector, weight, layout=LAYOUT, max_memory_bytes=1 << 20, scale=1.0):
    payload = layout.encode(torch.as_tensor(vector, dtype=torch.float32))
    with UpdateSpool(tmp_path, max_memory_bytes) as spool:
        update = StreamingUpdate(spool, total, layout, weight, scale)
        try:
            send(update.write, payload, 7 if layout is LAYOUT else 12345)
        except UpdateError:
            update.withdraw()
            raise
        assert update.complete


@pytest.mark.parametrize("max_memory_bytes", [1 << 20, 16], ids=["in memory", "on disk"])
def test_an_update_is_spooled_and_added(tmp_path, max_memory_bytes):
    total = WeightedSum(3, 30)
    add(tmp_path, total, [1.0, 2.0, 3.0], 10, max_memory_bytes=max_memory_bytes)
    add(tmp_path, total, [4.0, 5.0, 6.0], 20, max_memory_bytes=max_memory_bytes)
    assert total.mean().tolist() == [3.0, 4.0, 5.0]
    assert total.weight == 30


@pytest.mark.parametrize("has_file", [False, True])
def test_a_whole_update_in_the_memory_of_a_participant_is_not_copied(tmp_path, has_file):
    total, payload = WeightedSum(3, 30), bytearray(LAYOUT.encode(torch.tensor([1.0, 2.0, 3.0])))
    most = 16 if has_file else 1 << 20
    with UpdateSpool(tmp_path, most, expected_bytes=LAYOUT.nbytes) as spool:
        update = StreamingUpdate(spool, total, LAYOUT, 10)
        update.write(0, memoryview(payload))
        assert update.complete
        assert spool.read(LAYOUT).tolist() == [1.0, 2.0, 3.0]
        assert spool.tile(LAYOUT, 1, 2).tolist() == [2.0, 3.0]
        with spool.view() as view:
            assert view == payload
            assert view.readonly
        payload[-4:] = LAYOUT.encode(torch.tensor([1.0, 2.0, 5.0]))[-4:]
        assert spool.read(LAYOUT).tolist() == [1.0, 2.0, 5.0]
        payload[-4:] = LAYOUT.encode(torch.tensor([1.0, 2.0, 3.0]))[-4:]
        update.withdraw()
    add(tmp_path, total, [4.0, 5.0, 6.0], 20)
    assert total.mean().tolist() == [4.0, 5.0, 6.0]


def test_a_large_update_is_spooled_to_an_unlinked_file(tmp_path):
    with UpdateSpool(tmp_path, max_memory_bytes=16) as spool:
        send(spool.write, LAYOUT.encode(torch.zeros(3)))
        opened = [
            str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
        ]
        assert [name for name in opened if name.startswith(str(tmp_path))]
        assert list(tmp_path.iterdir()) == []


def test_an_update_expected_to_be_large_is_spooled_to_a_file_at_once(tmp_path):
    with UpdateSpool(tmp_path, max_memory_bytes=16, expected_bytes=17) as spool:
        spool.write(0, b"x")
        opened = [
            str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
        ]
        assert [name for name in opened if name.startswith(str(tmp_path))]
        with spool.view() as view:
            assert view == b"x"


@pytest.mark.parametrize("max_memory_bytes", [1 << 20, 16], ids=["in memory", "on disk"])
def test_an_update_of_more_than_one_tile(tmp_path, max_memory_bytes):
    layout = TensorLayout.from_shapes({"a": (TILE,), "b": (2 * TILE + 3,)})
    vector = torch.arange(layout.size, dtype=torch.float32) / 128
    total = WeightedSum(layout.size, 5)
    add(tmp_path, total, vector, 5, layout, max_memory_bytes)
    bad = vector.clone()
    bad[TILE + 1] = torch.nan
    with pytest.raises(UpdateError, match=r"^its update of 'b' is not finite \(nan\)$"):
        add(tmp_path, total, bad, 1, layout, max_memory_bytes)
    assert torch.equal(total.mean(), vector)


@pytest.mark.parametrize(
    ("vector", "weight", "sentence"),
    [
        ([0, torch.nan, 0], 1, r"^its update of 'weight' is not finite \(nan\)$"),
        ([torch.inf, 0, 0], 1, r"^its update of 'bias' is not finite \(inf\)$"),
        ([0, 0, -torch.inf], 1, r"^its update of 'weight' is not finite \(-inf\)$"),
        (
            [0, 0, 2**20],
            1,
            r"^its update of 'weight' is out of range \(1.04858e\+06, allowed is \+-1048576\): tr",
        ),
        ([0, 0, -2e6], 1, r"^its update of 'weight' is out of range"),
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
        with UpdateSpool(tmp_path) as spool, refused:
            send(spool.write, wrong)
            spool.read(LAYOUT)
    total = WeightedSum(3, 10)
    with UpdateSpool(tmp_path) as spool:
        update = StreamingUpdate(spool, total, LAYOUT, 1)
        with refused:
            send(update.write, other)
        update.withdraw()
    assert total.weight == 0


LARGE = TensorLayout.from_shapes({"a": (TILE,), "b": (2 * TILE + 3,)})


def test_updates_that_arrive_at_the_same_time_keep_no_tiles_in_memory(tmp_path):
    total, payload = WeightedSum(LARGE.size, 100), bytes(LARGE.encode(torch.ones(LARGE.size)))
    count = 20
    end = 4 * TILE + 100_000
    with contextlib.ExitStack() as stack:
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        updates = []
        for _ in range(count):
            spool = stack.enter_context(UpdateSpool(tmp_path, expected_bytes=2 << 20))
            updates.append(StreamingUpdate(spool, total, LARGE, 1))
            send(updates[-1].write, payload, 100_000, end)
        kept, most = tracemalloc.get_traced_memory()
    assert kept < count * TILE  # a quarter of a tile each
    assert most < count * TILE + 3 * 4 * TILE  # and the tile that is being added


@given(st.lists(st.integers(0, LARGE.nbytes), max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_withdrawn_updates_leave_no_trace_in_the_sum(tmp_path, ends, random):
    """Updates arrive interleaved; withdrawing incomplete ones keeps the sum of the others."""
    vectors = [torch.randn(LARGE.size) for _ in range(len(ends) + 1)]
    total, reference = (WeightedSum(LARGE.size, 100) for _ in range(2))
    with contextlib.ExitStack() as stack:
        streams = []
        for vector, end in zip(vectors, [LARGE.nbytes, *ends], strict=True):
            spool = stack.enter_context(UpdateSpool(tmp_path))
            update = StreamingUpdate(spool, total, LARGE, 3, scale=0.7)
            streams.append((update, bytes(LARGE.encode(vector)[:end]), [0]))
        while left := [one for one in streams if one[2][0] < len(one[1])]:
            update, payload, at = random.choice(left)
            piece = payload[at[0] : at[0] + 200_001]
            update.write(at[0], piece)
            at[0] += len(piece)
        for update, _, _ in streams[1:]:
            update.withdraw()
    add(tmp_path, reference, vectors[0], 3, LARGE, scale=0.7)
    assert total.weight == 3
    assert torch.equal(total.mean(), reference.mean())


def written(path, data):
    path.write_bytes(data)
    return path.open("rb")


def test_updates_in_files_are_added_by_threads_and_can_be_withdrawn(tmp_path):
    vectors = [torch.randn(LARGE.size) for _ in range(4)]
    total, reference = (WeightedSum(LARGE.size, 100) for _ in range(2))
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        updates, files = [], []
        for number, vector in enumerate(vectors):
            spool = stack.enter_context(UpdateSpool(tmp_path))
            updates.append(StreamingUpdate(spool, total, LARGE, number + 1))
            files.append(written(tmp_path / str(number), LARGE.encode(vector)))
        list(pool.map(lambda update, file: update.take(file), updates, files))
        assert all(update.complete for update in updates)
        updates[2].withdraw()
    for number in (0, 1, 3):
        add(tmp_path, reference, vectors[number], number + 1, LARGE)
    assert torch.equal(total.mean(), reference.mean())


@pytest.mark.parametrize(
    ("vector", "cut", "sentence"),
    [
        ([1.0, 2.0, float("inf")], 0, "'weight' is not finite"),
        ([1.0, 2.0, 3.0], 1, "not an update of this exchange set"),
    ],
)
def test_a_bad_update_in_a_file_is_refused(tmp_path, vector, cut, sentence):
    payload = LAYOUT.encode(torch.tensor(vector))
    total = WeightedSum(3, 2)
    with UpdateSpool(tmp_path) as spool:
        update = StreamingUpdate(spool, total, LAYOUT, 1)
        with pytest.raises(UpdateError, match=sentence):
            update.take(written(tmp_path / "update", payload[: len(payload) - cut]))
        update.withdraw()
    assert total.weight == 0


def test_a_failed_withdrawal_makes_the_mean_fail(tmp_path):
    total = WeightedSum(3, 10)
    add(tmp_path, total, [1.0, 2.0, 3.0], 1)
    spool = UpdateSpool(tmp_path)
    update = StreamingUpdate(spool, total, LAYOUT, 1)
    send(update.write, LAYOUT.encode(torch.ones(3)))
    with spool:
        pass
    with pytest.raises(ValueError, match="closed file"):
        update.withdraw()
    with pytest.raises(OSError, match="could not be subtracted from the sum"):
        total.mean()


def test_a_closed_spool_leaves_no_file(tmp_path):
    for max_memory_bytes in (16, 1 << 20):
        add(tmp_path, WeightedSum(3, 1), [0.0] * 3, 1, max_memory_bytes=max_memory_bytes)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_fails_raises_its_own_error(tmp_path):
    """Its traceback has a part of the mapped file, which therefore cannot be unmapped yet."""

    def read(view):
        part = torch.frombuffer(view[1:9], dtype=torch.uint8)
        raise UpdateError(f"{len(part)} bytes are no update")

    with (
        warnings.catch_warnings(action="ignore"),  # the memory cannot be written
        UpdateSpool(tmp_path, max_memory_bytes=16) as spool,
    ):
        spool.write(0, bytes(64))
        with pytest.raises(UpdateError, match="8 bytes are no update"), spool.view() as view:
            read(view)
