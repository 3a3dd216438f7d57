"""Rounds in which devices and datacenters measure their gradients at the round's model."""

import asyncio
import math

import pytest
import torch
from tests.server.deployment import SimulatedDatacenter
from tests.server.rounds.policies import TRANSFER
from tests.server.rounds.results import LAYOUT, gradient_requests

from isthmus.errors import JobError
from isthmus.task import Participant, load_task
from isthmus.task.scoring import build_model
from isthmus.wire import link_pb2
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundPlanned

MEASURED = {"regime": "federated", "measure_gradients": True}
PLAIN = "federated.secure_aggregation=false"
SECURE = "federated.secure_aggregation=true"


def devices_gradient(folder, names="abc"):
    """The mean gradient of the loss over all examples of the devices, at the initial model."""
    task = load_task("task.py:Learn", {}, base=folder)
    model = build_model(task, 0)
    losses = []
    for name in names:
        data = task.local_data(Participant(name=name, regime="federated"))
        losses.append(task.loss(task.forward(model, data.tensors[0]), data.tensors[1]).mean())
    torch.stack(losses).mean().backward()
    gradient = torch.zeros(LAYOUT.size)
    for name, part in LAYOUT.parts(gradient):
        part.copy_(dict(model.named_parameters())[name].grad)
    return gradient


@pytest.mark.parametrize(
    ("aggregation", "plan"),
    [
        (PLAIN, MEASURED),
        (SECURE, MEASURED),
        (SECURE, {**MEASURED, **TRANSFER}),
        (PLAIN, {**MEASURED, "regime": "hybrid"}),
    ],
)
async def test_both_gradients_are_measured_at_the_model_that_the_round_starts_from(
    run_with_datacenter, planned, tmp_path, aggregation, plan
):
    plans = planned([{**plan, "datacenter_steps": 7}])
    store, coordinator, datacenter = await run_with_datacenter(aggregation, *plans)
    datacenter.gradient = torch.linspace(-0.2, 0.3, LAYOUT.size)
    await coordinator.run()
    (record,) = read_report(store).rounds
    measured, own = record.gradients, devices_gradient(tmp_path)
    assert measured.devices_norm == pytest.approx(float(own.norm()), rel=1e-3)
    assert measured.datacenter_norm == pytest.approx(float(datacenter.gradient.norm()), rel=1e-6)
    cosine = torch.cosine_similarity(own, datacenter.gradient, dim=0)
    assert measured.cosine == pytest.approx(float(cosine), abs=1e-3)
    assert (measured.examples, measured.lost) == (60, pytest.approx(0.0, abs=1e-6))
    assert [(r.from_step, r.until_step) for r in gradient_requests(datacenter)] == [(0, 7)]
    assert record.as_past_round().gradients == measured


@pytest.mark.parametrize(
    ("regime", "price"),
    [("federated", 3 + 0.5), ("transfer", 3 + 0.5), ("weighted", 3 + 1.0)],
)
async def test_the_price_and_the_receipts_have_the_work_for_the_gradient(
    run_with_datacenter, planned, regime, price
):
    plan = MEASURED if regime == "federated" else {**MEASURED, "regime": "hybrid", "merge": regime}
    store, coordinator, _ = await run_with_datacenter(PLAIN, *planned([plan]))
    await coordinator.run()
    (record,) = read_report(store).rounds
    assert record.cost.price == price
    assert [receipt.participant for receipt in record.receipts] == ["dc", "a", "b", "c"]
    assert record.receipts[0].steps == (100 if regime == "weighted" else 50)
    devices = [receipt for receipt in record.receipts if receipt.regime == "federated"]
    assert {receipt.bytes_in for receipt in devices} == {LAYOUT.gradient_and_update.nbytes}
    sent = 2 if regime == "transfer" else 1
    assert {receipt.bytes_out for receipt in devices} == {sent * LAYOUT.nbytes}


async def test_a_measurement_does_not_change_the_model(deployment, planned):
    """In plaintext, where no rounding depends on the position of an element."""
    await deployment.start()
    shas = []
    for name, plan in (("measured", MEASURED), ("plain", {"regime": "federated"})):
        report, final = await deployment.run(name, PLAIN, *planned([plan]))
        shas.append(final.model_sha256)
        assert (report["rounds"][0]["gradients"] is not None) == (name == "measured")
    assert shas[0] == shas[1]
    # Without a datacenter only the devices' norm is known.
    assert (await measured_alone(deployment, planned)).cosine is None


async def measured_alone(deployment, planned):
    store = deployment.create_run("alone", SECURE, *planned([MEASURED]))
    await Coordinator(RunParts.of(store, deployment.link)).run()
    return read_report(store).rounds[0].gradients


