"""Models that a plan keeps, starts from or mixes, and the served average."""

import hashlib

import torch
from tests.server.rounds.results import LAYOUT, initial_model, stored_models, training_requests

from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.storage.events import RoundCommitted
from isthmus_server.views.report import read_report


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
    seen = {}

    def keep_models(event):
        if isinstance(event, RoundCommitted):
            seen[event.record.round] = stored_models(store)

    coordinator = Coordinator(store, deployment.link)
    coordinator.events.subscribe(keep_models)
    await coordinator.run()
    assert {"model-000001.safetensors", "model-000003.safetensors"} <= seen[3].keys()
    assert "model-000001.safetensors" in seen[4]  # the commit before still names it
    assert "model-000001.safetensors" not in seen[5]
    # A device's epoch is one batch here: from the same model it goes the same way.
    second, fourth = seen[2]["model-000002.safetensors"], seen[4]["model-000004.safetensors"]
    torch.testing.assert_close(fourth, second, atol=1e-5, rtol=0)
    third = seen[3]["model-000003.safetensors"]
    assert (third - second).abs().max() > 0.001


async def test_a_mix_of_two_models_is_half_of_each(deployment, planned, tmp_path):
    await deployment.start()
    plans = planned([{"keep": {"warm": "current"}}, {"start": "warm+initial"}])
    store = deployment.create_run("run", *plans, "federated.local_steps=0")
    coordinator = Coordinator(store, deployment.link)
    coordinator.model.vector.add_(1.0)  # so that the first round does not end where it began
    await coordinator.run()
    torch.testing.assert_close(coordinator.model.vector, initial_model(tmp_path) + 0.5)


async def test_the_served_average_is_evaluated_and_handed_out(deployment):
    await deployment.start()
    store = deployment.create_run("run", "strategy.served_average=0.9")
    coordinator = Coordinator(store, deployment.link)
    final = await coordinator.run()
    written = (store.directory / "model.safetensors").read_bytes()
    assert final.model_sha256 == hashlib.sha256(written).hexdigest()
    assert final.model_sha256 == coordinator.model.served_sha256 != coordinator.model.sha256
    assert final.metrics == read_report(store).to_json()["rounds"][-1]["metrics"]
    torch.testing.assert_close(LAYOUT.decode(bytearray(written)), coordinator.model.served_vector)


async def test_with_a_served_average_the_datacenter_hands_back(run_with_datacenter):
    store, coordinator, datacenter = await run_with_datacenter(
        "strategy.policy=datacenter", "strategy.served_average=0.5", "rounds=2"
    )
    start = coordinator.model.initial()
    await coordinator.run()
    work = training_requests(datacenter)
    assert [(one.hand_back, one.evaluate) for one in work] == [(True, False)] * 2
    assert [one.HasField("model") for one in work] == [True, False]
    torch.testing.assert_close(coordinator.model.served_vector, start - 0.075)
    assert read_report(store).to_json()["rounds"][1]["metrics"].keys() == {"loss", "accuracy"}
