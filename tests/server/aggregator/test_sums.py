"""An aggregator's sums: exactly the vectors that the server names, whatever came and went."""

import asyncio
import errno
import shutil
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import UpdateError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_privacy.compression import round_vector
from isthmus_privacy.compression.round_vector import RoundVector
from isthmus_server.aggregator import sums
from isthmus_server.aggregator.sums import VectorSums
from isthmus_server.model.fixed_point_sum import Part, WeightedSum
from isthmus_server.transport.aggregators import LEFT

LAYOUT = TensorLayout.of(torch.nn.Linear(70_000, 1))
DECLARED = 40


def update_of(seed):
    return torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed))


def masked_of(seed, bits):
    vector = RoundVector(length=301, bits=bits, figures=3)
    vector.mask([bytes([seed]) * 32], [])
    return bytes(vector.payload())


class Aggregator:
    """The sums of one, and devices whose vectors are at channels."""

    def __init__(self, folder):
        self.vectors = {}
        self.sums = VectorSums(folder, self._fetch)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await asyncio.gather(*self.sums._leaving)
        self.sums.forget()

    async def _fetch(self, channel, vector, write):
        payload = self.vectors[channel]
        half = len(payload) // 2
        write(0, payload[:half])
        await asyncio.sleep(0)
        if channel > 100:
            raise UpdateError("it left")
        write(half, payload[half:])

    async def ask(self, **work):
        return await self.sums.work(link_pb2.Request(**work), None, lambda progress: None)

    async def open(self, **of):
        await self.ask(open_sum=link_pb2.OpenSum(sum="s", **of))

    async def open_updates(self):
        bits = WeightedSum(LAYOUT.size, DECLARED).fraction_bits
        asked = {"layout": LAYOUT.header, "declared_weight": DECLARED, "fraction_bits": bits}
        await self.open(updates=link_pb2.UpdateSum(**asked))

    def vector(self, name, channel, payload, weight=0):
        self.vectors[channel] = payload
        blob = describe(payload)
        return link_pb2.AddVector(sum="s", channel=channel, vector=blob, weight=weight, name=name)

    def acknowledge(self, asked, accepted):
        self.sums.acknowledged(link_pb2.Request(add_vector=asked), accepted, "")

    async def hand_over(self, *names):
        reply, payload = await self.ask(hand_over=link_pb2.HandOver(sum="s", added=names))
        return reply.summed, payload


async def test_the_log_says_what_a_sum_is_of_as_far_as_the_server_does(tmp_path, caplog):
    caplog.set_level("INFO", logger="isthmus_server.aggregator")
    async with Aggregator(tmp_path) as aggregator:
        for about in ("digits-1, round 2,\nattempt 1", ""):
            masked = link_pb2.MaskedSum(length=1, bits=16)
            await aggregator.open(masked=masked, about=about)
            await aggregator.ask(add_vector=aggregator.vector("a", 1, bytes(2)))
            await aggregator.hand_over("a")
            aggregator.sums.forget()
    assert caplog.messages == [
        "hands over the sum of 1 vector of digits-1, round 2,\\nattempt 1",
        "hands over the sum of 1 vector",
    ]


