"""The short tasks: federated on devices in this process, and two steps on two ranks."""

import math
from pathlib import Path

import pytest
import torch
from tests.warm_ranks import Ranks

from isthmus.job import write_job
from isthmus.task.definition import Parameters
from isthmus.task.scoring import build_model, evaluate
from isthmus.tensors.division import divide
from isthmus.tensors.fingerprint import fingerprint
from isthmus.transport.requests import fingerprint_messages
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun

from .conftest import CPU, EXAMPLES, device

BASE = EXAMPLES / "tasks"
ON_RANKS = Path(__file__).parents[1] / "datacenter" / "ranks.py"
TWO = ("federated.clients=2", "federated.cohort=2")


@pytest.fixture
def federate(load_example):
    """Train in rounds of all devices, with updates averaged by examples; returns the model."""

    def federate(source, rounds, *overrides):
        plain = "federated.secure_aggregation=false"
        job, task = load_example("tasks", f"task.source={source}", plain, *overrides)
        model = build_model(task, job.seed)
        division = divide(model, job.exchange)
        layout = division.exchanged
        opening = link_pb2.OpenRun(
            run_id="run",
            job=write_job(job),
            base=str(BASE),
            layout=layout.header,
            frozen=fingerprint_messages(fingerprint(model, division.personal.names)),
        )
        count = job.federated.clients
        runs = [DeviceRun(opening, device(index, count), None) for index in range(count)]
        vector = layout.gather(model)
        for round_ in range(1, rounds + 1):
            mean, total = torch.zeros_like(vector), 0
            for run in runs:
                payload = layout.encode(vector)
                work = link_pb2.TrainLocal(run_id="run", round=round_, attempt=1)
                trained = run.train(work, payload, lambda _: None, lambda: False)
                mean += trained.examples * layout.decode(payload)
                total += trained.examples
            vector -= mean / total
        layout.scatter(vector, model)
        return task, model, dict(trained.training)

    return federate


def figures(task, model):
    """The figures of the held-out data in one batch."""
    data = task.eval_data()
    return evaluate(task, model, data, range(len(data)), len(data), CPU).result()


def test_a_cox_model_by_hospital_finds_the_hazards(federate):
    task, model, _ = federate("cox.py:Cox", 12, "federated.batch_size=200")
    import cox

    torch.testing.assert_close(model.weight[0].detach(), cox.HAZARDS, atol=0.15, rtol=0)
    before, after = figures(task, build_model(task, 1)), figures(task, model)
    assert after["loss"] < before["loss"]
    assert after["concordance"] > 0.75


def nearest_label_accuracy(features, labels):
    """How often another image with the most similar features has the same label."""
    directions = torch.nn.functional.normalize(features)
    similarity = (directions @ directions.T).fill_diagonal_(-1.0)
    return float((labels[similarity.argmax(1)] == labels).float().mean())


def test_simclr_learns_features_without_labels(federate):
    from sklearn.datasets import load_digits

    task, model, _ = federate("simclr.py:SimCLR", 4, "federated.batch_size=128", *TWO)
    images, labels = task.eval_data().tensors[0], torch.tensor(load_digits().target[:300])
    draw = torch.Generator().manual_seed(0)
    images = torch.stack(
        [
            image.roll(torch.randint(-1, 2, (2,), generator=draw).tolist(), (0, 1))
            for image in images
        ]
    )
    with torch.no_grad():
        learned = nearest_label_accuracy(model["features"](images), labels)
        first = build_model(task, 1)
        untrained = nearest_label_accuracy(first["features"](images), labels)
    assert learned > untrained + 0.03, (learned, untrained)


def test_a_gan_of_two_optimizers_generates_points_where_they_are(federate):
    task, model, training = federate("gan.py:Gan", 15, "federated.local_epochs=2", *TWO)
    assert figures(task, build_model(task, 1))["loss"] > 1.5
    assert figures(task, model)["loss"] < 0.5
    assert set(training) == {"loss", "discriminator_loss", "generator_loss"}


def test_padded_sentences_train_as_single_ones_do(federate):
    """One step over the sentences of all devices, with and without padding."""
    one = ("federated.local_epochs=1", "federated.batch_size=48", "federated.clients=1")
    task, model, training = federate("tagging.py:Tagging", 1, *one, "federated.cohort=1")
    expected = build_model(task, 1)
    optimizer = task.optimizer(Parameters(expected.named_parameters()), device(0, 1))
    losses = []
    for row in task.local_data(device(0, 1)):
        words, target = task.inputs_and_target(task.collate([row]))
        losses.append(task.loss(task.forward(expected, words), target)[0].flatten())
    loss = torch.cat(losses).mean()
    loss.backward()
    optimizer.step()
    for trained, single in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(trained, single, atol=1e-4, rtol=1e-4)
    assert training["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


def test_batches_of_similar_lengths_train_the_tagger(federate):
    task, model, _ = federate("tagging.py:Tagging", 8, "federated.batch_size=8", *TWO)
    rows = task.local_data(device(0, 1))
    order = task.order(rows, 8, torch.Generator().manual_seed(0)).split(8)
    lengths = [[len(rows[index]["words"]) for index in batch] for batch in order]
    assert max(max(each) - min(each) for each in lengths) <= 4
    assert figures(task, model)["accuracy"] > figures(task, build_model(task, 1))["accuracy"] + 0.1


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_only_adapters_of_a_decoder_are_exchanged(federate):
    task, model, _ = federate("adapters.py:Adapters", 3, "federated.batch_size=16", *TWO)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    first = build_model(task, 1)
    assert figures(task, model)["loss"] < figures(task, first)["loss"] - 0.1
    frozen = dict(first.named_parameters())
    assert all(
        torch.equal(each, frozen[name])
        for name, each in model.named_parameters()
        if name not in trained
    )


def test_ranks_train_every_task(load_example, tmp_path):
    operations = []
    for source in ("cox.py:Cox", "simclr.py:SimCLR", "gan.py:Gan", "tagging.py:Tagging"):
        changes = ("datacenter.ranks=2", "datacenter.zero_stage=0", "datacenter.batch_size=8")
        job, task = load_example("tasks", f"task.source={source}", *changes)
        layout = divide(build_model(task, job.seed), job.exchange).exchanged.header
        opening = {"op": "open", "run_id": "run", "job": write_job(job), "base": str(BASE)}
        opening["layout"] = layout.decode("latin-1")
        step = {"op": "train_steps", "run_id": "run", "from_step": 0, "until_step": 2}
        operations.append((opening, step, str(tmp_path / source)))
    with Ranks(2) as ranks:
        (results, same) = ranks.run(ON_RANKS, "train", operations)
    for result, other in zip(results, same, strict=True):
        assert math.isfinite(result["training"]["loss"])
        assert result["training"] == other["training"]
