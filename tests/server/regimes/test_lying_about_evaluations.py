"""A server that lies about the sum of an evaluation: each device refuses."""

import contextlib

import pytest
import torch
from tests.privacy.mutation import disabled
from tests.server.regimes.lying_server import VICTIM
from tests.server.regimes.secure_run import LAYOUT

from isthmus.job.measurements import evaluations_run_id
from isthmus.wire import link_pb2
from isthmus_clients.device import secure_measurements
from isthmus_privacy.purpose import EvaluationPurpose, TrainingPurpose, evaluated_model
from isthmus_privacy.secagg.config import ClientRequirements, RoundConfig
from isthmus_privacy.slots import SCORING_SLOTS
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.regimes.secure_sums.round_configs import margins


class EvaluationRequest:
    """A request to evaluate a model, and the configuration that goes with it."""

    def __init__(self, server, **changes):
        opening = server.run.opening(server.run.job)
        context = FederatedContext(
            server.link, server.run.job, opening, LAYOUT, server.run.directory
        )
        blob = server.published(torch.zeros(LAYOUT.size))
        fields = {
            "run_id": evaluations_run_id("run"),
            "round": 1,
            "attempt": 1,
            "model_hash": evaluated_model(blob.sha256),
            "purpose": EvaluationPurpose(context.purpose).hash,
            "size": 3,
            "slots": SCORING_SLOTS,
            "whole": True,
            "bits": 64,
            **margins(context, server.run.job.federated),
        }
        fields |= {
            key: change(context, blob) if callable(change) else change
            for key, change in changes.items()
        }
        config = RoundConfig(**fields)
        self.work = link_pb2.Evaluate(
            run_id="run",
            round=config.round,
            attempt=config.attempt,
            model=blob,
            secure=config.to_bytes(),
        )


LIES = {
    "config-purpose-differs": {
        "purpose": lambda context, blob: TrainingPurpose(context.purpose).hash
    },
    "config-model-differs": {"model_hash": lambda context, blob: blob.sha256},
    "config-honest-below-floor": {},
}


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("code", LIES)
async def test_a_device_refuses_the_sum_of_an_evaluation_that_is_something_else(
    server, code, removed
):
    """Another kind of sum, that of updates to the model, a sum over too few."""
    if code == "config-honest-below-floor":
        credentials = server.run.devices[VICTIM].agent._secure._enrolled()
        credentials.requirements = ClientRequirements(honest_min=5, corrupt_permille=0)
    request = EvaluationRequest(server, **LIES[code])
    if not removed:
        reply = await server.ask(VICTIM, evaluate=request.work)
        assert reply.failure.code == code, reply
        return
    with disabled(code):
        assert (await server.ask(VICTIM, evaluate=request.work)).HasField("trained")


async def test_a_device_refuses_an_evaluation_again_in_plain_or_larger_than_any(server):
    first = EvaluationRequest(server)
    assert (await server.ask(VICTIM, evaluate=first.work)).HasField("trained")
    again = await server.ask(VICTIM, evaluate=first.work)
    assert again.failure.code == "config-replayed"
    plain = EvaluationRequest(server)
    plain.work.secure = b""
    reply = await server.ask(VICTIM, evaluate=plain.work)
    assert "own figures in plaintext" in reply.failure.reason
    large = EvaluationRequest(server, attempt=2, size=1 << 40)
    assert "the maximum is" in (await server.ask(VICTIM, evaluate=large.work)).failure.reason


@pytest.mark.parametrize("removed", [False, True])
async def test_a_device_refuses_to_send_counts_as_an_update(server, monkeypatch, removed):
    """Its code fails it without the check too, but later."""
    monkeypatch.setattr(
        secure_measurements, "attempted", lambda what, work: torch.ones(3, dtype=torch.int64)
    )
    request = EvaluationRequest(server, whole=False, bits=32)
    with disabled("config-elements-differ") if removed else contextlib.nullcontext():
        reply = await server.ask(VICTIM, evaluate=request.work)
    assert reply.failure.code == ("update-wrong-length" if removed else "config-elements-differ")


@pytest.mark.parametrize("protected", [True, False])
async def test_a_failed_evaluation_tells_nothing_but_keys(server, monkeypatch, protected):
    """Without the protection the text of the exception is in the reply."""

    def validation_data(self, participant):
        raise ValueError("cannot use the row [4711.25]")

    agent = server.run.devices[VICTIM].agent
    monkeypatch.setattr(type(agent.host.run.task), "validation_data", validation_data)
    if not protected:
        monkeypatch.setattr(secure_measurements, "attempted", lambda what, work: work())
    reply = await server.ask(VICTIM, evaluate=EvaluationRequest(server).work)
    assert (b"4711.25" in reply.SerializeToString()) == (not protected)
    if protected:
        assert reply.trained == link_pb2.Trained(secure=reply.trained.secure)