FATES = st.lists(
    st.tuples(st.sampled_from(["kept", "unsaid", "refused", "left", "damaged"]), st.integers(1, 9)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=15, deadline=None)
@given(fates=FATES)
def test_the_sum_is_that_of_the_named_updates_to_the_last_bit(tmp_path_factory, fates):
    async def added_and_merged(aggregator):
        await aggregator.open_updates()
        alone = WeightedSum(LAYOUT.size, DECLARED)
        named = []
        for seed, (fate, weight) in enumerate(fates, start=1):
            values = update_of(seed)
            if fate == "damaged":
                values[-1] = float("nan")
            payload = LAYOUT.header + values.numpy().tobytes()
            channel = 100 + seed if fate == "left" else seed
            asked = aggregator.vector(str(seed), channel, payload, weight)
            try:
                await aggregator.ask(add_vector=asked)
            except UpdateError:
                assert fate in ("left", "damaged")
                continue
            if fate == "refused":
                aggregator.acknowledge(asked, False)
                continue
            if fate == "kept":
                aggregator.acknowledge(asked, True)
                named.append(str(seed))
                alone.reserve(weight)
                for start in range(0, LAYOUT.size, 1 << 16):
                    alone.add(start, values[start : start + (1 << 16)], weight)
        if not named:
            return
        summed, elements = await aggregator.hand_over(*named)
        merged = WeightedSum(LAYOUT.size, DECLARED)
        merged.merge(Part(elements, int(summed.weight), len(named), summed.has_small))
        assert merged.weight == alone.weight
        assert torch.equal(merged.mean(), alone.mean())

    async def body():
        async with Aggregator(tmp_path_factory.mktemp("spool")) as aggregator:
            await added_and_merged(aggregator)

    asyncio.run(body())


@pytest.mark.parametrize("bits", [5, 16, 32])
async def test_a_masked_vector_that_does_not_count_is_taken_out_of_the_ring(tmp_path, bits):
    async with Aggregator(tmp_path) as aggregator:
        await aggregator.open(masked=link_pb2.MaskedSum(length=301, bits=bits, figures=3))
        for seed in (1, 2, 3):
            asked = aggregator.vector(str(seed), seed, masked_of(seed, bits))
            await aggregator.ask(add_vector=asked)
            if seed != 3:
                aggregator.acknowledge(asked, True)
        _, payload = await aggregator.hand_over("1", "2")
        total = RoundVector(length=301, bits=bits, figures=3)
        total.add(bytes(payload))
        total.mask([], [bytes([1]) * 32, bytes([2]) * 32])
        assert not (total.elements & (2**bits - 1)).any()
        assert not total.figures.any()


@pytest.mark.parametrize("cancellations", [1, 2])
async def test_a_masked_vector_that_is_cancelled_while_it_is_added_is_taken_out_again(
    tmp_path, monkeypatch, cancellations
):
    reached = threading.Event()
    goes_on = threading.Event()
    usual = sums._MaskedSum._add

    def slow(self, spool):
        reached.set()
        assert goes_on.wait(30)
        usual(self, spool)

    async with Aggregator(tmp_path) as aggregator:
        await aggregator.open(masked=link_pb2.MaskedSum(length=301, bits=16, figures=3))
        first = aggregator.vector("1", 1, masked_of(1, 16))
        await aggregator.ask(add_vector=first)
        aggregator.acknowledge(first, True)
        monkeypatch.setattr(sums._MaskedSum, "_add", slow)
        second = aggregator.vector("2", 2, masked_of(2, 16))
        adding = asyncio.create_task(aggregator.ask(add_vector=second))
        await asyncio.to_thread(reached.wait, 30)
        aggregator.sums.cancel(link_pb2.Request(add_vector=second), "the round is over")
        await asyncio.sleep(0)
        handing_over = asyncio.create_task(aggregator.hand_over("1"))
        if cancellations == 1:
            goes_on.set()
        for _ in range(4):
            await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(UpdateError, match="the round is over"):
            await adding
        _, payload = await handing_over
        total = RoundVector(length=301, bits=16, figures=3)
        total.add(bytes(payload))
        total.mask([], [bytes([1]) * 32])
        assert not (total.elements & (2**16 - 1)).any()
        assert not total.figures.any()


@pytest.mark.parametrize("found", ["when it is refused", "when the sum is handed over"])
async def test_a_sum_from_which_a_masked_vector_cannot_be_taken_out_is_not_handed_over(
    tmp_path, monkeypatch, found
):
    def fails(self, payload):
        raise MemoryError

    monkeypatch.setattr(RoundVector, "subtract", fails)
    async with Aggregator(tmp_path) as aggregator:
        await aggregator.open(masked=link_pb2.MaskedSum(length=301, bits=16, figures=3))
        for seed in (1, 2):
            asked = aggregator.vector(str(seed), seed, masked_of(seed, 16))
            await aggregator.ask(add_vector=asked)
        if found == "when it is refused":
            aggregator.acknowledge(asked, False)
            await asyncio.gather(*aggregator.sums._leaving)
        with pytest.raises(UpdateError, match="the sum is not of the vectors that count: "):
            await aggregator.hand_over("1")


async def test_a_masked_sum_to_which_a_part_of_a_vector_was_added_is_not_handed_over(
    tmp_path, monkeypatch
):
    def fails(*_, **__):
        raise MemoryError

    async with Aggregator(tmp_path) as aggregator:
        await aggregator.open(masked=link_pb2.MaskedSum(length=301, bits=16, figures=3))
        await aggregator.ask(add_vector=aggregator.vector("1", 1, masked_of(1, 16)))
        with monkeypatch.context() as patched:
            patched.setattr(round_vector, "add_payload", fails)
            with pytest.raises(MemoryError):
                await aggregator.ask(add_vector=aggregator.vector("2", 2, masked_of(2, 16)))
        with pytest.raises(UpdateError, match="could not be added or subtracted as a whole"):
            await aggregator.hand_over("1")


async def test_an_update_that_is_cancelled_before_it_begins_leaves_no_weight(tmp_path):
    async with Aggregator(tmp_path) as aggregator:
        await aggregator.open_updates()
        payload = LAYOUT.header + update_of(1).numpy().tobytes()
        asked = aggregator.vector("1", 1, payload, DECLARED)
        adding = asyncio.create_task(aggregator.ask(add_vector=asked))
        await asyncio.sleep(0)  # the task of the vector exists and has not begun
        aggregator.sums.cancel(link_pb2.Request(add_vector=asked), "the round is over")
        with pytest.raises(UpdateError, match="the round is over"):
            await adding
        again = aggregator.vector("2", 1, payload, DECLARED)
        await aggregator.ask(add_vector=again)
        aggregator.acknowledge(again, True)
        summed, _ = await aggregator.hand_over("2")
        assert summed.weight == DECLARED


async def test_no_open_sum_makes_room_for_another(tmp_path, monkeypatch):
    monkeypatch.setattr(sums, "MAX_SUMS", 1)
    async with Aggregator(tmp_path) as aggregator:
        await aggregator.open(masked=link_pb2.MaskedSum(length=301, bits=16, figures=3))
        another = link_pb2.OpenSum(sum="t", masked=link_pb2.MaskedSum(length=1, bits=16))
        with pytest.raises(UpdateError, match="has 1 open sums"):
            await aggregator.ask(open_sum=another)
        await aggregator.ask(add_vector=aggregator.vector("1", 1, masked_of(1, 16)))


async def test_a_sum_without_one_of_the_named_vectors_is_refused(tmp_path):
    async with Aggregator(tmp_path) as aggregator:
        await aggregator.open_updates()
        with pytest.raises(UpdateError, match="not in the sum of this aggregator"):
            await aggregator.hand_over("1")
        with pytest.raises(UpdateError, match="it was started anew"):  # no second answer
            await aggregator.hand_over("1")


async def test_an_aggregator_that_rounds_otherwise_refuses_the_sum(tmp_path):
    asked = link_pb2.UpdateSum(layout=LAYOUT.header, declared_weight=DECLARED, fraction_bits=1)
    with pytest.raises(UpdateError, match="install the same version on both"):
        await Aggregator(tmp_path).open(updates=asked)


def test_a_part_that_is_larger_than_its_updates_can_be_is_refused():
    total = WeightedSum(2, DECLARED)
    part = torch.tensor([2**62, 0]).numpy().tobytes()
    with pytest.raises(UpdateError, match="larger than its updates can be"):
        total.merge(Part(bytearray(part), 1, 1, False))
    with pytest.raises(UpdateError, match="weight=100"):
        total.merge(Part(bytearray(16), 100, 1, False))
    assert total.weight == 0


async def test_a_full_disk_is_no_fault_of_a_device_and_leaves_nothing_in_the_sum(
    tmp_path, monkeypatch
):
    async with Aggregator(tmp_path) as aggregator:
        await aggregator.open_updates()
        payload = LAYOUT.header + update_of(1).numpy().tobytes()
        asked = aggregator.vector("1", 1, payload, DECLARED)
        usage = shutil.disk_usage(tmp_path)
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1))
            with pytest.raises(UpdateError, match="cannot keep its vector: its disk") as refused:
                await aggregator.ask(add_vector=asked)
            assert refused.value.code == LEFT
        fetch = aggregator.sums._fetch

        async def fails(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        aggregator.sums._fetch = fails
        with pytest.raises(UpdateError, match="vector: No space left on device") as refused:
            await aggregator.ask(add_vector=asked)
        assert refused.value.code == LEFT
        aggregator.sums._fetch = fetch
        await aggregator.ask(add_vector=asked)
        aggregator.acknowledge(asked, True)
        summed, _ = await aggregator.hand_over("1")
        assert summed.weight == DECLARED
        assert not aggregator.sums._coming


async def test_a_masked_sum_takes_its_memory_once_in_a_thread_and_may_be_forgotten_meanwhile(
    tmp_path, monkeypatch
):
    threads = []

    class Watched(RoundVector):
        def __init__(self, **form):
            threads.append(threading.current_thread())
            super().__init__(**form)

    monkeypatch.setattr(sums, "RoundVector", Watched)
    async with Aggregator(tmp_path) as aggregator:
        masked = link_pb2.MaskedSum(length=301, bits=16, figures=3)
        opening = asyncio.create_task(aggregator.open(masked=masked))
        await asyncio.sleep(0)
        aggregator.sums.forget()
        with pytest.raises(UpdateError, match="the server has started anew"):
            await opening
        assert len(threads) == 1
        assert threads[0] is not threading.main_thread()
        assert not aggregator.sums._sums
        await aggregator.open(masked=masked)
        with pytest.raises(UpdateError, match="opened this sum already"):
            await aggregator.open(masked=masked)


@pytest.mark.parametrize("bits", [1, 5, 8, 13, 16, 32, 64])
@pytest.mark.parametrize("figures", [0, 3])
def test_the_size_of_a_masked_vector_is_known_before_it_is_made(bits, figures):
    form = {"length": 301, "bits": bits, "figures": figures}
    assert RoundVector.payload_bytes(**form) == len(RoundVector(**form).payload())
