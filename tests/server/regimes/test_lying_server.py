"""A server that lies over a real link: each device refuses, and would not without the check."""

import pytest
import torch
from tests.privacy.mutation import disabled
from tests.server.regimes.secure_run import LAYOUT, NAMES, SecureRun
from tests.server.waiting import wait_until

from isthmus.job import with_changes
from isthmus.task import paired_scores
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_privacy.purpose import ComparisonPurpose
from isthmus_privacy.secagg import SCORING_SLOTS, RoundConfig
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.regimes.round_configs import margins

VICTIM, OTHERS = NAMES[0], NAMES[1:]


class LyingServer:
    """A link with real devices that keep their history, and requests that differ between them."""

    def __init__(self, run):
        self.run = run
        self.link = run.network.link

    async def open(self, name, job, run_id="run"):
        opening = self.run.opening(job)
        opening.run_id = run_id
        await self.ask(name, open=opening)
        return opening

    async def ask(self, name, **work):
        return await self.link.ask(name, link_pb2.Request(id=self.link.new_id(), **work))

    def published(self, *vectors):
        payload = b"".join(LAYOUT.encode(vector) for vector in vectors)
        blob = describe(payload)
        self.link.publish(blob, payload)
        return blob

    async def attempt(self, opening, cohort, attempt=1):
        """An attempt of these devices; returns the receipts by name."""
        job = self.run.job
        spec = AttemptSpec(
            round=1,
            attempt=attempt,
            model=self.published(torch.linspace(-1, 1, LAYOUT.size)),
            cohort=dict.fromkeys(cohort, 20),
            settings=job.federated.for_cohort(len(cohort)),
        )
        context = FederatedContext(self.link, job, opening, LAYOUT, self.run.directory)
        try:
            receipts = (await FederatedRegime(context).train(spec)).receipts
        except AttemptFailed as failed:
            receipts = failed.receipts
        return {receipt.participant: receipt for receipt in receipts}


@pytest.fixture
async def server(network, make_job, write_task, tmp_path):
    write_task()
    await network.listen()
    job = make_job(
        "federated.cohort=5",
        "federated.quorum=4",
        "federated.secure_aggregation=true",
    )
    run = SecureRun(network, job, tmp_path)
    await run.open()
    for name, device in run.devices.items():
        device.agent._secure._history_file = tmp_path / f"{name}.log"
        device.agent._secure._credentials = None
    await wait_until(lambda: set(NAMES) <= network.link.peers.keys())
    return LyingServer(run)


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
    with disabled("config-purpose-differs"):
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
