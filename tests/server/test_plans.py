"""What a plan can ask of a round, through the real coordinator and real agents."""

import hashlib

import pytest
import torch

from isthmus.errors import UserError
from isthmus.task import load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_server.model import merge
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.storage.events import RoundCommitted, RoundPlanned
from isthmus_server.views.report import read_report

LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})


@pytest.fixture
def planned(place, tmp_path):
    """Runs of a policy that goes through a list of answers; returns the store and the final row."""
    written = []

    def write(plans):
        module = f"plans_{tmp_path.name.replace('-', '_')}_{len(written)}"
        written.append(module)
        (tmp_path / f"{module}.py").write_text(
            "from isthmus_server.strategy import Plan\n"
            f"PLANS = {plans!r}\n"
            "WHAT = {'regime': 'federated', 'reason': 'it is planned'}\n"
            "class Mine:\n"
            "    def __init__(self, strategy): pass\n"
            "    def plan(self, seen):\n"
            "        return Plan(**{**WHAT, **PLANS[seen.round - 1]})\n"
        )
        return (f"strategy.policy={module}:Mine", f"rounds={len(plans)}")

    return write


def vectors(store):
    """Every model on disk."""
    return {
        path.name: LAYOUT.decode(bytearray(path.read_bytes()))
        for path in (store.directory / "checkpoints").glob("*.safetensors")
        if not path.name.startswith("optimizer")
    }


def initial(tmp_path):
    task = load_task("task.py:Learn", {}, base=tmp_path)
    return LAYOUT.gather(build_model(task, 0))


async def test_a_round_can_start_from_a_model_that_was_kept(place, planned, tmp_path):
    await place.listen()
    plans = planned(
        [
            {"keep": {"warm": "current"}},
            {},
            {},
            {"start": "warm", "keep": {"warm": ""}},
            {},
        ]
    )
    store = place.create("run", *plans)
    seen = {}

    def keep_models(event):
        if isinstance(event, RoundCommitted):
            seen[event.record.round] = vectors(store)

    coordinator = Coordinator(store, place.link)
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


async def test_a_mix_of_two_models_is_half_of_each(place, planned, tmp_path):
    await place.listen()
    plans = planned([{"keep": {"warm": "current"}}, {"start": "warm+initial"}])
    store = place.create("run", *plans, "federated.local_steps=0")
    coordinator = Coordinator(store, place.link)
    coordinator.model.vector.add_(1.0)  # so that the first round does not end where it began
    await coordinator.run()
    torch.testing.assert_close(coordinator.model.vector, initial(tmp_path) + 0.5)


async def test_the_optimizer_is_reset_where_a_plan_says_so(place, planned):
    await place.listen()
    momentum = "strategy.server_optimizer.options={lr=1.0, momentum=0.9}"
    finals = []
    for name, plans in (
        ("kept", [{}, {}]),
        ("reset", [{}, {"reset_optimizer": True}]),
    ):
        _, final = await place.run(name, *planned(plans), momentum)
        finals.append(final.model_sha256)
    _, without = await place.run("plain", *planned([{}, {}]))
    assert finals[0] != finals[1] == without.model_sha256


async def test_the_step_is_scaled(place, planned, tmp_path):
    await place.listen()
    moved = []
    for name, scale in (("whole", 1.0), ("half", 0.5)):
        store = place.create(name, *planned([{"step_scale": scale}]))
        await Coordinator(store, place.link).run()
        moved.append(vectors(store)["model-000001.safetensors"] - initial(tmp_path))
    torch.testing.assert_close(moved[0] * 0.5, moved[1])
    assert moved[0].abs().max() > 0.01


async def test_the_cohort_of_a_plan_wins(place, planned):
    await place.listen(names=tuple("abcdef"))
    report, _ = await place.run("run", *planned([{"cohort": 5}, {}]))
    assert [row["participants"]["invited"] for row in report["rounds"]] == [5, 3]
    assert [row["cost"]["price"] for row in report["rounds"]] == [5.0, 3.0]


async def test_rounds_say_how_far_they_went(place):
    await place.listen()
    report, _ = await place.run("run", "rounds=1")
    (row,) = report["rounds"]
    assert row["norms"].keys() == {"federated"}
    assert row["norms"]["federated"] > 0
    assert row["cosine"] is None