async def test_a_resumed_run_has_the_measurements_and_the_same_scale(deployment, planned, tmp_path):
    await deployment.start()
    plans = planned([MEASURED, {"regime": "federated"}, MEASURED])
    uninterrupted, final = await deployment.run("whole", SECURE, *plans)
    store = deployment.create_run("killed", SECURE, *plans)
    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), RoundPlanned, 3
    )
    assert [past.gradients is not None for past in again.run_state().history] == [True, False]
    assert (
        await Coordinator(RunParts.of(again, deployment.link)).run()
    ).model_sha256 == final.model_sha256
    rounds = read_report(again).to_json()["rounds"]
    assert [row["gradients"] for row in rounds] == [
        row["gradients"] for row in uninterrupted["rounds"]
    ]
    first, _, last = (row["gradients"] for row in rounds)
    assert first["scale"] == 0.25  # nothing is known of the gradients
    assert first["devices_norm"] == pytest.approx(
        float(devices_gradient(tmp_path).norm()), rel=0.01
    )
    assert last["scale"] == 2 ** math.floor(-math.log2(first["devices_norm"]))


async def test_the_measurement_does_not_depend_on_the_scale_of_the_loss(
    deployment, network, planned, tmp_path
):
    """Ten times the loss with a tenth of the learning rate is the same training."""
    measured = []
    await deployment.start(
        "def loss(self, output, target):\n"
        "    return self.settings.get('times', 1) * super().loss(output, target)"
    )
    for times, name in ((1, "one"), (10, "ten"), (1, "reordered")):
        store = deployment.create_run(
            name,
            SECURE,
            *planned([MEASURED]),
            "federated.clients=3",
            f"task.settings={{times={times}, lr={0.1 / times}}}",
        )
        coordinator = Coordinator(RunParts.of(store, deployment.link))
        if name == "one":
            datacenter = SimulatedDatacenter(coordinator.model.layout)
            await network.join("dc", datacenter.respond, role=link_pb2.DATACENTER)
        datacenter.gradient = times * torch.linspace(-0.2, 0.3, LAYOUT.size)
        if name == "reordered":
            deployment.before_training = Descending().wait
        await coordinator.run()
        measured.append(read_report(store).rounds[0].gradients)
    one, ten, reordered = measured
    assert ten.cosine == pytest.approx(one.cosine, abs=2e-3)
    assert ten.devices_norm / ten.datacenter_norm == pytest.approx(
        one.devices_norm / one.datacenter_norm, rel=1e-3
    )
    assert ten.devices_norm == pytest.approx(10 * one.devices_norm, rel=1e-3)
    assert reordered == one


class Descending:
    """Lets three devices train in the opposite order of their requests."""

    def __init__(self):
        self.waiting = []

    async def wait(self):
        turn = asyncio.Event()
        self.waiting.append(turn)
        if len(self.waiting) == 3:
            self.waiting[-1].set()
        await turn.wait()
        if self.waiting[0] is not turn:
            self.waiting[self.waiting.index(turn) - 1].set()


async def test_a_gradient_that_is_clipped_is_measured_with_another_scale_next(deployment, planned):
    await deployment.start(
        "def loss(self, output, target):\n    return 1e4 * super().loss(output, target)"
    )
    plans = planned([MEASURED, MEASURED])
    clipped = ("federated.clip=4", "task.settings={lr=1e-5}")
    report, _ = await deployment.run("run", SECURE, *clipped, *plans)
    first, second = (row["gradients"] for row in report["rounds"])
    assert first["lost"] > 0.5
    assert (first["devices_norm"], first["cosine"]) == (None, None)
    assert second["scale"] < first["scale"] / 64
    assert second["devices_norm"] > 1000
    assert second["lost"] < 1e-6


async def test_a_device_without_a_finite_gradient_takes_part_with_a_weight_of_0(
    deployment, planned
):
    """As with an update that is not finite: the sum tells only how many devices did."""
    await deployment.start(
        """
        def local_data(self, participant):
            data = rows(20, seed=sum(participant.name.encode()))
            if participant.name == "b":
                data.tensors[0].fill_(float("inf"))
            return data
        """,
        names=("a", "b", "c", "d"),
    )
    report, _ = await deployment.run(
        "run", SECURE, "federated.cohort=4", "federated.local_steps=0", *planned([MEASURED])
    )
    (row,) = report["rounds"]
    assert row["training"]["federated"]["unusable"] == 0  # no step, so no gradient either
    report, _ = await deployment.run("with", SECURE, "federated.cohort=4", *planned([MEASURED]))
    (row,) = report["rounds"]
    assert row["training"]["federated"]["unusable"] == 1
    assert row["gradients"]["examples"] == 60


@pytest.mark.parametrize(
    ("settings", "plan", "sentence"),
    [
        ((PLAIN, "federated.mode=buffered"), MEASURED, "devices cannot do that"),
        ((), {**MEASURED, "regime": "datacenter"}, "in a round without devices"),
    ],
)
async def test_a_measurement_that_is_not_possible_is_refused(
    deployment, planned, settings, plan, sentence
):
    await deployment.start()
    with pytest.raises(JobError, match=sentence):
        await deployment.run("run", *settings, *planned([plan]))
