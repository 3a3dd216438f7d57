"""A server that lies over a real link: each device refuses, and would not without the check."""

import time

import pytest
import torch
from tests.privacy.mutation import disabled
from tests.server.regimes.lying_server import OTHERS, VICTIM
from tests.server.regimes.secure_run import LAYOUT, NAMES

from isthmus.job import with_changes
from isthmus.task import paired_scores
from isthmus.wire import link_pb2
from isthmus_clients.device.owner_limits import LimitsGuard, parse
from isthmus_privacy.purpose import (
    BufferedPurpose,
    ComparisonPurpose,
    TrainingPurpose,
    buffer_name,
)
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.ranges import USUAL_WEIGHT
from isthmus_privacy.slots import SCORING_SLOTS, TRAINING_SLOTS
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.secure_sums.round_configs import margins


@pytest.mark.parametrize("removed", [False, True])
async def test_a_device_refuses_a_sum_with_devices_that_do_zero_steps(server, removed):
    zero_steps = with_changes(server.run.job, {"federated.local_steps": 0})
    for name in OTHERS:
        opening = await server.open(name, zero_steps)
    if not removed:
        receipt = (await server.attempt(opening, NAMES))[VICTIM]
        assert receipt.status == "rejected"
        assert "this sum is for other work than this device was asked to do" in receipt.reason
        return
    with disabled("config-purpose-differs"), disabled("set-up-of-other-updates"):
        assert (await server.attempt(opening, NAMES))[VICTIM].status == "accepted"


@pytest.mark.parametrize("removed", [False, True])
async def test_a_device_refuses_to_keep_an_update_in_a_run_of_rounds(server, removed):
    work = link_pb2.TrainLocal(
        run_id="run",
        round=1,
        attempt=1,
        model=server.published(torch.zeros(LAYOUT.size)),
        keep=True,
    )
    if not removed:
        reply = await server.ask(VICTIM, train_local=work)
        assert "was opened with federated.mode='rounds'" in reply.failure.reason
        return
    with disabled("buffered-mode-differs"):
        assert (await server.ask(VICTIM, train_local=work)).HasField("trained")


@pytest.mark.parametrize("removed", [False, True])
async def test_a_device_refuses_a_comparison_in_which_others_compare_a_model_with_itself(
    server, removed
):
    opening = server.run.opening(server.run.job)
    context = FederatedContext(server.link, server.run.job, opening, LAYOUT, server.run.directory)
    blob = server.published(torch.zeros(LAYOUT.size), torch.ones(LAYOUT.size))
    config = RoundConfig(
        run_id=paired_scores.comparisons_run_id("run"),
        round=1,
        attempt=1,
        model_hash=blob.sha256,
        purpose=ComparisonPurpose(context.purpose, ((0,), (0,))).hash,
        size=paired_scores.vector_size(2),
        slots=SCORING_SLOTS,
        **margins(context, server.run.job.federated),
    )
    work = link_pb2.Score(
        run_id="run",
        comparison=1,
        attempt=1,
        models=blob,
        candidates=[link_pb2.Candidate(of=[0]), link_pb2.Candidate(of=[1])],
        secure=config.to_bytes(),
    )
    if not removed:
        reply = await server.ask(VICTIM, score=work)
        assert "this sum is for other work" in reply.failure.reason
        return
    with disabled("config-purpose-differs"):
        assert (await server.ask(VICTIM, score=work)).HasField("trained")


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("run_id", ["run", "another"])
async def test_devices_refuse_a_second_sum_of_a_model_without_one_of_them(server, run_id, removed):
    opening = server.run.opening(server.run.job)
    first = await server.attempt(opening, NAMES)
    assert {receipt.status for receipt in first.values()} == {"accepted"}
    if run_id != "run":
        for name in NAMES:
            opening = await server.open(name, server.run.job, run_id)
    if not removed:
        second = await server.attempt(opening, OTHERS, attempt=2)
        assert "accepted" not in {receipt.status for receipt in second.values()}
        reasons = " ".join(receipt.reason for receipt in second.values())
        assert "only with exactly the same devices" in reasons
        return
    with disabled("unmasked-for-model"):
        second = await server.attempt(opening, OTHERS, attempt=2)
    assert {receipt.status for receipt in second.values()} == {"accepted"}


