"""Real devices whose updates have any range: their sum is the plain mean, and is made once."""

import asyncio
import dataclasses
import functools

import pytest
import torch
from tests.server.regimes.secure_run import LAYOUT, NAMES, SecureRun
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused, JobError, TaskError
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import OWNER_REFUSES
from isthmus_privacy.purpose import ranged_model, ranges_run_id
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.ranges import SIZE
from isthmus_privacy.slots import TRAINING_SLOTS
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.secure_sums.attempt import SecureAggregationAttempt
from isthmus_server.storage.range_log import RangeLog

SCALES = [10.0**exponent for exponent in (-6, -5, -4, -3, -2, 0, 1, 2, 4, 6)]
ROWS = """
    def local_data(self, participant):
        return rows(
            self.settings.get("rows", {}).get(participant.name, 20),
            seed=sum(participant.name.encode()),
        )
"""


@pytest.fixture
def opened(network, make_job, write_task, tmp_path):
    async def opened(*changes):
        write_task(ROWS)
        await network.listen()
        job = make_job(
            "federated.cohort=5",
            "federated.quorum=3",
            "federated.secure_aggregation=true",
            "time.round_seconds=6000",
            "time.lease_seconds=2000",
            *changes,
        )
        run = SecureRun(network, job, tmp_path)
        await run.open()
        return run

    return opened


def record_updates(run):
    """The update that each device has trained last, by name, as float64 (N)."""
    made = {}

    def recording(name, train):
        def train_and_record(*args):
            trained, update = train(*args)
            made[name] = trained.examples, LAYOUT.decode(update).double()
            return trained, update

        return train_and_record

    for name, device in run.devices.items():
        device.agent.host.train = recording(name, device.agent.host.train)
    return made


