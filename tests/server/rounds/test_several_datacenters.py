"""Rounds in which a plan weighs several datacenters."""

import pytest
import torch
from tests.privacy.mutation import disabled
from tests.server.deployment import SimulatedDatacenter
from tests.server.rounds.policies import TRANSFER
from tests.server.rounds.results import (
    LAYOUT,
    gradient_requests,
    stored_models,
    training_requests,
)

from isthmus.errors import IsthmusError, JobError, TaskError
from isthmus.wire import link_pb2
from isthmus_server.read.report.report import read_report

PLAIN = "federated.secure_aggregation=false"
SECURE = "federated.secure_aggregation=true"
FAR, NEAR = torch.linspace(-2, 3, LAYOUT.size), torch.linspace(0.1, -0.1, LAYOUT.size)


@pytest.fixture
def run_with_two(run_with_datacenter, network, planned):
    """A run with three devices and the datacenters `dc` and `east`, which are ready in round 2."""

    async def run_with_two(plans, *overrides):
        keys = planned([{}, *plans])
        store, coordinator, dc = await run_with_datacenter(*keys, "rounds=9", *overrides)
        east = SimulatedDatacenter(coordinator.model.layout)
        await network.join("east", lambda *work: east.respond(*work), role=link_pb2.DATACENTER)
        dc.gradient, east.gradient = FAR.clone(), NEAR.clone()
        return store, coordinator, dc, east

    return run_with_two


@pytest.mark.parametrize("aggregation", [PLAIN, SECURE])
async def test_each_gradient_is_measured_and_has_its_own_weight(run_with_two, aggregation):
    """By hand: with plain descent at rate 0.1, devices go 0.1 x the weighted gradients further."""
    weighed = {**TRANSFER, "start": "initial", "measure_gradients": True}
    plans = [
        {**weighed, "datacenter_weights": {"dc": 0.5, "east": 0.25}},
        {**weighed, "datacenter_weights": {"dc": 0.0, "east": 0.25}},
        {**weighed, "transfer_weight": 0.25, "measure_gradients": False},
    ]
    keeps = [{**plan, "keep": {f"end{at}": "current"}} for at, plan in enumerate(plans)]
    first = {"start": "initial", "keep": {"plain": "current"}}
    store, coordinator, dc, east = await run_with_two([first, *keeps], aggregation, "rounds=5")
    # Each device gives one vector for one model; to compare several, it has to give them all.
    with disabled("another-vector-for-model"):
        await coordinator.run()
    ends = stored_models(store)
    of_round = {round_: ends[f"model-{round_:06}.safetensors"] for round_ in range(2, 6)}
    gradients = {3: (0.5 * FAR + 0.25 * NEAR) / 2, 4: 0.25 * NEAR, 5: 0.25 * (FAR + NEAR) / 2}
    for round_, gradient in gradients.items():
        further = of_round[2] - of_round[round_]
        torch.testing.assert_close(further, 0.1 * gradient, atol=2e-5, rtol=1e-5)
    measured = read_report(store).rounds[2].gradients
    assert measured.datacenter_norm == pytest.approx(float((FAR + NEAR).norm()) / 2, rel=1e-6)
    for name, gradient in (("dc", FAR), ("east", NEAR)):
        assert measured.datacenters[name].norm == pytest.approx(float(gradient.norm()), rel=1e-6)
        assert measured.datacenters[name].examples == 1
    both = [each.cosine * each.norm / 2 for each in measured.datacenters.values()]
    assert sum(both) == pytest.approx(measured.cosine * measured.datacenter_norm, rel=1e-4)
    # One that is left out is measured, and asked for nothing if nothing is measured.
    assert (len(gradient_requests(dc)), len(gradient_requests(east))) == (3, 3)
    assert read_report(store).rounds[3].gradients.datacenters.keys() == {"dc", "east"}


async def test_parallel_training_has_a_weight_for_each_datacenter(run_with_two):
    parallel = {"regime": "hybrid", "merge": "weighted", "start": "initial"}
    plans = [
        {"start": "initial", "keep": {"a": "current"}},
        {**parallel, "datacenter_weights": {"dc": 0.5, "east": 0.1}, "keep": {"b": "current"}},
        {**parallel, "datacenter_weights": {"dc": 0.0}, "keep": {"c": "current"}},
    ]
    store, coordinator, dc, east = await run_with_two(
        plans, PLAIN, "rounds=4", "strategy.datacenter_weight=0.25"
    )
    dc.rate, east.rate = 0.001, -0.002
    await coordinator.run()
    start, ends = coordinator.model.initial(), stored_models(store)
    devices = start - ends["model-000002.safetensors"]
    for round_, datacenters, share in (
        (3, (0.5 * 50 * 0.001 + 0.1 * 50 * -0.002) / 2, 0.3),
        (4, 0.25 * 50 * -0.002, 0.25),
    ):
        expected = (1 - share) * devices + datacenters
        torch.testing.assert_close(start - ends[f"model-{round_:06}.safetensors"], expected)
    assert (len(training_requests(dc)), len(training_requests(east))) == (1, 2)


@pytest.mark.parametrize(
    ("weights", "more", "sentence"),
    [
        ({"west": 1.0}, TRANSFER, "weighs 'west', where the connected datacenters are: dc, east"),
        ({"dc": -1.0}, TRANSFER, "weight of the datacenter 'dc' is not a number from 0"),
        ({"dc": "much"}, TRANSFER, "weight of the datacenter 'dc' is not a number from 0"),
        ({"dc": 2.0}, {"regime": "hybrid"}, "'dc' is not a number from 0 to 1"),
        ({"dc": 1.0}, {}, "weighs datacenters in a round without one"),
        ({"dc": 0, "east": 0}, TRANSFER, "gives the weight 0 to each connected datacenter"),
    ],
)
async def test_weights_that_cannot_be_used_are_refused(run_with_two, weights, more, sentence):
    _, coordinator, *_ = await run_with_two([{**more, "datacenter_weights": weights}], PLAIN)
    with pytest.raises(JobError, match=sentence):
        await coordinator.run()


async def test_a_plan_is_tried_again_if_the_only_datacenter_of_it_has_left(run_with_two, network):
    weights = {"dc": 0.0, "east": 0.5}
    _, coordinator, _, east = await run_with_two(
        [{**TRANSFER, "datacenter_weights": weights}], PLAIN, "rounds=2"
    )
    respond = east.respond

    async def leave(participant, request, model):
        if request.HasField("mean_gradient"):
            coordinator.roster.datacenters.pop("east")
            raise TaskError("it is switched off")
        return await respond(participant, request, model)

    east.respond = leave
    with pytest.raises(IsthmusError, match=r"weight 0 to each datacenter that is ready \(dc\)"):
        await coordinator.run()
