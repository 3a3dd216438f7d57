"""One example changes a step by at most the bound and no other step, or the model is refused."""

import contextlib
import secrets
from unittest import mock

import pytest
import torch
from tests.privacy.dp_sgd import mixing_models
from tests.privacy.dp_sgd.mixing_models import BETWEEN, HONEST, NOT_WITH_GHOST, OF_TASK, WITHIN
from torch.utils.data import TensorDataset

from isthmus.errors import TaskError
from isthmus_datacenter.training.private import ghost_step
from isthmus_privacy.dp_sgd import gradients, isolation
from isthmus_privacy.dp_sgd.gradients import ExampleGradients
from isthmus_privacy.dp_sgd.refusals import check_layers

from . import test_ghost_gradients

CLIP = 0.3
STEPS = {1: [[5], [0], [1]], 4: [[0, 5, 1, 2], [3, 4, 0, 1]]}
"""Examples of each step, by the size of a batch; number 5 is the one that changes."""


def sums(name, method, batch, *, zero):
    """The sums of the clipped gradients of all steps; the gradients of number 5 may be zeros.

    Numbers that are secret are those of the step, so that only the example makes a difference.
    """
    torch.manual_seed(1)
    task = mixing_models.task_of(name)
    model = task.model().train()
    check_layers(model, "datacenter.privacy")
    inputs, target = task.rows(6, seed=3).tensors
    inputs[5] *= 1e3
    if zero:
        inputs[5], target[5] = 0, -1
    data = TensorDataset(inputs, target)
    sample = test_ghost_gradients.groups_of(task, TensorDataset(inputs[:4], target[:4]))[0]
    if method == "ghost":
        steps = test_ghost_gradients.forward_backward(task, model, CLIP, batch)
    else:
        steps = ExampleGradients(task, model, CLIP, batch)
    steps.check(sample)
    found = []
    for number, indices in enumerate(STEPS[batch]):
        rows = test_ghost_gradients.SampledExamples(task, data, range(6), 1.0, torch.device("cpu"))
        groups = rows.read(indices)
        with mock.patch.object(secrets, "randbits", return_value=number):
            if method == "ghost":
                steps.model.zero_grad()
                steps._adds_noise = False
                steps._set_gradients(groups)
                trained = [each for each in model.parameters() if each.requires_grad]
                found.append(torch.cat([each.grad.flatten() for each in trained]).double())
            else:
                found.append(steps.step_sum(groups, torch.device("cpu")))
    return found


def change(name, method, batch):
    """How much the example changes its step, and all others, in bounds."""
    pairs = zip(
        sums(name, method, batch, zero=False), sums(name, method, batch, zero=True), strict=True
    )
    own, *others = [float((one - other).norm()) / CLIP for one, other in pairs]
    return own, max(others)


@pytest.mark.parametrize("batch", STEPS)
@pytest.mark.parametrize("method", ["per_example", "ghost"])
def test_mixing_is_refused_or_bounded(method, batch):
    """In each kind of model that trains; `torch.func` separates the examples of some."""
    changes = {}
    refusals = []
    for name in [*WITHIN, *BETWEEN, *OF_TASK]:
        try:
            changes[name] = change(name, method, batch)
        except TaskError as error:
            refusals.append(str(error))
    largest = max((max(each), name) for name, each in {**changes, "none": (0, 0)}.items())
    print(f"{method}, batches of {batch}: {len(changes)} kinds train, largest change {largest}")
    print(sorted(changes))
    assert not any("\n" in each for each in refusals)
    assert len(WITHIN) + len(BETWEEN) + len(OF_TASK) > 60
    assert largest[0] <= 1 + 1e-5
    assert max(others for _, others in [*changes.values(), (0, 0)]) <= 1e-5


class Unchecked:
    """In place of `KeptState`."""

    def __init__(self, task, model, **options):
        pass

    def check(self):
        pass

    def explaining(self):
        return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("name", "method", "batch"),
    [
        ("detached mean in training", "ghost", 4),
        ("rare branch", "ghost", 4),
        ("running mean, attribute", "per_example", 1),
        ("list of a module", "per_example", 1),
        ("running mean, buffer", "ghost", 1),
        ("file", "ghost", 1),
        ("operator", "ghost", 4),
        ("straight through", "ghost", 4),
        ("hook after accumulation", "ghost", 1),
    ],
)
def test_without_the_check_examples_change_others(monkeypatch, name, method, batch):
    """Or what is refused above would show nothing."""
    for module in (gradients, ghost_step):
        monkeypatch.setattr(module, "check_same", lambda *_: None)
        monkeypatch.setattr(module, "check_repeats", lambda *_: None)
        monkeypatch.setattr(module.ComputedBefore, "compare", lambda _: None)
        monkeypatch.setattr(module.Reference, "check", lambda *_: None)
        monkeypatch.setattr(module, "KeptState", Unchecked)
    monkeypatch.setattr(ghost_step.GhostForwardBackward, "_check_hooks", lambda *_: None)
    # What is not finite would be kept, and be all that is left.
    monkeypatch.setattr(isolation, "_NOT_FINITE", ())
    # What is kept between its passes also shows there.
    monkeypatch.setattr(ghost_step.GhostForwardBackward, "_check_proportion", lambda *_: None)
    own, others = change(name, method, batch)
    assert max(own - 1, others) > 0.01  # a thousand times what is allowed above


@pytest.mark.parametrize("method", ["per_example", "ghost"])
@pytest.mark.parametrize("name", HONEST)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_treats_examples_separately_trains(name, method):
    if method == "ghost" and name in NOT_WITH_GHOST:
        with pytest.raises(TaskError, match="ghost clipping cannot find"):
            change(name, method, 4)
        return
    own, others = change(name, method, 4)
    assert 0 < own <= 1 + 1e-5
    assert others == 0


@pytest.mark.parametrize("batch", STEPS)
@pytest.mark.parametrize("name", ["file", "operator", "running mean, buffer"])
def test_comparing_results_alone_finds_what_is_kept(monkeypatch, name, batch):
    """Wherever it is: as if `KeptState` saw nothing."""
    for module in (gradients, ghost_step):
        monkeypatch.setattr(module, "KeptState", Unchecked)
    monkeypatch.setattr(ghost_step.GhostForwardBackward, "_check_proportion", lambda *_: None)
    with pytest.raises(TaskError, match=r"of an example changes (with the other|when it is)"):
        change(name, "ghost", batch)