@pytest.mark.parametrize("at", [2, 3])
async def test_kept_models_and_the_served_average_survive_a_crash(place, planned, at):
    await place.listen()
    plans = planned([{"keep": {"warm": "served"}}, {}, {"start": "warm"}, {}])
    settings = (*plans, "strategy.served_average=0.9")
    whole, final = await place.run("whole", *settings)

    store = place.create("killed", *settings)
    again = await place.killed(Coordinator(store, place.link), RoundCommitted, at)
    resumed = await Coordinator(again, place.link).run()
    assert resumed.model_sha256 == final.model_sha256
    shas = [row["model_sha256"] for row in read_report(again).to_json()["rounds"]]
    assert shas == [row["model_sha256"] for row in whole["rounds"]]


async def test_the_served_average_is_evaluated_and_handed_out(place):
    await place.listen()
    store = place.create("run", "strategy.served_average=0.9")
    coordinator = Coordinator(store, place.link)
    final = await coordinator.run()
    written = (store.directory / "model.safetensors").read_bytes()
    assert final.model_sha256 == hashlib.sha256(written).hexdigest()
    assert final.model_sha256 == coordinator.model.served_sha256 != coordinator.model.sha256
    assert final.metrics == read_report(store).to_json()["rounds"][-1]["metrics"]
    torch.testing.assert_close(LAYOUT.decode(bytearray(written)), coordinator.model.served_vector)


# -- with a datacenter ---------------------------------------------------------------------------


async def test_a_datacenter_round_hands_back_what_the_server_needs(with_ranks, planned):
    plans = planned(
        [
            {"regime": "datacenter", "datacenter_steps": 10},
            {"regime": "datacenter", "keep": {"warm": "current"}},
            {"regime": "datacenter"},
            {"regime": "datacenter", "start": "warm"},
        ]
    )
    store, coordinator, ranks = await with_ranks(*plans)
    await coordinator.run()
    work = [request.train_steps for request in ranks.asked if request.HasField("train_steps")]
    assert [(one.from_step, one.until_step) for one in work] == [
        (0, 10),
        (10, 60),
        (60, 110),
        (110, 160),
    ]
    assert [one.hand_back for one in work] == [False, True, False, False]
    assert [one.HasField("model") for one in work] == [True, False, False, True]
    report = read_report(store).to_json()
    assert [row["cost"]["price"] for row in report["rounds"]] == [0.1, 0.5, 0.5, 0.5]
    assert [bool(row["norms"]) for row in report["rounds"]] == [False, True, False, False]
    # The last round went from the model of the second one: 60 steps, and 50.
    start = coordinator.model.initial()
    torch.testing.assert_close(coordinator.model.vector, start - 0.110)


async def test_with_a_served_average_the_datacenter_hands_back(with_ranks):
    store, coordinator, ranks = await with_ranks(
        "strategy.policy=datacenter", "strategy.served_average=0.5", "rounds=2"
    )
    start = coordinator.model.initial()
    await coordinator.run()
    work = [request.train_steps for request in ranks.asked if request.HasField("train_steps")]
    assert [(one.hand_back, one.evaluate) for one in work] == [(True, False)] * 2
    assert [one.HasField("model") for one in work] == [True, False]
    torch.testing.assert_close(coordinator.model.served_vector, start - 0.075)
    assert read_report(store).to_json()["rounds"][1]["metrics"].keys() == {"loss", "accuracy"}


@pytest.mark.parametrize("sign", [1, -1])
async def test_projecting_takes_out_what_points_against_the_fleet(with_ranks, planned, sign):
    plans = planned(
        [
            {"regime": "hybrid", "merge": "weighted"},
            {"regime": "hybrid", "merge": "projected", "start": "initial"},
        ]
    )
    store, coordinator, ranks = await with_ranks(*plans)
    ranks.rate = sign * torch.linspace(-0.001, 0.002, LAYOUT.size)
    await coordinator.run()
    start, ends = coordinator.model.initial(), vectors(store)
    theirs = 50 * ranks.rate
    weighted = start - ends["model-000001.safetensors"]
    fleet = (weighted - 0.25 * theirs) / 0.75
    expected = 0.75 * fleet + 0.25 * merge.remove_conflict(theirs.clone(), fleet)
    projected = start - ends["model-000002.safetensors"]
    torch.testing.assert_close(projected, expected, atol=1e-6, rtol=1e-4)
    one, other = read_report(store).to_json()["rounds"]
    assert one["norms"] == pytest.approx(other["norms"], rel=1e-3)
    assert one["norms"]["datacenter"] == pytest.approx(float(theirs.norm()), rel=1e-4)
    assert (one["cosine"] < 0) == bool((projected - weighted).abs().max() > 1e-5)