async def test_a_device_makes_no_vector_of_another_size_than_the_models(server):
    """Not even zeros, whose number of elements the server would choose."""
    opening = server.run.opening(server.run.job)
    context = FederatedContext(server.link, server.run.job, opening, LAYOUT, server.run.directory)
    blob = server.published(torch.zeros(LAYOUT.size))
    config = RoundConfig(
        run_id="run",
        round=1,
        attempt=1,
        model_hash=blob.sha256,
        purpose=TrainingPurpose(context.purpose).hash,
        size=1 << 30,
        slots=TRAINING_SLOTS,
        **margins(context, server.run.job.federated),
    )
    work = link_pb2.TrainLocal(
        run_id="run", round=1, attempt=1, model=blob, secure=config.to_bytes()
    )
    reply = await server.ask(VICTIM, train_local=work)
    assert reply.failure.code == "config-size-differs"


# -- kept updates of a buffer ----------------------------------------------------------------------

BUFFERED = {"federated.mode": "buffered", "federated.buffer": {"max_staleness": 2}}


class BufferOfVictim:
    """A buffered run of the victim, which keeps an update to the model of round 1."""

    def __init__(self, server):
        self.server = server
        self.job = with_changes(server.run.job, BUFFERED)
        self.model = server.published(torch.zeros(LAYOUT.size))

    async def keep(self):
        self.opening = await self.server.open(VICTIM, self.job)
        work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1, model=self.model, keep=True)
        reply = await self.server.ask(VICTIM, train_local=work)
        assert reply.HasField("trained"), reply.failure.reason

    async def agree(self, *, round_=2, model=None):
        """Ask for a sum of updates that began in round 1 from a model, or the victim's."""
        starts = ((1, model or self.model.sha256, False, (0, 0, 0)),)
        run = self.server.run
        context = FederatedContext(self.server.link, self.job, self.opening, LAYOUT, run.directory)
        config = RoundConfig(
            run_id="run",
            round=round_,
            attempt=1,
            model_hash=buffer_name("run", round_),
            purpose=BufferedPurpose(context.purpose, starts).hash,
            size=LAYOUT.size,
            slots=TRAINING_SLOTS,
            **margins(context, self.job.federated),
            weight_max=USUAL_WEIGHT,
        )
        listed = [
            link_pb2.BufferedStart(round=r, model=m, with_gradient=g) for r, m, g, _ in starts
        ]
        work = link_pb2.Agree(
            run_id="run", round=round_, attempt=1, secure=config.to_bytes(), starts=listed
        )
        return await self.server.ask(VICTIM, agree=work)


@pytest.fixture
async def buffer(server):
    buffer = BufferOfVictim(server)
    await buffer.keep()
    return buffer


async def expect_refusal(code, sentence, ask, removed):
    """A device refuses with a sentence; without the check it does what it was asked."""
    if not removed:
        assert sentence in (await ask()).failure.reason
        return
    with disabled(code):
        reply = await ask()
    assert reply.HasField("trained"), reply.failure.reason


@pytest.mark.parametrize("removed", [False, True])
async def test_a_device_refuses_a_buffer_in_a_run_that_was_opened_again_with_rounds(
    server, buffer, removed
):
    buffer.job = server.run.job
    buffer.opening = await server.open(VICTIM, buffer.job)
    sentence = "this sum is for other work than this device was asked to do"
    await expect_refusal("config-purpose-differs", sentence, buffer.agree, removed)


@pytest.mark.parametrize("removed", [False, True])
async def test_a_device_refuses_a_buffer_of_updates_to_another_model(buffer, removed):
    sentence = "this device trained from another model of round 1"
    await expect_refusal(
        "buffered-start-differs", sentence, lambda: buffer.agree(model=bytes(32)), removed
    )


@pytest.mark.parametrize("removed", [False, True])
async def test_a_device_refuses_a_buffer_of_updates_that_are_too_old(buffer, removed):
    sentence = "be at most 2 rounds before 4"
    await expect_refusal(
        "buffered-starts-invalid", sentence, lambda: buffer.agree(round_=4), removed
    )


