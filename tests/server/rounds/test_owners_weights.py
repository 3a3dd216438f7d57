"""What owners let the weights of updates say, in whole runs with real agents and masked sums."""

import pytest
import torch
from torch import nn

from isthmus.job.weights import weight_of
from isthmus.task import Participant, load_task
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts

NAMES = tuple("abcdefghijkl")
EXAMPLES = {name: 7 + 5 * index for index, name in enumerate(NAMES)}
"""All different, and 32 the only power of two among them."""
OWN_NUMBERS = """
def local_data(self, participant):
    return rows(7 + 5 * (ord(participant.name) - ord("a")), seed=ord(participant.name))
"""
ROTATING = ("federated.cohort=6", "federated.quorum=6", "rounds=20", "federated.local_steps=1")
ONE_STEP = ("rounds=1", "federated.local_steps=1", "federated.batch_size=100")


def policy(weights):
    return f'[privacy]\nweights = "{weights}"\nsecure_aggregation = false'


def solved(report):
    """Each device's weight from the sums over rotating cohorts, as the report has them."""
    cohorts = torch.zeros(len(report["rounds"]), len(NAMES), dtype=torch.float64)
    sums = torch.zeros(len(report["rounds"]), dtype=torch.float64)
    for row, record in enumerate(report["rounds"]):
        sums[row] = record["training"]["federated"]["examples"]
        for receipt in record["receipts"]:
            if receipt["status"] == "accepted":
                cohorts[row, NAMES.index(receipt["participant"])] = 1
    assert torch.linalg.matrix_rank(cohorts) == len(NAMES)
    weights = torch.linalg.lstsq(cohorts, sums).solution
    assert torch.allclose(cohorts @ weights, sums, atol=1e-6)
    return dict(zip(NAMES, weights.round().int().tolist(), strict=True))


@pytest.mark.parametrize("kind", ["exact", "coarse", "equal"])
async def test_the_sums_of_rotating_cohorts_tell_what_owners_let_weights_say(deployment, kind):
    """Nobody lies: the server solves linear equations whose numbers are all in the report."""
    deployment.policies = dict.fromkeys(NAMES, policy(kind))
    await deployment.start(OWN_NUMBERS, NAMES)
    report, _ = await deployment.run("run", *ROTATING)
    found = solved(report)
    assert found == {name: weight_of(EXAMPLES[name], kind) for name in NAMES}
    known = [name for name in NAMES if found[name] == EXAMPLES[name]]
    # Of a coarse weight of 32 the server does not know whether it is 23 to 45.
    assert known == {"exact": list(NAMES), "coarse": ["f"], "equal": []}[kind]
    others = {record["training"]["federated"]["other_weight"] for record in report["rounds"]}
    assert others == {0.0 if kind == "exact" else 6.0}


async def test_sums_of_random_groups_tell_weights_after_fewer_rounds(deployment):
    """With four sums in each round, six rounds tell those of twelve devices."""
    await deployment.start(OWN_NUMBERS, NAMES)
    robust = (
        "federated.cohort=12",
        "federated.quorum=12",
        "federated.robust=median",
        "federated.robust_groups=4",
        "federated.robust_minimum=3",
    )
    report, _ = await deployment.run("run", *robust, *ONE_STEP, "rounds=6")
    members = []
    sums = []
    for record in report["rounds"]:
        for group, one in record["groups"].items():
            names = [each["participant"] for each in record["receipts"] if each["group"] == group]
            members.append([float(name in names) for name in NAMES])
            sums.append(float(one["examples"]))
    cohorts = torch.tensor(members, dtype=torch.float64)
    assert torch.linalg.matrix_rank(cohorts) == len(NAMES)
    weights = torch.linalg.lstsq(cohorts, torch.tensor(sums, dtype=torch.float64)).solution
    assert dict(zip(NAMES, weights.round().int().tolist(), strict=True)) == EXAMPLES


def mean_by_hand(folder, start, weights):
    """The model after a step of full batches on each device, averaged with these weights."""
    task = load_task("task.py:Learn", {}, base=folder)
    total = torch.zeros_like(start, dtype=torch.float64)
    for name, weight in weights.items():
        model = nn.Linear(4, 3)
        nn.utils.vector_to_parameters(start.clone(), [model.bias, model.weight])
        inputs, target = task.local_data(Participant(name=name, regime="federated")).tensors
        nn.functional.cross_entropy(model(inputs), target).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        end = torch.cat([model.bias.detach(), model.weight.detach().flatten()])
        total += weight * end.double()
    return (total / sum(weights.values())).float()


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_a_round_with_owners_weights_is_federated_averaging_with_them(
    deployment, tmp_path, secure
):
    deployment.policies = {"b": policy("coarse"), "d": policy("coarse"), "e": policy("equal")}
    names = tuple("abcde")
    await deployment.start(OWN_NUMBERS, names)
    settings = ("federated.cohort=5", "federated.quorum=5", *ONE_STEP)
    secure = f"federated.secure_aggregation={secure}"
    store = deployment.create_run("run", *settings, secure)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    start = coordinator.model.vector.clone()
    await coordinator.run()
    kinds = {"a": "exact", "b": "coarse", "c": "exact", "d": "coarse", "e": "equal"}
    weights = {name: weight_of(EXAMPLES[name], kinds[name]) for name in names}
    assert weights == {"a": 7, "b": 16, "c": 17, "d": 16, "e": 1}
    expected = mean_by_hand(tmp_path, start, weights)
    torch.testing.assert_close(coordinator.model.vector, expected, rtol=0, atol=2e-6)
    exact = mean_by_hand(tmp_path, start, {name: EXAMPLES[name] for name in names})
    assert not torch.allclose(exact, expected, rtol=0, atol=1e-4)
    (record,) = read_report(store).rounds
    assert record.other_weights == (
        "3 of 5 devices gave coarse or equal weights, by their owners' choice: the mean is not "
        "weighted by numbers of examples; federated.weights sets one kind for all"
    )
    assert record.other_weights in record.incidents


@pytest.mark.parametrize(("wanted", "weight"), [("coarse", 32), ("equal", 1)])
async def test_a_job_may_ask_for_weights_that_say_less(deployment, wanted, weight):
    deployment.policies = {"f": policy("coarse")}
    names = ("e", "f", "g")  # 27, 32 and 37 examples
    await deployment.start(OWN_NUMBERS, names)
    report, _ = await deployment.run("run", "rounds=1", f'federated.weights="{wanted}"')
    (record,) = report["rounds"]
    figures = record["training"]["federated"]
    assert (figures["examples"], figures["other_weight"]) == (3 * weight, 0)


async def test_a_job_that_needs_exact_weights_is_declined_by_owners_who_give_others(deployment):
    deployment.policies = {"b": policy("coarse"), "c": policy("equal")}
    await deployment.start(OWN_NUMBERS, tuple("abcde"))
    report, _ = await deployment.run("run", "rounds=1", 'federated.weights="exact"')
    declined = {
        event["participant"]: event["reason"]
        for event in report["events"]
        if event["kind"] == "declined"
    }
    assert declined.keys() == {"b", "c"}
    assert declined["b"].endswith(
        "its owner gives coarse weights ([privacy] weights in policy.toml), and 'table' needs "
        "exact ones (federated.weights)"
    )
    assert report["rounds"][0]["training"]["federated"]["examples"] == 7 + 22 + 27
