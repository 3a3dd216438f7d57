"""One device of five lies: what it can add to a sum is bounded, or the attempt is refused."""

import functools
from types import SimpleNamespace

import pytest
import torch
from tests.privacy.protocol import make_config
from tests.server.regimes.replies import updating
from tests.server.regimes.secure_run import LAYOUT, NAMES, SecureRun

from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_privacy.secagg.ranges import Ranges, counts_of
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec
from isthmus_server.regimes.committed_sums import LARGEST_WEIGHT, CommittedSums
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.regimes.secure_sums.round_configs import UNITS_PER_BIT, _compressed
from isthmus_server.storage.range_log import RangeLog, SummedRanges

LIAR = "e"


@pytest.fixture
def opened(network, make_job, write_task, tmp_path):
    """Open a run of five devices that are enrolled as if on machines of their own."""

    async def opened(*changes):
        write_task()
        await network.listen()
        network.link.enrolments.certified = True
        job = make_job(
            "federated.cohort=5",
            "federated.quorum=4",
            "federated.secure_aggregation=true",
            *changes,
        )
        run = SecureRun(network, job, tmp_path)
        await run.open()
        return run

    return opened


def lie(run, *, ranges=None, update=None):
    """Have one device change what it sends: its ranges, or its encoded update in the ring."""
    secure = run.devices[LIAR].agent._secure
    join = secure.join

    def lying_join(attempt, vector, *more):
        config = attempt.config
        if config.whole and ranges is not None:
            ranges(vector)
        if not config.whole and update is not None:
            attempt.encode = functools.partial(lying, attempt, attempt.encode)
        return join(attempt, vector, *more)

    def lying(attempt, encode, *args, **kwargs):
        encode(*args, **kwargs)
        update(attempt.config, attempt._encoded.vector)

    secure.join = lying_join


def scale_update(run, factor):
    """Have one device train an update that many times as large."""
    host = run.devices[LIAR].agent.host
    train = host.train

    def trained(*args):
        result, update = train(*args)
        LAYOUT.decode(update).mul_(factor)
        return result, update

    host.train = trained


def move_bins(vector, by):
    """Move the own 1 in each of the histograms of elements."""
    for start in (0, 256, 512):
        own = vector[start : start + 256]
        own.copy_(own.roll(by))


async def test_a_device_that_only_claims_a_large_range_changes_nothing(opened):
    run = await opened()
    usual = await run.train()
    run = await opened()
    lie(run, ranges=functools.partial(move_bins, by=30))
    result = await run.train()
    assert (usual.training["range"], result.training["range"]) == (4.0, 4.0)
    torch.testing.assert_close(result.pseudo_gradient, usual.pseudo_gradient, rtol=0, atol=1e-6)


async def test_a_device_out_of_all_proportion_is_refused(opened):
    """It may be right: then its job says so."""
    run = await opened()
    scale_update(run, 1e6)
    with pytest.raises(AttemptFailed, match="a device has elements beyond 4, which is 16 times"):
        await run.train()
    allowed = await opened("federated.clip=1e6")
    scale_update(allowed, 1e6)
    assert (await allowed.train()).training["clipped"] == 0


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
async def test_devices_of_one_scale_are_summed_at_any_scale(opened, scale):
    run = await opened(f"task.settings.lr={scale}")
    result = await run.train()
    assert result.training["clipped"] == 0
    assert bool(result.pseudo_gradient.any())


async def test_an_element_in_the_ring_beyond_the_weights_is_refused(opened):
    def add(config, vector):
        vector[0] += 1 << 28

    run = await opened()
    lie(run, update=add)
    with pytest.raises(AttemptFailed, match="the unmasked sum of 5 clients is out of range"):
        await run.train()


async def test_a_weight_that_cancels_others_is_refused_and_the_ranges_are_not_used_again(opened):
    def cancel(config, vector):
        vector[config.size] -= 79

    run = await opened()
    lie(run, update=cancel)
    ranges = RangeLog()
    said = r"sum of 5 updates has a weight of 21 examples, and by .* they have 85 to 160"
    with pytest.raises(AttemptFailed, match=said):
        await run.train(ranges=ranges)
    # Else a device that has moved the others' counts would have every attempt refused.
    assert not ranges.of(1, run.blob.sha256, "").ranges.is_known


async def test_without_ranges_a_mean_is_at_most_as_large_as_before(opened):
    def meaningless(vector):
        vector[:2] += 1

    def add(config, vector):
        mean = 5.0 * 100 / config.weight_max  # of 100 examples
        vector[0] += round(mean * (config.levels - 1) / (2 * config.clip))

    run = await opened()
    lie(run, ranges=meaningless)
    result = await run.train()
    assert result.training["range"] == 2.0**16
    run = await opened()
    lie(run, ranges=meaningless, update=add)
    said = "elements of up to 5[.0-9]*, where the rounds before allow 4: set federated.clip"
    with pytest.raises(AttemptFailed, match=said):
        await run.train()


