"""Rounds of devices, of a datacenter and of both: which models move, and how results merge."""

import pytest
import torch
from tests.privacy.mutation import disabled
from tests.server.rounds.policies import TRANSFER
from tests.server.rounds.results import (
    LAYOUT,
    gradient_requests,
    initial_model,
    read_model,
    stored_models,
    training_requests,
)

from isthmus_server.model import merge, mmap_buffer
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds import model_publication
from isthmus_server.rounds.attempt_log import AttemptLog
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import (
    RoundCommitted,
)

PLAIN = "federated.secure_aggregation=false"
BUFFERED = (PLAIN, "federated.mode=buffered", "federated.buffer={concurrency=3}")


@pytest.fixture(params=[False, True], ids=["small", "large"])
def leaves(request, monkeypatch):
    """Whether the server gives up the memory of a model that stays in a datacenter."""
    if request.param:
        monkeypatch.setattr(model_publication, "LARGE_BYTES", 0)
        monkeypatch.setattr(mmap_buffer, "LARGE_BYTES", 0)
    return request.param


async def test_in_alternate_rounds_the_model_is_sent_only_where_it_is_needed(
    run_with_datacenter, leaves
):
    store, coordinator, datacenter = await run_with_datacenter(
        "strategy.policy=alternate", "rounds=5"
    )
    final = await coordinator.run()
    report = read_report(store).to_json()
    regimes = [row["regime"] for row in report["rounds"]]
    assert regimes == ["datacenter", "federated", "datacenter", "federated", "datacenter"]
    assert [row["model_sha256"] is None for row in report["rounds"]] == [True, False] * 2 + [True]
    kinds = [request.WhichOneof("work") for request in datacenter.requests]
    assert kinds == ["open", *["train_steps", "export"] * 3, "close"]
    requests = training_requests(datacenter)
    assert [(request.from_step, request.until_step) for request in requests] == [
        (0, 50),
        (50, 100),
        (100, 150),
    ]
    assert all(request.HasField("model") for request in requests)
    assert not any(request.hand_back for request in requests)
    assert torch.equal(coordinator.model.vector, datacenter.vector)
    assert final.metrics == {"loss": 0.75, "accuracy": 0.5}
    assert report["rounds"][0]["cost"]["price"] == 0.5
    assert datacenter.requests[-1].close.finished


async def test_consecutive_datacenter_rounds_send_no_model(
    run_with_datacenter, leaves, monkeypatch
):
    store, coordinator, datacenter = await run_with_datacenter("strategy.policy=datacenter")
    values = []
    commit = AttemptLog.commit

    def watched(log, *arguments, **more):
        values.append(coordinator.model.layout.decode(coordinator.model.payload).abs().sum())
        return commit(log, *arguments, **more)

    monkeypatch.setattr(AttemptLog, "commit", watched)
    final = await coordinator.run()
    # Of a large model the server has nothing between the rounds, and all of it at the end.
    assert [bool(value == 0) for value in values] == [leaves] * 3
    assert torch.equal(coordinator.model.vector, datacenter.vector)
    assert torch.equal(read_model(store.directory / final.model_path), datacenter.vector)
    assert coordinator.model.sha256 == final.model_sha256
    requests = training_requests(datacenter)
    assert [request.HasField("model") for request in requests] == [True, False, False]
    assert [request.WhichOneof("work") for request in datacenter.requests].count("export") == 1
    assert len(read_report(store).to_json()["rounds"]) == 3


@pytest.mark.parametrize(
    ("hybrid", "own_part"),
    [(TRANSFER, 0.0), ({"regime": "hybrid", "merge": "weighted"}, 0.25)],
)
async def test_a_hybrid_round_starts_from_the_model_of_the_datacenter_round_before(
    run_with_datacenter, planned, hybrid, own_part
):
    """Which only that datacenter has until then."""
    _, coordinator, _ = await run_with_datacenter(
        *planned([{"regime": "datacenter"}, hybrid]), "federated.local_steps=0"
    )
    before = coordinator.model.vector.clone()
    await coordinator.run()
    # Each datacenter round takes 0.05 off; the devices made no step.
    torch.testing.assert_close(coordinator.model.vector, before - 0.05 * (1 + own_part))


