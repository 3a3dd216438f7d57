"""Devices compute a model's blocks again in the backward pass, and train as plain PyTorch does."""

import random

import numpy
import pytest
import torch
from tests.clients.training.conftest import build_start, train

from isthmus.errors import JobError, TaskError
from isthmus.task.scoring import build_model

# Dropout draws in the second call what it drew in the first, and running statistics count once.
BLOCKS = """
    def model(self):
        block = lambda: nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4)
        )
        return nn.Sequential(block(), block(), block(), nn.Linear(4, 3))
"""
STEPS = ("federated.local_steps=4", "federated.batch_size=8", "exchange.buffers='average'")


def plain_loop(run, start):
    """What the steps of a round change, by a loop of PyTorch without any recomputation."""
    model = build_model(run.task, run.job.seed)
    run.layout.scatter(start, model)
    model.train()
    steps = run.data.steps(run.seed_of(1), 1, run.job.federated)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn = torch.default_generator.get_state()
    for step in steps:
        optimizer.zero_grad()
        parts = [part.batch for part in step]
        size = sum(len(target) for _, target in parts)
        for inputs, target in parts:
            loss = run.task.loss(model(inputs), target).sum() / size
            loss.backward()
        optimizer.step()
    torch.default_generator.set_state(drawn)
    return start - run.layout.gather(model)


@pytest.mark.parametrize("choice", ["true", "'operators'"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_round_has_the_bytes_of_one_that_keeps_all_activations(open_run, choice, accumulate):
    steps = (*STEPS, f"federated.accumulate={accumulate}")
    expected, told, _ = train(open_run(*steps, methods=BLOCKS))
    run = open_run(*steps, f"federated.checkpoint_activations={choice}", methods=BLOCKS)
    found, same, _ = train(run)
    assert expected.abs().max() > 1e-3
    assert found.equal(expected)
    assert same.training == told.training


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_round_is_that_of_a_plain_loop(open_run, accumulate):
    plain = BLOCKS.replace("nn.Dropout(0.3)", "nn.Dropout(0.0)")
    changes = (f"federated.accumulate={accumulate}", "federated.checkpoint_activations=true")
    run = open_run(*STEPS, *changes, methods=plain)
    start = build_start(run)
    expected = plain_loop(run, start)
    found, _, _ = train(run, start=start.clone())
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def kept_bytes(run):
    """What a step keeps of its forward pass, without parameters."""
    kept = {}
    own = {each.data_ptr() for each in run.model.parameters()}

    def keep(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    inputs = torch.randn(64, 4)
    run.task.forward(run.model.train(), inputs)  # blocks are called once more, and compared
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run.task.forward(run.model.train(), inputs)
    assert output.requires_grad
    return sum(kept.values())


def test_less_is_kept_for_the_backward_pass(open_run):
    whole = kept_bytes(open_run(*STEPS, methods=BLOCKS))
    some = kept_bytes(
        open_run(*STEPS, "federated.checkpoint_activations='operators'", methods=BLOCKS)
    )
    least = kept_bytes(open_run(*STEPS, "federated.checkpoint_activations=true", methods=BLOCKS))
    assert least < whole / 4
    assert some < whole


def test_the_blocks_that_a_task_names_are_computed_again(open_run):
    named = BLOCKS + "    def shard_units(self, model):\n        return [model[1]]\n"
    run = open_run(*STEPS, "federated.checkpoint_activations=true", methods=named)
    assert ["forward" in vars(block) for block in run.model] == [False, True, False, False]


DRAWING = """
    def model(self):
        import random
        import numpy

        class Drawn(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(4, 4)

            def forward(self, inputs):
                drawn = torch.tensor([random.random(), *numpy.random.rand(3)]).float()
                return (self.inner(inputs) * drawn).tanh()

        torch.manual_seed(3)
        return nn.Sequential(Drawn(), Drawn(), nn.Linear(4, 3))
"""


@pytest.mark.parametrize("choice", ["true", "'operators'"])
def test_blocks_that_draw_from_python_and_numpy_draw_the_same_again(open_run, choice):
    """Else the gradient would be of another function than the loss, without an error."""

    def trained(*changes):
        run = open_run(*STEPS, *changes, methods=DRAWING)
        random.seed(1)
        numpy.random.seed(1)
        update, _, _ = train(run)
        return update, random.random(), numpy.random.rand()

    expected = trained()
    assert expected[0].abs().max() > 1e-3
    found = trained(f"federated.checkpoint_activations={choice}")
    assert found[0].equal(expected[0])
    assert found[1:] == expected[1:]


def test_units_that_are_no_modules_are_refused(open_run):
    named = BLOCKS + "    def shard_units(self, model):\n        return ['1']\n"
    with pytest.raises(TaskError, match=r"shard_units\(\) returned str, not an nn\.Module"):
        open_run("federated.checkpoint_activations=true", methods=named)


def test_a_model_without_blocks_is_refused(open_run):
    with pytest.raises(TaskError, match=r"has no nn.ModuleList or nn.Sequential with parameters"):
        open_run("federated.checkpoint_activations=true")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("federated.compile=true", r"checkpoint_activations is not for compiled models"),
        (
            "federated.privacy={epsilon=4.0, delta=1e-5}",
            r"per-example gradients cannot recompute activations",
        ),
    ],
)
def test_what_cannot_be_together_is_refused(make_job, change, reason):
    with pytest.raises(JobError, match=reason):
        make_job("federated.checkpoint_activations=true", change)


IN_PLACE = """
    def model(self):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("scale", torch.full((4,), 2.0))
                self.shift = nn.Parameter(torch.zeros(4))

            def forward(self, inputs):
                return (inputs * self.scale + self.shift).exp()

        class Residual(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(4, 4)
                self.blocks = nn.ModuleList([Scaled()])
                self.head = nn.Linear(4, 3)

            def forward(self, inputs):
                hidden = self.first(inputs)
                hidden += self.blocks[0](hidden)
                return self.head(hidden)

        return Residual()
"""


def test_a_tensor_that_is_changed_before_the_second_call_is_refused(open_run):
    """Plain PyTorch trains this model, as its block keeps nothing of its inputs."""
    train(open_run(methods=IN_PLACE))
    run = open_run("federated.checkpoint_activations=true", methods=IN_PLACE)
    with pytest.raises(TaskError, match=r"the backward pass .* modified by an inplace operation"):
        train(run)
