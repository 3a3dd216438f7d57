"""One local step on a device: whole, in parts, with masks, with a loss of the batch, in turn."""

import pytest
import torch

from isthmus.errors import JobError, TaskError

from .conftest import train

MASKED = """
def loss(self, output, target):
    each = nn.functional.cross_entropy(output, target, reduction="none")
    return each, target != 2
"""
BATCHWISE = """
def training_step(self, model, batch):
    inputs, target = batch
    loss = nn.functional.cross_entropy(model(inputs), target)
    return isthmus.StepLoss(loss, parts={"logits": model(inputs).square().mean()})
"""
CHOSEN = """
def loss(self, output, target):
    each = nn.functional.cross_entropy(output, target, reduction="none")
    return each[target != 2]
"""
TURNS = """
def model(self):
    return nn.ModuleDict({"one": nn.Linear(4, 3), "two": nn.Linear(4, 3)})

def optimizer(self, parameters, participant):
    return {
        name: torch.optim.SGD(parameters.of(name), lr=rate)
        for name, rate in {"one": 0.1, "two": 0.2}.items()
    }

def training_step(self, model, batch, optimizer):
    inputs, target = batch
    both = model["one"](inputs) + model["two"](inputs)
    scale = 1.0 if optimizer == "one" else 10.0
    return scale * nn.functional.cross_entropy(both, target)
"""
STREAM = """
def local_data(self, participant):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(Table.local_data(None, participant))
    return Stream()
"""
EPOCHS = ("federated.local_epochs=2", "federated.batch_size=8")


def test_the_parts_of_a_batch_give_the_gradient_of_the_batch(open_run):
    for methods in ("pass", MASKED, BATCHWISE):
        whole, reply, _ = train(open_run(*EPOCHS, methods=methods))
        parts, in_parts, _ = train(open_run(*EPOCHS, "federated.accumulate=4", methods=methods))
        torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)
        assert in_parts.steps == reply.steps == 6
        assert dict(in_parts.training) == pytest.approx(dict(reply.training), rel=1e-5)


def test_a_batch_must_be_divisible_into_its_parts(open_run):
    with pytest.raises(JobError, match="batch_size=8 cannot be divided into accumulate=3 equal"):
        open_run(*EPOCHS, "federated.accumulate=3")


def test_a_mask_leaves_the_units_that_count(open_run):
    masked, chosen = (train(open_run(*EPOCHS, methods=each)) for each in (MASKED, CHOSEN))
    torch.testing.assert_close(masked[0], chosen[0])
    assert masked[1].training["loss"] == pytest.approx(chosen[1].training["loss"])


def test_a_loss_of_the_batch_trains_as_the_mean_does_and_its_parts_are_figures(open_run):
    update, reply, _ = train(open_run(*EPOCHS, methods=BATCHWISE))
    expected, of_mean, _ = train(open_run(*EPOCHS))
    torch.testing.assert_close(update, expected)
    assert reply.training["loss"] == pytest.approx(of_mean.training["loss"])
    assert reply.training["logits"] > 0


def test_optimizers_step_in_turn_each_by_its_own_loss(open_run):
    run = open_run("federated.local_steps=1", "federated.batch_size=20", methods=TURNS)
    model = run.task.model()
    run.layout.scatter(run.layout.gather(run.model), model)
    start = run.layout.gather(model)
    inputs, target = run.dataset.tensors
    for name, rate in (("one", 0.1), ("two", 2.0)):
        both = model["one"](inputs) + model["two"](inputs)
        model.zero_grad()
        torch.nn.functional.cross_entropy(both, target).backward()
        with torch.no_grad():
            for parameter in model[name].parameters():
                parameter.sub_(rate * parameter.grad)
    update, reply, _ = train(run)
    torch.testing.assert_close(update, start - run.layout.gather(model))
    assert set(reply.training) == {"loss", "one_loss", "two_loss"}


def test_several_optimizers_need_a_training_step(open_run):
    without = TURNS.replace("def training_step", "def unused") + (
        "def loss(self, output, target):\n    return output\n"
    )
    with pytest.raises(TaskError, match=r"which only training_step\(\) can use"):
        train(open_run(methods=without))


def test_a_stream_is_read_on_from_round_to_round(open_run):
    seen = []
    run = open_run("federated.local_steps=2", "federated.batch_size=8", methods=STREAM)
    loss = run.task.loss
    run.task.loss = lambda output, target: (seen.append(target.tolist()), loss(output, target))[1]
    _, reply, _ = train(run, 1)
    train(run, 2)
    train(run, 2)  # again
    assert reply.examples == 16
    targets = [int(target) for _, target in run.dataset] * 2
    assert [target for batch in seen[:4] for target in batch] == targets[:32]
    assert seen[4:] == seen[2:4]


def test_a_stream_needs_a_number_of_steps(open_run):
    with pytest.raises(TaskError, match=r"has no epochs; set federated\.local_steps"):
        open_run(methods=STREAM)