async def test_a_hybrid_round_merges_both_pseudo_gradients(run_with_datacenter):
    store, coordinator, _ = await run_with_datacenter(
        "strategy.policy=hybrid",
        "rounds=1",
        "strategy.datacenter_weight=0.25",
        "federated.local_steps=0",
    )
    before = coordinator.model.vector.clone()
    await coordinator.run()
    # The devices made no step, and the ranks took 0.05 off.
    torch.testing.assert_close(coordinator.model.vector, before - 0.25 * 0.05)
    (row,) = read_report(store).to_json()["rounds"]
    assert row["participants"]["accepted"] == 4
    assert row["cost"]["price"] == 3.5
    assert row["training"].keys() == {"federated", "datacenter"}


async def test_spilling_a_large_model_does_not_change_the_result(deployment, monkeypatch):
    """Sent from its checkpoint, or in the first round from a file, and with failures."""
    await deployment.start()
    deployment.faults["b"][2, 1] = "no power"
    _, final = await deployment.run("small")
    spills = []
    monkeypatch.setattr(model_publication, "LARGE_BYTES", 0)
    monkeypatch.setattr(mmap_buffer, "LARGE_BYTES", 0)
    spill = GlobalModel.spill
    monkeypatch.setattr(
        GlobalModel, "spill", lambda model, scratch: (spill(model, scratch), spills.append(1))
    )
    report, same = await deployment.run("large")
    assert same.model_sha256 == final.model_sha256
    assert [row["attempt"] for row in report["rounds"]] == [1, 2, 1]
    assert len(spills) == 4


async def test_a_plan_can_reset_the_optimizer(deployment, planned):
    await deployment.start()
    momentum = "strategy.server_optimizer.options={lr=1.0, momentum=0.9}"
    finals = []
    for name, plans in (
        ("kept", [{}, {}]),
        ("reset", [{}, {"reset_optimizer": True}]),
    ):
        _, final = await deployment.run(name, *planned(plans), momentum)
        finals.append(final.model_sha256)
    _, without = await deployment.run("plain", *planned([{}, {}]))
    assert finals[0] != finals[1] == without.model_sha256


async def test_a_plan_can_scale_the_step(deployment, planned, tmp_path):
    await deployment.start()
    steps = []
    for name, scale in (("whole", 1.0), ("half", 0.5)):
        store = deployment.create_run(name, *planned([{"step_scale": scale}]))
        await Coordinator(RunParts.of(store, deployment.link)).run()
        steps.append(stored_models(store)["model-000001.safetensors"] - initial_model(tmp_path))
    torch.testing.assert_close(steps[0] * 0.5, steps[1])
    assert steps[0].abs().max() > 0.01


async def test_a_round_records_the_norm_of_its_pseudo_gradient(deployment):
    await deployment.start()
    report, _ = await deployment.run("run", "rounds=1")
    (row,) = report["rounds"]
    assert row["norms"].keys() == {"federated"}
    assert row["norms"]["federated"] > 0
    assert row["cosine"] is None


async def test_a_datacenter_returns_its_model_only_where_the_server_needs_it(
    run_with_datacenter, planned
):
    plans = planned(
        [
            {"regime": "datacenter", "datacenter_steps": 10},
            {"regime": "datacenter", "keep": {"warm": "current"}},
            {"regime": "datacenter"},
            {"regime": "datacenter", "start": "warm"},
        ]
    )
    store, coordinator, datacenter = await run_with_datacenter(*plans)
    await coordinator.run()
    requests = training_requests(datacenter)
    assert [(request.from_step, request.until_step) for request in requests] == [
        (0, 10),
        (10, 60),
        (60, 110),
        (110, 160),
    ]
    assert [request.hand_back for request in requests] == [False, True, False, False]
    assert [request.HasField("model") for request in requests] == [True, False, False, True]
    report = read_report(store).to_json()
    assert [row["cost"]["price"] for row in report["rounds"]] == [0.1, 0.5, 0.5, 0.5]
    assert [bool(row["norms"]) for row in report["rounds"]] == [False, True, False, False]
    # The last round went from the model of the second one: 60 steps, and 50.
    start = coordinator.model.initial()
    torch.testing.assert_close(coordinator.model.vector, start - 0.110)


