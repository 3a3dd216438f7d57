"""Models that a plan keeps, starts from or mixes, and the served average."""

import hashlib

import torch
from tests.server.rounds.results import LAYOUT, initial_model, stored_models, training_requests

from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundCommitted


async def test_a_round_can_start_from_a_model_that_was_kept(deployment, planned, tmp_path):
    await deployment.start()
    plans = planned(
        [
            {"keep": {"warm": "current"}},
            {},
            {},
            {"start": "warm", "keep": {"warm": ""}},
            {},
        ]
    )
    store = deployment.create_run("run", *plans)
    models_after = {}

    def keep_models(event):
        if isinstance(event, RoundCommitted):
            models_after[event.record.round] = stored_models(store)

    coordinator = Coordinator(RunParts.of(store, deployment.link))
    coordinator.events.subscribe(keep_models)
    await coordinator.run()
    assert {"model-000001.safetensors", "model-000003.safetensors"} <= models_after[3].keys()
    assert "model-000001.safetensors" in models_after[4]  # the commit before still names it
    assert "model-000001.safetensors" not in models_after[5]
    # A device's epoch is one batch here: from the same model it goes the same way.
    second, fourth = (
        models_after[2]["model-000002.safetensors"],
        models_after[4]["model-000004.safetensors"],
    )
    torch.testing.assert_close(fourth, second, atol=1e-5, rtol=0)
    third = models_after[3]["model-000003.safetensors"]
    assert (third - second).abs().max() > 0.001


async def test_a_mix_of_two_models_is_their_mean(deployment, planned, tmp_path):
    deployment.honest = False  # the first model is not the one that the run says
    await deployment.start()
    plans = planned([{"keep": {"warm": "current"}}, {"start": "warm+initial"}])
    store = deployment.create_run("run", *plans, "federated.local_steps=0")
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    coordinator.model.vector.add_(1.0)  # so that the first round does not end where it began
    await coordinator.run()
    torch.testing.assert_close(coordinator.model.vector, initial_model(tmp_path) + 0.5)


async def test_the_served_average_is_evaluated_and_written(deployment):
    await deployment.start()
    store = deployment.create_run("run", "strategy.served_average=0.9")
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    final = await coordinator.run()
    written = (store.directory / "model.safetensors").read_bytes()
    assert final.model_sha256 == hashlib.sha256(written).hexdigest()
    assert final.model_sha256 == coordinator.model.served_sha256 != coordinator.model.sha256
    assert final.metrics == read_report(store).to_json()["rounds"][-1]["metrics"]
    torch.testing.assert_close(LAYOUT.decode(bytearray(written)), coordinator.model.served_vector)


async def test_with_a_served_average_the_datacenter_returns_its_model(run_with_datacenter):
    store, coordinator, datacenter = await run_with_datacenter(
        "strategy.policy=datacenter", "strategy.served_average=0.5", "rounds=2"
    )
    start = coordinator.model.initial()
    await coordinator.run()
    requests = training_requests(datacenter)
    assert [(request.hand_back, request.evaluate) for request in requests] == [(True, False)] * 2
    assert [request.HasField("model") for request in requests] == [True, False]
    torch.testing.assert_close(coordinator.model.served_vector, start - 0.075)
    assert read_report(store).to_json()["rounds"][1]["metrics"].keys() == {"loss", "accuracy"}
