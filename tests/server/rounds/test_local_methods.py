"""FedProx and FedNova against loops written by hand, as whole runs."""

import pytest
import torch
from safetensors.torch import load_file

from isthmus.errors import JobError
from isthmus.task import Participant, load_task
from isthmus.task.scoring import build_model
from isthmus_clients.training.example_order import local_seed, number

RAGGED = """
def local_data(self, participant):
    return rows({"a": 5, "b": 13, "c": 40}[participant.name], seed=sum(participant.name.encode()))
"""
LR = 0.3
COMMON = (
    f"task.settings.lr={LR}",
    "federated.batch_size=4",
    "federated.local_epochs=2",
    "rounds=2",
)


def shuffled(count, seed):
    """The examples of each step of two epochs, four in a step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        yield from torch.randperm(count, generator=generator).split(4)


def trained(model, data, batches, mu):
    """The parameters after plain SGD on loss + mu/2 |w - w_round|^2, and the number of steps."""
    anchor = [parameter.detach().clone() for parameter in model.parameters()]
    inputs, target = data.tensors
    steps = 0
    for batch in batches:
        steps += 1
        loss = torch.nn.functional.cross_entropy(model(inputs[batch]), target[batch])
        for parameter, start in zip(model.parameters(), anchor, strict=True):
            loss = loss + mu / 2 * ((parameter - start) ** 2).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= LR * gradient
    return [parameter.detach().clone() for parameter in model.parameters()], steps


def by_hand(job, folder, *, mu=0.0, effective_steps=None):
    """The model after the job's rounds: local SGD, and the mean of FedAvg or FedNova."""
    task = load_task(job.task.source, dict(job.task.settings), base=folder)
    model = build_model(task, job.seed)
    for round_ in range(1, job.rounds + 1):
        start = [parameter.detach().clone() for parameter in model.parameters()]
        changes = [torch.zeros_like(each) for each in start]
        total = 0
        for name in "abc":
            data = task.local_data(Participant(name=name, regime="federated"))
            seed = number(local_seed(job.seed, round_, name))
            end, steps = trained(model, data, shuffled(len(data), seed), mu)
            scale = 1.0 if effective_steps is None else effective_steps / steps
            for change, before, after in zip(changes, start, end, strict=True):
                change += len(data) * scale * (before - after)
            total += len(data)
            with torch.no_grad():
                for parameter, before in zip(model.parameters(), start, strict=True):
                    parameter.copy_(before)
        with torch.no_grad():
            for parameter, change in zip(model.parameters(), changes, strict=True):
                parameter -= change / total
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("secure", ["false", "true"])
@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ("federated.proximal=0", {}),
        ("federated.proximal=0.7", {"mu": 0.7}),
        ("federated.normalized_steps=7", {"effective_steps": 7}),
    ],
)
async def test_a_run_gives_the_model_of_the_loop(deployment, tmp_path, secure, setting, options):
    await deployment.start(RAGGED)
    overrides = (*COMMON, setting, f"federated.secure_aggregation={secure}")
    store = deployment.create_run("described", *overrides)
    expected = by_hand(store.job, tmp_path, **options)
    await deployment.run("run", *overrides)
    found = load_file(tmp_path / "run/model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["federated.local_steps=4"], r"normalized_steps=5 is for devices whose numbers of steps"),
        (
            ["federated.privacy={epsilon=8.0,delta=1e-6,clip=1.0,examples=100}"],
            r"federated\.normalized_steps divides by a device's steps, which follow from",
        ),
        (["federated.flower.app=app.py:app"], r"normalized_steps has no effect on flower\.app"),
    ],
)
def test_where_normalized_steps_would_mislead_they_are_refused(make_job, overrides, sentence):
    with pytest.raises(JobError, match=sentence):
        make_job("federated.normalized_steps=5", *overrides)
