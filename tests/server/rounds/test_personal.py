"""Runs with a table [exchange]: devices keep a part of the model; statistics are recomputed."""

import pytest
import torch
from safetensors import safe_open
from tests.server.deployment import Killed, SimulatedDatacenter

from isthmus.errors import CannotContinue, JobError
from isthmus.task.scoring import build_model
from isthmus.wire import link_pb2
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts

SETTINGS = ("rounds=3", "federated.cohort=3", "exchange.personal=['bias']")


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_a_killed_run_continues_with_the_personal_states_of_its_rounds(deployment, secure):
    await deployment.start(names=tuple("abc"))
    settings = (*SETTINGS, f"federated.secure_aggregation={secure}")
    whole = deployment.create_run("whole", *settings)
    coordinator = Coordinator(RunParts.of(whole, deployment.link))
    final = await coordinator.run()
    assert coordinator.model.layout.names == ("weight",)
    model = coordinator.model
    assert torch.equal(model.module.bias, build_model(model.task, whole.job.seed).bias)
    with safe_open(final.model_path, framework="pt") as file:
        assert list(file.keys()) == ["weight"]

    store = deployment.create_run("killed", *settings)
    coordinator, commit = Coordinator(RunParts.of(store, deployment.link)), store.commit

    def die_at_commit(record, state):
        if record.round == 2:
            raise Killed
        commit(record, state)

    store.commit = die_at_commit
    with pytest.raises(Killed):
        await coordinator.run()
    continued = await Coordinator(RunParts.of(deployment.reopen(store), deployment.link)).run()
    assert continued.model_sha256 == final.model_sha256


async def test_what_cannot_be_kept_is_refused(deployment, make_job):
    with pytest.raises(JobError, match="which mode='buffered' does not have"):
        make_job("exchange.personal=['bias']", "federated.mode='buffered'")
    with pytest.raises(JobError, match="and there are none; set"):
        make_job("federated.personal_steps=3")
    with pytest.raises(JobError, match="leaves none of local_steps=3"):
        make_job(SETTINGS[-1], "federated.personal_steps=3", "federated.local_steps=3")
    with pytest.raises(JobError, match=r"and none does; set evaluation\.devices"):
        make_job("federated.fine_tune_steps=3")
    with pytest.raises(JobError, match=r"datacenter\.ranks=2 would train without them"):
        make_job("exchange.buffers='local'", "datacenter.ranks=2")


NORMALISED = """
def model(self):
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
"""


async def test_a_datacenter_computes_the_running_statistics_of_a_round(deployment, network):
    await deployment.start(NORMALISED, names=tuple("abc"))
    settings = ("datacenter.ranks=1", "exchange.buffers='recompute'", "rounds=2", "attempts=1")
    store = deployment.create_run("run", *settings)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    model = coordinator.model
    datacenter = SimulatedDatacenter(model.layout)
    trained = model.layout.trained_size
    datacenter.gradient[trained:] = torch.linspace(1, 2, 6)
    await network.join("dc", datacenter.respond, role=link_pb2.DATACENTER)
    final = await coordinator.run()
    with safe_open(final.model_path, framework="pt") as file:
        assert torch.equal(file.get_tensor("1.running_var"), datacenter.gradient[-3:])
    asked = [each.mean_gradient for each in datacenter.requests if each.HasField("mean_gradient")]
    assert [(each.round, each.statistics) for each in asked] == [(1, True), (2, True)]
    receipts = {each.participant for each in read_report(store).rounds[-1].receipts}
    assert receipts == {"a", "b", "c", "dc"}


async def test_without_a_datacenter_no_statistics_can_be_computed(deployment, make_job):
    recompute = "exchange.buffers='recompute'"
    with pytest.raises(JobError, match=r"set datacenter\.ranks, or use buffers = 'average'"):
        make_job("federated.clients=3", recompute)
    await deployment.start(NORMALISED, names=tuple("abc"))
    store = deployment.create_run("run", "federated.clients=0", recompute, "attempts=1")
    with pytest.raises(CannotContinue, match="and no datacenter is connected; start one"):
        await Coordinator(RunParts.of(store, deployment.link)).run()