@pytest.mark.parametrize("sign", [1, -1])
async def test_projection_removes_the_part_that_opposes_the_devices(
    run_with_datacenter, planned, sign
):
    plans = planned(
        [
            {"regime": "hybrid", "merge": "weighted"},
            {"regime": "hybrid", "merge": "projected", "start": "initial"},
        ]
    )
    store, coordinator, datacenter = await run_with_datacenter(*plans)
    datacenter.rate = sign * torch.linspace(-0.001, 0.002, LAYOUT.size)
    await coordinator.run()
    start, ends = coordinator.model.initial(), stored_models(store)
    datacenter_step = 50 * datacenter.rate
    weighted = start - ends["model-000001.safetensors"]
    devices_step = (weighted - 0.25 * datacenter_step) / 0.75
    expected = 0.75 * devices_step + 0.25 * merge.remove_conflict(
        datacenter_step.clone(), devices_step
    )
    projected = start - ends["model-000002.safetensors"]
    torch.testing.assert_close(projected, expected, atol=1e-6, rtol=1e-4)
    weighted_row, projected_row = read_report(store).to_json()["rounds"]
    assert weighted_row["norms"] == pytest.approx(projected_row["norms"], rel=1e-3)
    assert weighted_row["norms"]["datacenter"] == pytest.approx(
        float(datacenter_step.norm()), rel=1e-4
    )
    assert (weighted_row["cosine"] < 0) == bool((projected - weighted).abs().max() > 1e-5)


@pytest.mark.parametrize("how", [(), (PLAIN,), BUFFERED], ids=["secure", "plain", "buffered"])
async def test_devices_add_the_weighted_gradient_of_the_datacenter(
    run_with_datacenter, planned, how
):
    """By hand: with plain descent at rate 0.1, a device goes 0.1 x weight x gradient further."""
    plans = planned(
        [
            {},
            {**TRANSFER, "start": "initial", "transfer_weight": 0.5, "datacenter_steps": 7},
            {**TRANSFER, "start": "initial"},
            {"regime": "datacenter"},
        ]
    )
    store, coordinator, datacenter = await run_with_datacenter(
        *plans, *how, "strategy.transfer_weight=0.25"
    )
    datacenter.gradient = torch.linspace(-2, 3, LAYOUT.size)
    models = {}

    def keep_model(event):
        if isinstance(event, RoundCommitted) and event.record.round < 4:
            path = store.directory / f"checkpoints/model-{event.record.round:06}.safetensors"
            models[event.record.round] = read_model(path)

    coordinator.events.subscribe(keep_model)
    # Each device gives one vector for one model; to compare several, it has to give them all.
    with disabled("another-vector-for-model"):
        await coordinator.run()
    for round_, weight in ((2, 0.5), (3, 0.25)):
        further = models[1] - models[round_]
        torch.testing.assert_close(
            further, 0.1 * weight * datacenter.gradient, atol=2e-6, rtol=1e-5
        )
    requests = gradient_requests(datacenter)
    assert [(request.from_step, request.until_step) for request in requests] == [(0, 7), (7, 57)]
    (trained,) = training_requests(datacenter)
    assert (trained.from_step, trained.HasField("model")) == (0, True)
    rows = read_report(store).to_json()["rounds"]
    assert [row["cost"]["price"] for row in rows] == pytest.approx([3, 3.07, 3.5, 0.5])
    assert [row["participants"]["accepted"] for row in rows] == [3, 4, 4, 1]
    assert rows[1]["norms"]["datacenter"] == pytest.approx(float(0.5 * datacenter.gradient.norm()))
    assert rows[1]["training"]["datacenter"] == {"loss": 1.0}
    devices = [row for row in rows[1]["receipts"] if row["regime"] == "federated"]
    # The gradient alone: they have the initial model from the first round.
    assert {device["bytes_out"] for device in devices} == {LAYOUT.nbytes}
