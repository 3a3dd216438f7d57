"""SCAFFOLD against a loop written by hand, as whole runs."""

import pytest
import torch
from safetensors.torch import load_file

from isthmus.errors import JobError
from isthmus.task import Participant, load_task
from isthmus.task.scoring import build_model
from isthmus_clients.training.example_order import local_seed, number
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.gradient_transfer import GradientTransfer
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundCommitted
from isthmus_server.storage.records import RoundRecord

# Each device has its own classes, so that their gradients differ at every model.
DIFFERENT = """
def local_data(self, participant):
    number = "abcd".index(participant.name)
    data = rows([5, 13, 40, 8][number], seed=number)
    data.tensors[1].fill_(number % 3)
    return data
"""
LR = 0.3
CONTROLLED = (
    "federated.control_variates=3",
    "federated.secure_aggregation=false",
    f"task.settings.lr={LR}",
    "federated.batch_size=4",
    "federated.local_epochs=2",
    "rounds=3",
)


def batches(count, seed):
    """The examples of each step of two epochs, four in a step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        yield from torch.randperm(count, generator=generator).split(4)


def by_hand(job, folder, cohorts, devices):
    """The model after rounds of these devices, by algorithm 1 of the paper with option II."""
    task = load_task(job.task.source, dict(job.task.settings), base=folder)
    model = build_model(task, job.seed)
    parameters = list(model.parameters())
    server = [torch.zeros_like(each) for each in parameters]
    own = {name: [torch.zeros_like(each) for each in parameters] for name in "abcd"}
    for round_, cohort in enumerate(cohorts, 1):
        start = [parameter.detach().clone() for parameter in parameters]
        updates = [torch.zeros_like(each) for each in start]
        changes = [torch.zeros_like(each) for each in start]
        for name in cohort:
            with torch.no_grad():
                for parameter, before in zip(parameters, start, strict=True):
                    parameter.copy_(before)
            inputs, target = task.local_data(Participant(name=name, regime="federated")).tensors
            steps = 0
            for batch in batches(len(target), number(local_seed(job.seed, round_, name))):
                steps += 1
                loss = torch.nn.functional.cross_entropy(model(inputs[batch]), target[batch])
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    for index, parameter in enumerate(parameters):
                        correction = server[index] - own[name][index]
                        parameter -= LR * (gradients[index] + correction)
            for index, parameter in enumerate(parameters):
                moved = start[index] - parameter.detach()
                after = own[name][index] - server[index] + moved / (steps * LR)
                updates[index] += moved / len(cohort)
                changes[index] += (after - own[name][index]) / len(cohort)
                own[name][index] = after
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                parameter.copy_(start[index] - updates[index])
                server[index] += len(cohort) / devices * changes[index]
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def cohorts_of(store):
    """The devices whose updates counted, round by round."""
    return [
        [each.participant for each in record.receipts if each.status == "accepted"]
        for record in store.attempts()
        if isinstance(record, RoundRecord)
    ]


def check_model(folder, expected):
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=1e-6)


async def test_a_run_gives_the_model_of_the_loop(deployment, tmp_path):
    await deployment.start(DIFFERENT)
    store = deployment.create_run("run", *CONTROLLED)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    check_model(tmp_path / "run", by_hand(store.job, tmp_path, ["abc"] * 3, 3))


async def test_devices_that_are_not_in_every_round(deployment, tmp_path):
    await deployment.start(DIFFERENT, names=("a", "b", "c", "d"))
    settings = ("federated.control_variates=7", "federated.cohort=2", "federated.quorum=2")
    store = deployment.create_run("run", *CONTROLLED, *settings, "rounds=5")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    cohorts = cohorts_of(store)
    assert len({tuple(sorted(each)) for each in cohorts}) > 1
    check_model(tmp_path / "run", by_hand(store.job, tmp_path, cohorts, 7))


async def test_a_failed_attempt_and_a_killed_server_change_nothing(deployment, tmp_path):
    await deployment.start(DIFFERENT)
    await deployment.run("undisturbed", *CONTROLLED)
    deployment.faults["a"][2, 1] = "the disk is full"
    store = deployment.create_run("run", *CONTROLLED)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    again = await deployment.run_until_killed(coordinator, RoundCommitted, 2)
    await Coordinator(RunParts.of(again, deployment.link)).run()
    assert [record.attempt for record in again.attempts()] == [1, 1, 2, 1]
    names = ("undisturbed", "run")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in names)
    assert first == second


async def test_devices_evaluate_the_model_without_their_control_variates(deployment, tmp_path):
    await deployment.start(
        DIFFERENT + "\ndef validation_data(self, participant):\n    return rows(12, seed=5)"
    )
    report, _ = await deployment.run("run", *CONTROLLED, "evaluation.devices=3")
    await deployment.run("plain", *CONTROLLED)
    first, second = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "plain")
    )
    assert first == second
    assert report


async def test_devices_of_hybrid_rounds_have_them_too(run_with_datacenter):
    store, coordinator, _ = await run_with_datacenter(*CONTROLLED, "strategy.policy=hybrid")
    await coordinator.run()
    tensors, _ = coordinator.parts.federated.extension.export_state()
    assert tensors["control_variate"].norm() > 0.1
    assert cohorts_of(store)


def test_a_plan_that_transfers_gradients_is_refused(make_job):
    job = make_job("federated.control_variates=9", "federated.secure_aggregation=false")
    transfer = GradientTransfer(
        job=job, model=None, datacenter=None, regimes=None, publication=None
    )
    with pytest.raises(JobError, match="control_variates adds another vector; remove one of them"):
        transfer.check()


async def test_more_devices_than_the_job_says_end_the_run(deployment):
    await deployment.start(DIFFERENT, names=("a", "b", "c", "d"))
    settings = ("federated.clients=2", "federated.cohort=2", "federated.quorum=2", "rounds=40")
    with pytest.raises(JobError, match=r"control_variates=2 is the number of all devices .* have"):
        await deployment.run("run", *CONTROLLED, "federated.control_variates=2", *settings)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["federated.secure_aggregation=true"], "set federated.secure_aggregation = false"),
        (["federated.mode=buffered"], "federated.mode='buffered'"),
        (["federated.proximal=0.1"], "federated.proximal"),
        (["federated.normalized_steps=5"], "federated.normalized_steps"),
        (["federated.clip_norm=1"], "federated.clip_norm"),
        (["federated.precision=bf16"], "federated.precision"),
        (["federated.aggregation=median"], "federated.aggregation"),
        (["federated.codec=rounded"], "federated.codec"),
        (["federated.download_bits=4"], "federated.download_bits"),
        (["exchange.personal=['bias']"], "exchange.personal"),
        (["exchange.low_rank={rank=2,include=['weight']}"], "exchange.low_rank"),
        (["learning_rate.warmup_steps=3", "federated.local_steps=2"], "warmup_steps"),
        (["strategy.policy=hybrid", "strategy.merge=transfer"], "strategy.merge='transfer'"),
        (["federated.privacy={epsilon=8.0,delta=1e-6,clip=1.0,examples=100}"], "federated.privacy"),
        (["federated.cohort=4"], "a cohort of 4 need more; raise it"),
        (["federated.flower.app=app.py:app"], "control_variates has no effect on flower.app"),
    ],
)
def test_what_changes_a_step_or_an_update_is_refused(make_job, overrides, named):
    plain = ("federated.control_variates=3", "federated.secure_aggregation=false")
    with pytest.raises(JobError) as refused:
        make_job(*plain, "federated.clients=3", "federated.cohort=3", *overrides)
    assert named in str(refused.value)
    assert "control_variates" in str(refused.value)