async def test_compressed_updates_are_summed_without_ranges_by_the_magnitude_of_before(opened):
    """Their weights have a ring of 32 bits, which the largest weight without ranges fits."""

    def meaningless(vector):
        vector[:2] += 1

    run = await opened("federated.compression={bits=8, one_in=1}")
    ranges = RangeLog()
    sums = CommittedSums()
    training = (await run.train(ranges=ranges, sums=sums)).training
    sums._follow(training["magnitude"], training[LARGEST_WEIGHT])
    lie(run, ranges=meaningless)
    result = await run.train(ranges=ranges, sums=sums, round_=2)
    assert not ranges.of(2, run.blob.sha256, "").ranges.is_known
    assert result.training["weight_max"] == 128_000
    plain = await run.plain_mean(NAMES, round_=2)
    torch.testing.assert_close(result.pseudo_gradient.double(), plain, rtol=0.1, atol=1e-3)


async def test_the_rounds_before_say_how_large_a_mean_without_ranges_may_be(opened):
    def meaningless(vector):
        vector[:2] += 1

    run = await opened("task.settings.lr=1000")
    ranges = RangeLog()
    await run.train(ranges=ranges)
    known = ranges.last_known(before=2)
    assert known is not None
    assert ranges.last_known(before=1) is None
    lie(run, ranges=meaningless)
    result = await run.train(ranges=ranges, round_=2)
    assert float(result.pseudo_gradient.abs().max()) > 4


async def test_the_first_compressed_mean_is_within_the_range(opened):
    """Of a device with few examples the weighted update is far below the range, unless it lies."""

    def add(config, vector):
        vector[0] += config.codec.highest // 4

    run = await opened("federated.compression={bits=8, one_in=1}")
    lie(run, update=add)
    with pytest.raises(AttemptFailed, match=r"elements of up to (19|20)"):
        await run.train()
    run = await opened("federated.compression={bits=8, one_in=1}")
    await run.train()


def test_the_range_of_compressed_updates_follows_from_ranges(make_job):
    """A magnitude of 60 or -60 would have the next updates lost in rounding, or clipped."""
    job = make_job("federated.compression={}", "federated.secure_aggregation=true")
    config = make_config(size=LAYOUT.size, weight_max=1000)
    update = 0.02 * torch.ones(LAYOUT.size)
    counts = sum(counts_of(update, [update], 20) for _ in range(5))
    bounds = [
        _compressed(config, job, LAYOUT, magnitude, Ranges.of(counts, 5)).clip
        for magnitude in (-60.0, -11.3, 60.0)
    ]
    bits = job.federated.compression.bits
    sent = 0.02 * 20 / 1000
    assert bounds[1] == UNITS_PER_BIT * (bits + 1) * 2.0**-11.3
    assert sent / 2**11 < bounds[0] < bounds[1] < bounds[2] < sent * 2**6


def test_ranges_of_earlier_rounds_are_found():
    log = RangeLog()
    update = torch.ones(3)
    counts = 5 * counts_of(update, [update], 20)
    for number, ranges in ((1, Ranges.of(counts, 5)), (2, Ranges.unknown())):
        entry = SummedRanges(
            round=number,
            model_hash=bytes([number]) * 32,
            group="",
            devices=frozenset(NAMES),
            ranges=ranges,
        )
        log.add(entry)
    assert log.last_known(before=3) == Ranges.of(counts, 5)
    assert log.last_known(before=1) is None


@pytest.mark.parametrize(
    ("length", "noise", "is_refused"),
    [(0.5, 1e-6, False), (2.0, 1e-6, True), (2.0, 10.0, False), (1e3, 1.0, True)],
)
async def test_a_private_mean_with_its_noise_is_not_longer_than_the_bound(
    network, make_job, tmp_path, length, noise, is_refused
):
    """A device that does not clip its update: what is refused must not depend on the exact mean."""
    await network.listen()
    job = make_job("federated.cohort=3", "federated.secure_aggregation=false")
    layout = LAYOUT
    lied = torch.full((layout.size,), 3 * length / layout.size**0.5)
    for name, vector in (("a", 0 * lied), ("b", 0 * lied), ("c", lied)):
        await network.join(name, updating(vector, layout))
    context = FederatedContext(network.link, job, link_pb2.OpenRun(run_id="run"), layout, tmp_path)

    def release(mean, devices, figures, rounding):
        assert rounding == 0
        mean.add_(noise * torch.randn(len(mean), generator=torch.Generator().manual_seed(0)))
        return figures, noise

    context.privacy = SimpleNamespace(clip=1.0, release=release)
    model = layout.encode(torch.ones(layout.size))
    blob = describe(model)
    network.link.publish(blob, model)
    spec = AttemptSpec(
        round=1,
        attempt=1,
        model=blob,
        cohort=dict.fromkeys("abc", 10),
        settings=job.federated,
    )
    if not is_refused:
        result = await FederatedRegime(context).train(spec)
        assert result.noise == noise
        if noise < 1:
            assert float(result.pseudo_gradient.norm()) == pytest.approx(length, rel=1e-3)
        return
    said = "the mean of 3 updates is longer than their noise and updates of at most 1 "
    if length == 1e3:  # each element is longer than a whole update may be
        said = "is out of range"
    with pytest.raises(AttemptFailed, match=said):
        await FederatedRegime(context).train(spec)
