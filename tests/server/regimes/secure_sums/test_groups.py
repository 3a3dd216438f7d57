"""The mean of the secure sums of groups, and what is unmasked if one of them fails."""

import asyncio
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.privacy.protocol import make_config

from isthmus.errors import AggregationAborted
from isthmus_privacy.secagg.encoding import decode, encode
from isthmus_privacy.slots import TRAINING_SLOTS
from isthmus_server.regimes.base import AttemptFailed, FederatedResult
from isthmus_server.regimes.secure_sums.groups import GroupedAttempt, UnmaskingGate
from isthmus_server.storage.records import Receipt
from isthmus_server.storage.unmasking_log import Unmasking, UnmaskingLog

SIZE = 6


class Summed:
    """The attempt of a group whose devices have these updates and examples."""

    def __init__(self, name, devices, config):
        self.name, self.devices, self.config = name, devices, config

    async def run(self, *, before_unmasking):
        names = [f"{self.name}{at}" for at in range(len(self.devices))]
        await before_unmasking(entry_of(names))
        vectors = [
            encode(
                self.config,
                update,
                weight=examples,
                figures={
                    "loss": 1.0,
                    "other_weight": 0.0,
                    "over_range": 0.0,
                    "over_weight": 0.0,
                    "unusable": 0.0,
                },
                dither_key=name.encode().ljust(32),
            ).vector
            for name, (update, examples) in zip(names, self.devices, strict=True)
        ]
        total = sum(vectors[1:], vectors[0].clone())
        mean = decode(self.config, total, clients=len(vectors))
        figures = {**mean.figures, "examples": float(mean.weight), "clipped": mean.clipped}
        receipts = [
            Receipt(participant=name, regime="federated", status="accepted") for name in names
        ]
        return FederatedResult(
            pseudo_gradient=mean.vector,
            training=figures,
            receipts=receipts,
            rounding=mean.rounding,
        )


def entry_of(names):
    return Unmasking(
        run_id="run",
        round=1,
        attempt=1,
        model_hash=bytes(32),
        draw=0,
        devices=frozenset(names),
    )


def config_of(groups):
    largest = max(len(devices) for devices in groups)
    return make_config(
        size=SIZE, slots=TRAINING_SLOTS, clip=4.0, weight_max=50, clients_max=max(largest, 3)
    )


def combined(groups, weights=None):
    log, needed = UnmaskingLog(), sum(map(len, groups))
    sums = {
        chr(97 + at): Summed(chr(97 + at), one, config_of(groups)) for at, one in enumerate(groups)
    }
    attempt = GroupedAttempt(sums, weights or {}, UnmaskingGate(log, len(sums), needed), needed)
    return asyncio.run(attempt.run()), log


DEVICE = st.tuples(
    st.lists(st.floats(-3.5, 3.5, width=32), min_size=SIZE, max_size=SIZE).map(torch.tensor),
    st.integers(1, 50),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(DEVICE, min_size=2, max_size=5), min_size=2, max_size=4))
def test_by_examples_the_mean_of_groups_is_that_of_all_devices_but_for_the_encoding(groups):
    result, log = combined(groups)
    devices = [device for group in groups for device in group]
    total = sum(examples for _, examples in devices)
    plain = sum(update.double() * examples for update, examples in devices) / total
    step = 2 * 4.0 / (config_of(groups).levels - 1)
    worst = step * len(devices) * 50 / total
    assert (result.pseudo_gradient.double() - plain).abs().max() <= worst + 2e-6
    assert result.training["examples"] == total
    assert result.training["loss"] == pytest.approx(1.0, abs=1e-3)
    assert len(result.receipts) == len(devices)
    assert len(log.about("run", 1, None)) == len(groups)
    mass = [sum(examples for _, examples in group) / total for group in groups]
    parts = [one.rounding * part for one, part in zip(result.groups.values(), mass, strict=True)]
    assert result.rounding == pytest.approx(math.hypot(*parts))


def test_weights_multiply_the_examples_of_a_group():
    ones, twos = torch.ones(SIZE), 2 * torch.ones(SIZE)
    result, _ = combined([[(ones, 10)] * 2, [(twos, 5)] * 2], {"b": 4.0})
    expected = (20 * 1 + 4 * 10 * 2) / (20 + 4 * 10)
    torch.testing.assert_close(result.pseudo_gradient, torch.full((SIZE,), expected))
    with pytest.raises(AttemptFailed, match="groups that were summed have the weight 0"):
        combined([[(ones, 10)] * 2, [(twos, 5)] * 2], {"a": 0.0, "b": 0.0})


class Failing:
    """The attempt of a group that lost its devices, or whose devices failed, before they signed."""

    def __init__(self, excused):
        self.excused = excused

    async def run(self, *, before_unmasking):
        receipt = Receipt(participant="x", regime="federated", status="dropped")
        raise AttemptFailed("it is gone", [receipt], excused=self.excused)


class Signed(Summed):
    """A group that is ready to be unmasked."""

    async def run(self, *, before_unmasking):
        try:
            return await super().run(before_unmasking=before_unmasking)
        except AggregationAborted as error:
            raise AttemptFailed(str(error), []) from error


@pytest.mark.parametrize("excused", [True, False])
async def test_an_attempt_is_excused_by_the_group_that_failed_first(excused):
    """A group that had to wait for another one has done nothing wrong."""
    devices = [(torch.ones(SIZE), 10)] * 3
    sums = {"a": Signed("a", devices, config_of([devices])), "b": Failing(excused)}
    log = UnmaskingLog()
    attempt = GroupedAttempt(sums, {}, UnmaskingGate(log, groups=2, needed=4), needed=4)
    with pytest.raises(AttemptFailed, match="group b: it is gone") as failed:
        await attempt.run()
    assert failed.value.excused == excused
    assert not log.about("run", 1, None)


async def test_no_group_is_unmasked_before_all_are_decided():
    log = UnmaskingLog()
    gate = UnmaskingGate(log, groups=3, needed=3)
    first = asyncio.create_task(gate.agree(entry_of("ab")))
    await asyncio.sleep(0)
    gate.decide()
    assert not log.about("run", 1, None)
    await asyncio.gather(first, gate.agree(entry_of("cd")))
    assert len(log.about("run", 1, None)) == 2


async def test_nothing_is_unmasked_if_too_few_devices_are_left():
    log = UnmaskingLog()
    gate = UnmaskingGate(log, groups=2, needed=3)
    gate.decide()
    with pytest.raises(AggregationAborted, match="2 devices and the quorum of the round is 3"):
        await gate.agree(entry_of("ab"))
    assert not log.about("run", 1, None)
