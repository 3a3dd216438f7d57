"""Runs whose devices keep a part of the model, on devices with real connections."""

import pytest
import torch
from safetensors import safe_open
from tests.server.deployment import Killed

from isthmus.errors import JobError
from isthmus.task.scoring import build_model
from isthmus_server.rounds.coordinator import Coordinator

SETTINGS = ("rounds=3", "federated.cohort=3", "exchange.personal=['bias']")


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_a_killed_run_continues_with_the_personal_states_of_its_rounds(deployment, secure):
    await deployment.start(names=tuple("abc"))
    settings = (*SETTINGS, f"federated.secure_aggregation={secure}")
    whole = deployment.create_run("whole", *settings)
    coordinator = Coordinator(whole, deployment.link)
    final = await coordinator.run()
    assert coordinator.model.layout.names == ("weight",)
    model = coordinator.model
    assert torch.equal(model.module.bias, build_model(model.task, model.seed).bias)
    with safe_open(final.model_path, framework="pt") as file:
        assert list(file.keys()) == ["weight"]

    store = deployment.create_run("killed", *settings)
    coordinator, commit = Coordinator(store, deployment.link), store.commit

    def die_at_commit(record, state):
        if record.round == 2:
            raise Killed
        commit(record, state)

    store.commit = die_at_commit
    with pytest.raises(Killed):
        await coordinator.run()
    continued = await Coordinator(deployment.reopen(store), deployment.link).run()
    assert continued.model_sha256 == final.model_sha256


async def test_what_cannot_be_kept_is_refused(deployment, make_job):
    with pytest.raises(JobError, match="which mode='buffered' does not have"):
        make_job("exchange.personal=['bias']", "federated.mode='buffered'")
    with pytest.raises(JobError, match=r"and none does; set evaluation\.devices"):
        make_job("federated.fine_tune_steps=3")
    with pytest.raises(JobError, match=r"datacenter\.ranks=2 would train without them"):
        make_job("exchange.buffers='local'", "datacenter.ranks=2")