def relative_error(result, made, names=NAMES):
    weights = [made[name][0] for name in names]
    total = sum(weight * made[name][1] for weight, name in zip(weights, names, strict=True))
    expected = total / sum(weights)
    return float((result.pseudo_gradient.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("scale", SCALES)
async def test_the_sum_is_the_plain_mean_at_any_scale(opened, scale):
    run = await opened(f"task.settings.lr={scale}")
    made = record_updates(run)
    result = await run.train()
    assert relative_error(result, made) < 1e-4
    assert result.training["clipped"] == 0
    assert [receipt.status for receipt in result.receipts] == ["accepted"] * 5


@pytest.mark.parametrize("compression", [False, True])
async def test_every_device_counts_with_all_its_examples(opened, compression):
    changes = ["federated.compression={bits=8, one_in=1, step_ahead=0}"] * compression
    run = await opened(
        "task.settings.rows={a=1, b=8000, c=30, d=30, e=2}", "federated.batch_size=64", *changes
    )
    made = record_updates(run)
    result = await run.train()
    assert result.training["examples"] == 8063
    assert result.training["weight_max"] == 8000
    assert relative_error(result, made) < 1e-4


async def test_the_range_follows_compressed_updates(opened):
    """The first sum has the range that was found, later ones that of the magnitude."""
    run = await opened("federated.compression={bits=8, one_in=1}", "task.settings.lr=1e5")
    made = record_updates(run)
    result = await run.train()
    assert relative_error(result, made) < 1e-4
    assert result.training["range"] > 1000


async def test_the_gradient_is_in_range_too(opened):
    run = await opened("task.settings.lr=1000")
    result = await run.train(gradient_scale=2.0**-4)
    assert result.training["clipped"] == 0
    assert result.training["gradient_lost"] == pytest.approx(0, abs=1e-4)
    assert result.gradient.norm() > 0


@pytest.mark.parametrize("step", ["agree", "roster", "inbox"])
async def test_a_device_may_be_lost_between_the_sums(opened, step):
    run = await opened("task.settings.lr=1000")
    made = record_updates(run)
    run.devices["c"].fails_at = step
    result = await run.train()
    assert relative_error(result, made, NAMES.replace("c", "")) < 1e-4
    receipt = result.receipts[NAMES.index("c")]
    assert (receipt.status, receipt.participant) == ("rejected", "c")


def record_steps(run):
    """What each device is asked in turn, by name."""
    steps = {name: [] for name in run.devices}

    def recording(name, work):
        async def recorded(request, *args):
            kind = request.WhichOneof("work")
            if kind == "secure_step":
                kind = request.secure_step.WhichOneof("message")
            steps[name].append(kind)
            return await work(request, *args)

        return recorded

    for name, device in run.devices.items():
        device.agent.work = recording(name, device.agent.work)
    return steps


UNMASKING = ["survivors", "consistency_signatures"]


async def test_the_set_up_of_the_ranges_is_that_of_the_updates(opened):
    run = await opened()
    made = record_updates(run)
    steps = record_steps(run)
    result = await run.train()
    assert relative_error(result, made) < 1e-4
    both = ["train_local", "roster", "inbox", *UNMASKING, "agree", *UNMASKING]
    assert list(steps.values()) == [both] * 5


@pytest.mark.parametrize("changes", [{"clip": 0.123}, {"clients_min": 2}, {"attempt": 7}])
async def test_a_second_sum_that_is_refused_leaves_none_of_its_secrets(opened, changes):
    """These are shares of others' secrets, too, and its server goes on without this device."""
    run = await opened("task.settings.lr=1000")
    made = record_updates(run)
    agent = run.devices["c"].agent
    work = agent.work
    kept = []

    async def lied_to(request, *args):
        if request.HasField("agree"):
            secrets = agent._secure._current.session._next
            kept.extend([secrets.seed, *secrets.share_pairs.values()])
            config = RoundConfig.from_bytes(request.agree.secure)
            request.agree.secure = dataclasses.replace(config, **changes).to_bytes()
        return await work(request, *args)

    agent.work = lied_to
    result = await run.train()
    assert relative_error(result, made, "abde") < 1e-4
    assert result.receipts[2].status == "rejected"
    assert len(kept) == 5
    assert not any(map(any, kept))


async def test_an_update_that_is_trained_again_for_the_second_sum_goes_with_its_reply(opened):
    """A server may ask for that in place of `Agree`: no masked vector stays in memory."""
    run = await opened()
    made = record_updates(run)
    trained = {}
    for name, device in run.devices.items():
        work = device.agent.work

        async def trains_again(request, *args, name=name, work=work):
            if request.HasField("train_local"):
                trained[name] = request.train_local
            if request.HasField("agree"):
                again = link_pb2.Request(id=f"again {name}", train_local=trained[name])
                again.train_local.ClearField("ranges")
                again.train_local.secure = request.agree.secure
                return await work(again, bytearray(run.model), lambda progress: None)
            return await work(request, *args)

        device.agent.work = trains_again
    result = await run.train()
    assert relative_error(result, made) < 1e-4
    assert all(device.agent._secure.take_masked() is None for device in run.devices.values())


async def test_a_sum_that_allows_another_cohort_has_a_set_up_of_its_own(opened, monkeypatch):
    run = await opened()
    made = record_updates(run)
    steps = record_steps(run)
    monkeypatch.setattr(SecureAggregationAttempt, "config_after", lambda self, config: None)
    result = await run.train()
    assert relative_error(result, made) < 1e-4
    assert steps["a"][5:] == ["agree", "roster", "inbox", *UNMASKING]


@pytest.mark.parametrize("step", UNMASKING)
async def test_a_device_may_be_lost_after_its_update_is_in(opened, step):
    run = await opened("task.settings.lr=1000")
    made = record_updates(run)
    work = run.devices["c"].agent.work
    asked = []

    async def fails_then(request, *args):
        if request.HasField("secure_step") and request.secure_step.HasField(step):
            asked.append(step)
            if len(asked) == 2:
                raise TaskError("the battery is empty")
        return await work(request, *args)

    run.devices["c"].agent.work = fails_then
    result = await run.train()
    assert relative_error(result, made) < 1e-4
    assert [receipt.status for receipt in result.receipts] == ["accepted"] * 5


async def test_a_changed_vector_of_the_second_sum_is_rejected_and_the_others_go_on(opened):
    run = await opened("task.settings.lr=1000")
    made = record_updates(run)
    work = run.devices["c"].agent.work

    async def tampers(request, *args):
        reply, payload = await work(request, *args)
        if request.HasField("agree"):
            payload[0] ^= 1
            reply.trained.result.CopyFrom(describe(payload))
        return reply, payload

    run.devices["c"].agent.work = tampers
    result = await run.train()
    assert relative_error(result, made, "abde") < 1e-4
    assert "was changed" in result.receipts[2].reason


async def test_a_device_that_begins_another_sum_between_the_two_is_not_in_the_second(opened):
    """What it keeps for that is gone with it."""
    run = await opened("task.settings.lr=1000")
    made = record_updates(run)
    agent = run.devices["c"].agent
    work = agent.work

    async def forgets(request, *args):
        if request.HasField("agree"):
            agent._secure._current = None
        return await work(request, *args)

    agent.work = forgets
    result = await run.train()
    assert relative_error(result, made, "abde") < 1e-4
    assert "of another one in which this device was not" in result.receipts[2].reason


async def test_the_device_with_most_examples_may_be_lost_between_the_sums(opened):
    """The sum has room for its weight, and the others have little of that."""
    run = await opened("task.settings.rows={c=200000, e=1}", "federated.local_steps=2")
    made = record_updates(run)
    run.devices["c"].fails_at = "agree"
    result = await run.train()
    assert result.training["examples"] == 61
    assert relative_error(result, made, "abde") < 1e-4


async def test_a_wide_range_of_the_job_is_refused_without_the_device_with_most_examples(opened):
    """A thousandth of the mean of the others was rounding, and nothing was said."""
    run = await opened(
        "federated.clip=1e7", "task.settings.rows={c=200000, e=1}", "federated.local_steps=2"
    )
    run.devices["c"].fails_at = "agree"
    with pytest.raises(AttemptFailed, match=r"lost in the rounding .*remove federated\.clip"):
        await run.train()


async def test_a_receipt_has_the_bytes_of_both_sums(opened):
    run = await opened()
    result = await run.train()
    of_ranges = (SIZE + 3) * 2  # of 16 bits, with the weight, the clipped share and the failures
    of_updates = (LAYOUT.size + 2 + len(TRAINING_SLOTS)) * 4
    for receipt in result.receipts:
        assert receipt.bytes_in == of_ranges + of_updates
        assert receipt.bytes_out == len(run.model)  # it was sent for the first sum only


async def test_whoever_was_in_the_ranges_has_accepted_the_attempt(opened):
    """A charge for it stays, though all refuse the second sum as if no work had been begun."""
    run = await opened()

    async def refuses(agent, request, *args):
        if request.HasField("agree"):
            refused = AdmissionRefused("not now")
            refused.code = OWNER_REFUSES
            raise refused
        return await type(agent).work(agent, request, *args)

    for device in run.devices.values():
        device.agent.work = functools.partial(refuses, device.agent)
    with pytest.raises(AttemptFailed, match="not now") as caught:
        await run.train()
    assert {receipt.started for receipt in caught.value.receipts} == {True}
    assert not caught.value.all_refused(NAMES)


async def test_ranges_are_summed_once_for_a_model(opened):
    """Devices would refuse a second sum without one of them; the update of each is summed once."""
    run = await opened("task.settings.lr=1000")
    made = record_updates(run)
    ranges = RangeLog()
    for name in "abc":
        run.devices[name].fails_at = "agree"
    with pytest.raises(AttemptFailed):
        await run.train(ranges=ranges)
    for device in run.devices.values():
        device.fails_at = None
    known = ranges.of(1, run.blob.sha256, "")
    assert known.devices == frozenset(NAMES)
    asked = record_requests(run)
    result = await run.train(attempt=2, ranges=ranges)
    assert ("agree", 2) not in asked
    assert relative_error(result, made) < 1e-4


def spoil(device):
    """Have a device join with two in place of one bin, and then with its update as usual."""
    join = device.agent._secure.join

    def join_with_two(attempt, vector, *more):
        if attempt.config.whole:
            vector[:2] += 1
        return join(attempt, vector, *more)

    device.agent._secure.join = join_with_two


async def test_ranges_that_one_device_makes_meaningless_are_done_without(opened, caplog):
    run = await opened("task.settings.lr=1000")
    made = record_updates(run)
    spoil(run.devices["e"])
    ranges = RangeLog()
    result = await run.train(ranges=ranges)
    assert "does not have a count for each" in caplog.text
    assert relative_error(result, made) < 1e-4
    assert (result.training["clipped"], result.training["range"]) == (0, 2.0**16)
    assert not ranges.of(1, run.blob.sha256, "").ranges.is_known


async def test_ranges_that_one_device_makes_too_narrow_are_used_once(opened):
    """It moves the counts of the others, so that there is still one for each device."""
    run = await opened("task.settings.lr=1000")
    await run.train()
    honest = run.context.ranges.of(1, run.blob.sha256, "").ranges.counts
    narrow = torch.zeros(SIZE, dtype=torch.int64)
    narrow[[40, 296, 552]] = len(NAMES)  # of elements of 2^-88
    narrow[768:] = torch.tensor(honest[768:])
    run = await opened("task.settings.lr=1000")
    secure = run.devices["e"].agent._secure
    join = secure.join

    def join_with_all(attempt, vector, *more):
        if attempt.config.whole:
            attempt.encode = functools.partial(lying, attempt, attempt.encode)
        return join(attempt, vector, *more)

    def lying(attempt, encode, *args, **kwargs):
        encode(*args, **kwargs)
        attempt._encoded.vector[:SIZE] += narrow - torch.tensor(honest)

    secure.join = join_with_all
    ranges = RangeLog()
    with pytest.raises(AttemptFailed, match="were outside of the range, which was found"):
        await run.train(ranges=ranges)
    others = await opened("task.settings.lr=1000")
    made = record_updates(others)
    result = await others.train(attempt=2, ranges=ranges)
    assert relative_error(result, made) < 1e-4


async def test_ranges_whose_devices_are_lost_at_their_unmasking_are_not_summed_again(opened):
    """Neither with them, who may never come back, nor without, which would be a difference."""
    run = await opened("task.settings.lr=1000")
    made = record_updates(run)
    ranges = RangeLog()
    for name in "abc":
        run.devices[name].fails_at = "consistency_signatures"
    with pytest.raises(AttemptFailed):
        await run.train(ranges=ranges)
    for name in "ab":
        run.devices[name].fails_at = None
    asked = record_requests(run)
    names = "abde"
    result = await run.train(attempt=2, ranges=ranges, names=names)
    assert ("agree", 2) not in asked
    assert relative_error(result, made, names) < 1e-4


async def test_an_update_that_is_not_asked_for_is_freed_when_its_round_is_over(opened):
    run = await opened()
    lost = run.devices["e"]
    lost.fails_at = "roster"  # so that it is in no sum, and hears nothing more
    secure = lost.agent._secure
    usual = secure.seconds_kept
    seconds = []

    def at_once(request):
        seconds.append(usual(request))
        return 0.0

    secure.seconds_kept = at_once
    await run.train()
    await wait_until(lambda: secure._ranged is None)
    assert seconds[0] > 2 * 6000
    assert lost.agent.host._spare is not None  # its memory is for the next one


@pytest.mark.parametrize("gradient_scale", [0.0, 2.0**-4])
async def test_updates_that_the_widest_encoding_loses_are_refused(opened, gradient_scale):
    """Also next to a gradient that is far larger, and not lost."""
    run = await opened("task.settings.lr=1e-10")
    ranges = RangeLog()
    spoil(run.devices["e"])
    with pytest.raises(AttemptFailed, match=r"lost in rounding: set federated\.clip"):
        await run.train(ranges=ranges, gradient_scale=gradient_scale)


def record_requests(run):
    """The kinds of the requests that devices receive, with their attempts."""
    kinds = set()
    for device in run.devices.values():

        async def work(request, *args, agent=device.agent):
            kind = request.WhichOneof("work")
            kinds.add((kind, getattr(request, kind).attempt))
            return await type(agent).work(agent, request, *args)

        device.agent.work = work
    return kinds


async def test_other_devices_than_those_of_the_ranges_have_room(opened):
    run = await opened("task.settings.lr=1000")
    ranges = RangeLog()
    for name in "abc":  # no sum of updates is unmasked, so that they may encode anew
        run.devices[name].fails_at = "agree"
    with pytest.raises(AttemptFailed):
        await run.train(ranges=ranges)
    for device in run.devices.values():
        device.fails_at = None
    known = ranges.of(1, run.blob.sha256, "")
    of_others = dataclasses.replace(known, devices=frozenset("abx"))
    others = RangeLog()
    others.add(of_others)
    again = await run.train(attempt=2, ranges=others)
    assert again.training["range"] == 16 * known.ranges.encoding(clients=5).clip > 64


async def test_a_device_with_more_examples_than_the_found_weight_is_counted(opened):
    """It was not in the sum of ranges: a retry with others would count it for less unnoticed."""
    rows = "task.settings.rows={a=5000, b=20, c=20, d=20, e=20}"
    run = await opened(rows, "federated.batch_size=64")
    ranges = RangeLog()
    run.devices["a"].fails_at = "train_local"
    await run.train(ranges=ranges)
    known = ranges.of(1, run.blob.sha256, "")
    fresh = await opened(rows, "federated.batch_size=64")
    result = await fresh.train(attempt=2, ranges=ranges)
    assert known.devices == frozenset("bcde")
    assert (result.training["over_weight"], result.training["weight_max"]) == (1, 1000)
    assert result.training["examples"] == 1080
    limited = await opened(rows, "federated.batch_size=64", "federated.max_examples=1000")
    result = await limited.train(attempt=3)
    assert result.training["over_weight"] == 0  # the job says so


async def test_an_update_that_is_not_finite_does_not_count(opened):
    run = await opened()
    made = record_updates(run)
    train = run.devices["b"].agent.host.train

    def diverged(*args):
        trained, update = train(*args)
        LAYOUT.decode(update)[3] = float("inf")
        return trained, update

    run.devices["b"].agent.host.train = diverged
    result = await run.train()
    assert result.training["unusable"] == 1
    assert relative_error(result, made, NAMES.replace("b", "")) < 1e-4


async def test_a_loss_beyond_its_slot_is_counted(opened):
    run = await opened()
    train = run.devices["b"].agent.host.train

    def high(*args):
        trained, update = train(*args)
        trained.training["loss"] = 50_000.0
        return trained, update

    usual = await run.train()
    assert usual.training["over_range"] == 0
    run.devices["b"].agent.host.train = high
    result = await run.train(attempt=2)
    assert result.training["over_range"] == 1
    assert 190 < result.training["loss"] < 210  # 1,000 from one of five
    assert torch.equal(result.pseudo_gradient, usual.pseudo_gradient)


@pytest.mark.parametrize("step", ["train_local", "roster", "agree"])
async def test_no_device_counts_as_summed_in_an_attempt_that_was_cancelled(opened, step):
    run = await opened()
    for device in run.devices.values():
        device.silent_at = step
    training = asyncio.create_task(run.train())
    await wait_until(lambda: all(device.is_silent for device in run.devices.values()))
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    receipts = run.regime.cancelled("another job has its turn")
    assert [receipt.participant for receipt in receipts] == list(NAMES)
    assert {receipt.status for receipt in receipts} == {"dropped"}


async def test_too_much_clipping_ends_the_run_with_what_to_change(opened):
    run = await opened("task.settings.lr=1000", "federated.clip=4")
    with pytest.raises(JobError, match=r"outside of federated\.clip=4 and were clipped, and"):
        await run.train()
    allowed = await opened("task.settings.lr=1000", "federated.clip=4", "federated.max_clipped=1")
    result = await allowed.train(attempt=2)
    assert result.training["clipped"] > 0.5


@pytest.mark.parametrize("more", [(), ("federated.max_examples=1000",)])
async def test_one_device_beyond_the_range_of_the_job_ends_an_attempt_and_not_the_run(
    opened, monkeypatch, more
):
    """It may lie, so that others are asked; processes of the server's machine do not."""
    run = await opened("federated.clip=4", *more)
    host = run.devices["e"].agent.host
    train = host.train

    def diverged(*args):
        trained, update = train(*args)
        LAYOUT.decode(update).fill_(1e9)
        return trained, update

    monkeypatch.setattr(host, "train", diverged)
    with pytest.raises(JobError, match=r"20\.00% of the elements .* federated\.clip=4 and were"):
        await run.train()
    monkeypatch.setattr(FederatedContext, "certified", True)
    with pytest.raises(AttemptFailed, match=r"20\.00% of the elements .*; remove federated\.clip"):
        await run.train(attempt=2)


@pytest.mark.parametrize("more", [(), ("federated.max_examples=1000",)])
@pytest.mark.parametrize("clip", [5, 1000, 1e7])
async def test_a_wide_range_of_the_job_changes_nothing(opened, clip, more):
    run = await opened(f"federated.clip={clip}", *more)
    made = record_updates(run)
    result = await run.train()
    assert relative_error(result, made) < 1e-4


@pytest.mark.parametrize("scale", [1e-4, 1e-2])
async def test_a_large_weight_of_the_job_loses_no_small_updates(opened, scale):
    limits = ("federated.clip=4", "federated.max_examples=1000000")
    run = await opened(f"task.settings.lr={scale}", *limits)
    made = record_updates(run)
    result = await run.train()
    assert relative_error(result, made) < 1e-4


@pytest.mark.parametrize("largest", [1e9, 1e12])
async def test_a_weight_of_the_job_that_loses_the_updates_is_refused(opened, largest):
    run = await opened("federated.clip=1e7", f"federated.max_examples={int(largest)}")
    with pytest.raises(
        AttemptFailed, match=r"lost in rounding with federated\.clip=1e\+07 and a l"
    ):
        await run.train()


async def test_zeros_are_no_updates_that_were_lost(opened):
    run = await opened("task.settings.lr=0", "federated.clip=4", "federated.max_examples=1000000")
    assert not (await run.train()).pseudo_gradient.any()


async def test_a_range_of_the_job_that_loses_the_updates_is_refused(opened):
    """It ended with a model that was rounding and nothing else."""
    run = await opened("federated.clip=1e18")
    with pytest.raises(AttemptFailed, match=r"clip=1e\+18 is so wide that the updates are lost in"):
        await run.train()
    with pytest.raises(JobError, match="clip=1e\\+18 with max_examples is above 16,777,216"):
        await opened("federated.clip=1e18", "federated.max_examples=9")


async def test_the_log_notes_ranges_apart_from_updates(opened):
    run = await opened()
    await run.train()
    (of_ranges,) = run.context.unmaskings.about(
        ranges_run_id("run"), 1, ranged_model(run.blob.sha256)
    )
    (of_updates,) = run.context.unmaskings.about("run", 1, run.blob.sha256)
    assert of_ranges.devices == of_updates.devices == frozenset(NAMES)


async def test_the_history_of_a_device_binds_ranges_and_updates_apart(opened):
    """A device lost after the ranges does not bind the others to it in the sum of the updates."""
    run = await opened()
    run.devices["e"].fails_at = "agree"
    await run.train()
    run.devices["e"].fails_at = None
    with pytest.raises(AttemptFailed, match="helped to unmask a sum of updates to the same model"):
        await run.train(attempt=2, names="abcde", ranges=run.context.ranges)
    with pytest.raises(AttemptFailed, match="helped to unmask a sum of updates to the same model"):
        await run.train(attempt=3, names="abcd")  # not those of the ranges, which are summed anew