# -- one-way gradient transfer --------------------------------------------------------------------

TRANSFER = {"regime": "hybrid", "merge": "transfer"}


def gradients_of(ranks):
    """The gradients that a datacenter was asked for."""
    return [request.mean_gradient for request in ranks.asked if request.HasField("mean_gradient")]


PLAIN = "federated.secure_aggregation=false"
BUFFERED = (PLAIN, "federated.mode=buffered", "federated.buffer={concurrency=3}")


@pytest.mark.parametrize("how", [(), (PLAIN,), BUFFERED], ids=["secure", "plain", "buffered"])
async def test_devices_take_the_datacenters_gradient_along(with_ranks, planned, how):
    """By hand: with plain descent at rate 0.1, a device goes 0.1 x weight x gradient further."""
    plans = planned(
        [
            {},
            {**TRANSFER, "start": "initial", "transfer_weight": 0.5, "datacenter_steps": 7},
            {**TRANSFER, "start": "initial"},
            {"regime": "datacenter"},
        ]
    )
    store, coordinator, ranks = await with_ranks(*plans, *how, "strategy.transfer_weight=0.25")
    ranks.gradient = torch.linspace(-2, 3, LAYOUT.size)
    seen = {}

    def keep_model(event):
        if isinstance(event, RoundCommitted) and event.record.round < 4:
            path = store.directory / f"checkpoints/model-{event.record.round:06}.safetensors"
            seen[event.record.round] = LAYOUT.decode(bytearray(path.read_bytes()))

    coordinator.events.subscribe(keep_model)
    await coordinator.run()
    for round_, weight in ((2, 0.5), (3, 0.25)):
        further = seen[1] - seen[round_]
        torch.testing.assert_close(further, 0.1 * weight * ranks.gradient, atol=2e-6, rtol=1e-5)
    asked = gradients_of(ranks)
    assert [(one.from_step, one.until_step) for one in asked] == [(0, 7), (7, 57)]
    (trained,) = [one.train_steps for one in ranks.asked if one.HasField("train_steps")]
    assert (trained.from_step, trained.HasField("model")) == (0, True)
    rows = read_report(store).to_json()["rounds"]
    assert [row["cost"]["price"] for row in rows] == pytest.approx([3, 3.07, 3.5, 0.5])
    assert [row["participants"]["accepted"] for row in rows] == [3, 4, 4, 1]
    assert rows[1]["norms"]["datacenter"] == pytest.approx(float(0.5 * ranks.gradient.norm()))
    assert rows[1]["training"]["datacenter"] == {"loss": 1.0}
    devices = [row for row in rows[1]["receipts"] if row["regime"] == "federated"]
    assert {device["bytes_out"] for device in devices} == {2 * LAYOUT.nbytes}


async def test_a_run_with_transfers_goes_on_after_a_crash(with_ranks, planned, place):
    plans = planned([TRANSFER, TRANSFER])
    _, coordinator, ranks = await with_ranks(*plans)
    ranks.gradient = torch.linspace(-2, 3, LAYOUT.size)
    final = await coordinator.run()

    store = place.create("killed", *plans, "federated.clients=3", "datacenter.ranks=1")
    again = await place.killed(Coordinator(store, place.link), RoundPlanned, 2)
    resumed = await Coordinator(again, place.link).run()
    assert resumed.model_sha256 == final.model_sha256
    assert [one.from_step for one in gradients_of(ranks)] == [0, 50, 0, 50]


async def test_no_device_is_asked_where_there_is_no_gradient(with_ranks, planned):
    store, coordinator, ranks = await with_ranks(*planned([TRANSFER]), "attempts=1")
    ranks.gradient = torch.full((LAYOUT.size,), float("nan"))
    with pytest.raises(UserError, match="its gradient is not finite"):
        await coordinator.run()
    (row,) = read_report(store).to_json()["failed_attempts"]
    assert [receipt["participant"] for receipt in row["receipts"]] == ["dc"]