# -- groups ----------------------------------------------------------------------------------------


GROUPS = {"federated.groups": {"minimum": 4}}


def sum_of_group(server, opening, blob, group, clients_min):
    """A request for the sum of a group, with a configuration that fits it."""
    context = FederatedContext(server.link, server.run.job, opening, LAYOUT, server.run.directory)
    config = RoundConfig(
        run_id="run",
        round=1,
        attempt=1,
        model_hash=blob.sha256,
        purpose=TrainingPurpose(context.purpose, group=group).hash,
        size=LAYOUT.size,
        slots=TRAINING_SLOTS,
        clients_max=5,
        clients_min=clients_min,
    )
    return link_pb2.TrainLocal(
        run_id="run", round=1, attempt=1, model=blob, secure=config.to_bytes(), group=group
    )


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize(
    ("declared", "group", "clients_min", "code", "sentence"),
    [
        ("south", "north", 4, "group-differs", "'north', and this device is in 'south'"),
        ("", "north", 4, "group-differs", "this device has declared none"),
        (
            "north",
            "north",
            3,
            "group-below-minimum",
            "that this device has opened requires 4",
        ),
    ],
)
async def test_a_device_is_summed_in_its_own_group_only_and_with_the_minimum(
    server, declared, group, clients_min, code, sentence, removed
):
    server.run.devices[VICTIM].agent._group = declared
    opening = await server.open(VICTIM, with_changes(server.run.job, GROUPS))
    blob = server.published(torch.zeros(LAYOUT.size))
    work = sum_of_group(server, opening, blob, group, clients_min)
    await expect_refusal(code, sentence, lambda: server.ask(VICTIM, train_local=work), removed)


async def test_a_group_of_one_job_is_not_one_of_a_job_without_the_same_minimum(server):
    """The minimum is in the job, whose hash all devices of a sum sign."""
    openings = {}
    for name in NAMES:
        server.run.devices[name].agent._group = "north"
        groups = GROUPS if name == VICTIM else {"federated.groups": {"minimum": 3}}
        openings[name] = await server.open(name, with_changes(server.run.job, groups))
    blob = server.published(torch.zeros(LAYOUT.size))
    work = sum_of_group(server, openings["a" if VICTIM != "a" else "b"], blob, "north", 4)
    reply = await server.ask(VICTIM, train_local=work)
    assert "this sum is for other work" in reply.failure.reason


# -- owners' limits --------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_device_opens_a_buffered_run_only_if_its_owner_allows_it(server, tmp_path, allowed):
    limits = parse(f"[privacy]\nbuffered = {str(allowed).lower()}", "policy.toml")
    server.run.devices[VICTIM].agent._guard = LimitsGuard(limits, tmp_path / "usage.json")
    opening = server.run.opening(with_changes(server.run.job, BUFFERED))
    reply = await server.ask(VICTIM, open=opening)
    assert reply.HasField("opened") == allowed
    assert ("[privacy] buffered" in reply.failure.reason) != allowed


@pytest.mark.parametrize("removed", [False, True])
async def test_a_device_refuses_a_cohort_of_itself_and_two_that_may_collude(server, removed):
    """With the limits of an owner who has set none."""
    server.run.devices[VICTIM].agent._secure._privacy = parse("", "policy.toml").privacy
    opening = server.run.opening(server.run.job)
    context = FederatedContext(server.link, server.run.job, opening, LAYOUT, server.run.directory)
    blob = server.published(torch.zeros(LAYOUT.size))
    config = RoundConfig(
        run_id="run",
        round=1,
        attempt=1,
        model_hash=blob.sha256,
        purpose=TrainingPurpose(context.purpose).hash,
        size=LAYOUT.size,
        slots=TRAINING_SLOTS,
        clients_max=3,
        draw=int(time.time()),
    )
    work = link_pb2.TrainLocal(
        run_id="run", round=1, attempt=1, model=blob, secure=config.to_bytes()
    )
    await expect_refusal(
        "config-honest-below-floor",
        "this device requires 10 (its owner sets [privacy] clients_min in policy.toml)",
        lambda: server.ask(VICTIM, train_local=work),
        removed,
    )
