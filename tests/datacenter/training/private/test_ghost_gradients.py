"""Ghost clipping sums the same clipped gradients as batches of one, or refuses the model."""

import math
import random
import secrets
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.datacenter.task_models import Decoder
from tests.datacenter.tasks import Gpt, Masked, Pictures, Table, cross_entropy
from tests.privacy.dp_sgd.test_kept_state import Levelled
from tests.privacy.dp_sgd.test_private_gradients import Negatives, Tied, one_by_one
from torch import nn
from torch.utils.data import TensorDataset

from isthmus.errors import TaskError
from isthmus.job.datacenter import DatacenterSection
from isthmus_datacenter.messages import ControlSignal
from isthmus_datacenter.parallel.model_shard import ModelShard
from isthmus_datacenter.parallel.parallel_dims import ParallelDims
from isthmus_datacenter.training.private import ghost_step
from isthmus_datacenter.training.private.example_norms import ExampleNorms
from isthmus_datacenter.training.private.ghost_step import GhostForwardBackward
from isthmus_privacy.dp_sgd.examples import ExampleGroup, SampledExamples

CPU = torch.device("cpu")


class Words(Table):
    """Sequences of words; `parts` makes the model of an embedding of width 8 and its rest."""

    def __init__(self, parts):
        super().__init__({})
        self.parts = parts

    def model(self):
        return self.parts()

    def loss(self, output, target):
        return cross_entropy(output.transpose(1, 2), target)

    def rows(self, count, seed):
        words = torch.randint(12, (count, 6), generator=torch.Generator().manual_seed(seed))
        return TensorDataset(words, words.roll(-1, 1))


class Images(Pictures):
    """Convolutions of every kind of padding, stride and group; activations change in place."""

    def model(self):
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"),
            nn.ReLU(inplace=True),
            nn.InstanceNorm2d(4, affine=True),
            nn.Conv2d(4, 8, (3, 2), stride=2, groups=2, bias=False),
            nn.GroupNorm(2, 8),
            nn.PReLU(8),
            nn.ConvTranspose2d(8, 2, 2),
            nn.Flatten(2),
            nn.Conv1d(2, 3, 3, dilation=2, padding="same"),
            nn.Flatten(),
            nn.LazyLinear(3),
        )


class Scale(nn.Module):
    """A layer that PyTorch does not have."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, hidden):
        return self.factor.sin() * hidden / hidden.square().mean(-1, keepdim=True).sqrt()


class Functional(nn.Module):
    """Its head uses the weight of the embedding without the embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 8)

    def forward(self, words):
        return self.words(words) @ self.words.weight.T


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.places = nn.Parameter(torch.randn(6, 8))

    def forward(self, words):
        return self.head(self.words(words) + self.places)


class SharedPlaces(nn.Module):
    """Positions as transformers have them: one row (1, T) for all examples."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.places = nn.Embedding(6, 8)

    def forward(self, words):
        places = torch.arange(words.shape[1]).unsqueeze(0)
        return self.head(self.words(words) + self.places(places))


class Looped(nn.Module):
    """The same layers twice, and a weight in three places."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        hidden = self.words(words) + self.words(words.flip(1))
        for _ in range(2):
            hidden = hidden + self.norm(self.inner(hidden)).tanh()
        return self.head(hidden)


def embedded(*layers, **options):
    return lambda: nn.Sequential(nn.Embedding(12, 8, **options), *layers, nn.Linear(8, 12))


def mixing(hidden):
    return hidden - 0.5 * hidden.mean(0)


class MixingInTraining(nn.Module):
    def forward(self, hidden):
        return mixing(hidden) if self.training else hidden


class InHalf(nn.Module):
    """A layer in autocast, or of numbers with few bits."""

    def __init__(self, dtype):
        super().__init__()
        self.words, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.inner = nn.Linear(8, 8, dtype=dtype)

    def forward(self, words):
        hidden = self.words(words).to(self.inner.weight.dtype)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.inner(hidden)
        return self.head(hidden.float())


class FunctionalAtTimes(nn.Module):
    """Uses its layer's weight without the layer: always, or not in evaluation."""

    def __init__(self, *, always):
        super().__init__()
        self.inner, self.always = nn.Linear(8, 8), always

    def forward(self, hidden):
        if self.training or self.always:
            hidden = hidden + nn.functional.linear(hidden, self.inner.weight).tanh()
        return self.inner(hidden)


def hides(model):
    """The model with a head of zeros, which no gradient passes before the first step."""
    nn.init.zeros_(model[-1].weight)
    return model


class Sorting(nn.Module):
    """Computes the examples in another order, as do models that pack sequences by length."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, words):
        hidden = self.words(words)
        order = words[:, 0].argsort(stable=True)
        return self.head(hidden[order])[order.argsort()]


def limited(hidden, change):
    """The same, whose gradient is changed on its way."""
    if hidden.requires_grad:
        hidden.register_hook(change)
    return hidden


def clamped(limit):
    """After an operation, so that the layer before it gets the changed gradient."""
    hook = Hook(lambda hidden: limited(hidden, lambda g: g.clamp(-limit, limit)))
    return embedded(nn.Tanh(), hook)


def normalised(hidden):
    return limited(hidden, lambda g: g / g.norm(dim=(1, 2), keepdim=True).clamp(min=1e-12))


class Hook(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, hidden):
        return self.function(hidden)


def forward_backward(task, model, clip=0.3, batch_size=9):
    section = DatacenterSection(
        ranks=1,
        zero_stage=0,
        batch_size=batch_size,
        privacy={
            "epsilon": 1.0,
            "delta": 1e-6,
            "examples": 100,
            "clip": clip,
            "noise": 1e-12,
            "clipping": "ghost",
        },
    )
    dims = ParallelDims(ranks=1, zero_stage=0, private=True)
    names = {name: name for name, _ in model.named_parameters(remove_duplicate=False)}
    return GhostForwardBackward(task, ModelShard(dims, {0: model}, {0: names}), 0, CPU, section)


def groups_of(task, data):
    return SampledExamples(task, data, range(len(data)), 1.0, CPU).read(range(len(data)))


def ghost_sum(task, model, data, clip):
    steps = forward_backward(task, model, clip)
    groups = groups_of(task, data)
    steps.check(groups[0])
    assert all(each.grad is None for each in model.parameters())
    steps.run(groups, 1.0, lambda: ControlSignal.CONTINUE)
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.cat([each.grad.flatten() for each in trained])


TASKS = {
    "table": lambda: Table({}),
    "masked": lambda: Masked({}),
    "tied": lambda: Tied({}),
    "pictures": lambda: Pictures({}),
    "images": lambda: Images({}),
    "gpt": lambda: Gpt({}),
    "gpt, called by keyword": lambda: Gpt({"together": True}),
    "padding": lambda: Words(embedded(padding_idx=3)),
    "norms": lambda: Words(embedded(Scale(), nn.RMSNorm(8), nn.LayerNorm(8, bias=False))),
    "frozen": lambda: Words(embedded(nn.Linear(8, 8).requires_grad_(False))),
    "four dimensions": lambda: Words(
        embedded(nn.Unflatten(2, (2, 4)), nn.Linear(4, 4), nn.Flatten(2))
    ),
    "looped": lambda: Words(Looped),
    "shared positions": lambda: Words(SharedPlaces),
}


@pytest.mark.parametrize("clip", [0.05, 1e6])
@pytest.mark.parametrize("name", TASKS)
def test_the_sum_is_that_of_batches_of_one(name, clip):
    torch.manual_seed(1)
    task = TASKS[name]()
    model, data = task.model(), task.rows(9, seed=3)
    task.forward(model, data[:1][0])  # of the lazy layer
    expected = one_by_one(task, model, data, clip)
    torch.testing.assert_close(
        ghost_sum(task, model, data, clip), expected, rtol=3e-4, atol=3e-6 * float(expected.norm())
    )


@pytest.mark.parametrize("kind", [embedded(), lambda: Decoder(1, tied=True), Looped])
def test_no_example_is_longer_than_the_bound(kind):
    torch.manual_seed(2)
    task = Words(kind)
    model = task.model()
    for index in range(20):
        data = TensorDataset(*task.rows(20, seed=4)[index : index + 1])
        for clip in (1e-4, 0.01, 0.1):
            clipped = ghost_sum(task, model, data, clip).double().norm()
            assert float(clipped) <= clip
            assert float(clipped) == pytest.approx(clip, rel=1e-4)
            model.zero_grad()


class Level(nn.Module):
    """Sequences of which the mean is taken away, so that what is the same at all places cancels."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, values):
        hidden = self.inner(values)
        hidden = hidden - hidden.mean(1, keepdim=True)
        return self.head(hidden.tanh().mean(1))


class Level2d(nn.Module):
    """The same with a convolution."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Conv1d(3, 8, 1), nn.Linear(8, 3)

    def forward(self, values):
        hidden = self.inner(values.mT)
        hidden = hidden - hidden.mean(2, keepdim=True)
        return self.head(hidden.tanh().mean(2))


def largest_change(kind, length, value):
    """By one example with a number that is the same at all places, in bounds."""
    task, changes = Table({}), []
    for seed in range(10):
        torch.manual_seed(seed)
        model = kind()
        inputs, target = torch.randn(4, length, 3), torch.tensor([0, 1, 2, 1])
        inputs[0, :, 0] = value
        steps = forward_backward(task, model, clip=0.3)
        totals = []
        for first in (1, 0):  # zero-out
            rows = (inputs[first:], target[first:])
            steps.model.zero_grad()
            steps._add(rows, rows, alive=True)
            totals.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
        changes.append(float((totals[1] - totals[0]).double().norm()) / 0.3)
    return max(changes)


@pytest.mark.parametrize("kind", [Level, Level2d])
@pytest.mark.parametrize("length", [2, 7])
@pytest.mark.parametrize("value", [1.0, 1e3, 1.7e9, 1e15])  # seconds since 1970
def test_terms_that_cancel_add_no_more_than_the_bound(kind, length, value, monkeypatch):
    """The first pass finds a norm, and what float32 loses in the second pass may be larger."""
    assert largest_change(kind, length, value) <= 1 + 3 * 2.0**-8
    if (length, value) == (7, 1.7e9):
        monkeypatch.setattr(ghost_step, "_ROUNDED", 1e300)
        assert largest_change(kind, length, value) > 1.1


class Guard(nn.Module):
    """Scales a whole batch down if one number in it is large."""

    def forward(self, values):
        values = values.float()
        largest = values.abs().max()
        return torch.nan_to_num(values / largest if largest > 1000 else values)


@pytest.mark.parametrize("kind", ["fractions", "whole numbers", "integers"])
def test_a_guard_that_looks_at_the_batch_is_refused(kind):
    """It is met by an outlier only, which no example of a check may be."""
    inputs = torch.arange(24.0).view(4, 6) % 9 + (0.5 if kind == "fractions" else 0)
    inputs = inputs.long() if kind == "integers" else inputs
    data = TensorDataset(inputs, torch.arange(4) % 3)
    with pytest.raises(TaskError, match="changes with the other examples of its batch"):
        ghost_sum(Table({}), nn.Sequential(Guard(), nn.Linear(6, 3)), data, 0.3)


class Rounded(torch.autograd.Function):
    """Rounds a weight, and lets its gradient through."""

    @staticmethod
    def forward(context, weight):
        return (weight * 16).round() / 16

    @staticmethod
    def backward(context, gradient):
        return gradient


def unseen(values, weight):
    with torch._C.DisableTorchFunction():
        return nn.functional.linear(values, weight)


class SeldomOutside(nn.Module):
    """Uses the weight of its layer without the layer in a way, for large values only."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, values):
        large = values.abs().amax(1, keepdim=True) > 10
        hidden = self.inner(values)
        if large.any():
            hidden = hidden + 20 * torch.where(large, self.way(values, self.inner.weight), 0)
        return self.head(hidden / 20)


class Mode(nn.Module):
    """Multiplies by its factor and by what is set for the time of a call."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(6))
        self.more = 1.0

    def forward(self, values):
        return values * self.factor * self.more


class SeldomInMode(nn.Module):
    """A large value sets the mode of a layer for a call."""

    def __init__(self):
        super().__init__()
        self.mode, self.head = Mode(), nn.Linear(6, 3)

    def forward(self, values):
        self.mode.more = torch.where(values.abs().amax(1, keepdim=True) > 10, 300.0, 1.0)
        hidden = self.mode(values)
        self.mode.more = 1.0
        return self.head(hidden)


class SmallMode(nn.Module):
    """Adds little to its input, with a factor that is set for the time of a call."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.full((6,), 1e-7))
        self.more = 1.0

    def forward(self, values):
        return values + values * self.factor * self.more


class SeldomInSmallMode(SeldomInMode):
    def __init__(self):
        super().__init__()
        self.mode = SmallMode()


class SmallModes(SmallMode):
    def __init__(self):
        super().__init__()
        self.modes = {"more": 1.0}

    def forward(self, values):
        return values + values * self.factor * self.modes["more"]


class SeldomInSmallModes(nn.Module):
    """A large value sets an item of an attribute of a layer for a call."""

    def __init__(self):
        super().__init__()
        self.mode, self.head = SmallModes(), nn.Linear(6, 3)

    def forward(self, values):
        large = values.abs().amax(1, keepdim=True) > 10
        self.mode.modes["more"] = torch.where(large, 1000.0, 1.0)
        hidden = self.mode(values)
        self.mode.modes["more"] = 1.0
        return self.head(hidden)


class Scaled(nn.Module):
    """A small factor, times a scale of what the layer refers to."""

    def __init__(self, holder, scale_of):
        super().__init__()
        self.factor = nn.Parameter(torch.full((6,), 1e-6))
        self.holder = holder
        self.scale_of = scale_of

    def forward(self, values):
        return values + values * self.factor * self.scale_of(self.holder)


class SeldomScaled(nn.Module):
    """A large value sets an attribute of an object that a layer refers to for a call."""

    def __init__(self, holder, scale_of, scaled):
        super().__init__()
        self.layer, self.head = Scaled(holder, scale_of), nn.Linear(6, 3)
        self.scaled = scaled

    def forward(self, values):
        large = values.abs().amax(1, keepdim=True) > 10
        self.scaled.scale = torch.where(large, 1000.0, 1.0)
        hidden = self.layer(values)
        self.scaled.scale = 1.0
        return self.head(hidden)


def seldom_of_object():
    holder = SimpleNamespace(scale=1.0)
    return SeldomScaled(holder, lambda holder: holder.scale, holder)


def seldom_of_inner_object():
    inner = SimpleNamespace(scale=1.0)
    return SeldomScaled({"inner": [inner]}, lambda holder: holder["inner"][0].scale, inner)


def seldom_of_other_layer():
    other = nn.Identity()
    other.scale = 1.0
    return SeldomScaled([other], lambda holder: holder[0].scale, other)


class Depth(nn.Module):
    """Leaves its factor out at times, by random numbers of Python or NumPy."""

    def __init__(self, draw, factor=1.0, scale=1.0):
        super().__init__()
        self.draw = draw
        self.factor = nn.Parameter(torch.full((6,), factor))
        self.scale = scale

    def forward(self, values):
        left_out = self.training and self.draw()
        return values if left_out else values + self.factor * (self.scale * values)


def seldom_hooked():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))

    def more(layer, given, output):
        return output * torch.where(given[0].abs().amax(1, keepdim=True) > 10, 300.0, 1.0)

    model[0].register_forward_hook(more)
    return model


def seldom_replaced():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    layer = model[0]

    def forward(values):
        large = torch.where(values.abs().amax(1, keepdim=True) > 10, 300.0, 1.0)
        return nn.functional.linear(values, layer.weight, layer.bias) * large

    layer.forward = forward
    return model


SELDOM = {
    "operation": lambda: SeldomOutside(lambda values, weight: values @ Rounded.apply(weight).T),
    "function that no mode sees": lambda: SeldomOutside(unseen),
    "torch.func": lambda: SeldomOutside(
        lambda values, weight: torch.func.vmap(lambda row: weight @ row)(values)
    ),
    "attribute": SeldomInMode,
    "attribute of a small factor": SeldomInSmallMode,
    "item of an attribute": SeldomInSmallModes,
    "attribute of an object of a layer": seldom_of_object,
    "attribute of an object in a list in a dictionary": seldom_of_inner_object,
    "attribute of another layer": seldom_of_other_layer,
    "hook": seldom_hooked,
    "forward of the object": seldom_replaced,
    "random numbers of Python": lambda: nn.Sequential(
        Depth(lambda: random.random() < 0.5), nn.Linear(6, 3)
    ),
    "random numbers for a small factor": lambda: nn.Sequential(
        Depth(lambda: random.random() < 0, 1e-6, 1000.0), nn.Linear(6, 3)
    ),
    "random numbers of NumPy": lambda: nn.Sequential(
        Depth(lambda: np.random.rand() < 0.5), nn.Linear(6, 3)
    ),
}


def sums_of_some(model, data, times):
    for _ in range(times):
        ghost_sum(Table({}), model(), data, 0.3)


@pytest.mark.parametrize("name", SELDOM)
def test_norms_that_are_wrong_for_few_examples_only_are_refused(name):
    """No example that is compared leads there, and one that does would add many times the bound."""
    torch.manual_seed(1)
    random.seed(1)
    inputs, target = Table({}).rows(9, seed=3).tensors
    inputs[8] = 50.0
    with pytest.raises(TaskError, match=r"clipping = 'per_example'"):
        sums_of_some(SELDOM[name], TensorDataset(inputs, target), 20)


def spared(register):
    """A model whose gradients are zeros if they are long; those of single examples are not."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    for each in model.parameters():
        register(each)
    return model


def before_accumulation(parameter):
    parameter.register_hook(lambda each: torch.where(each.norm() > 3, 0, each))


def after_accumulation(parameter):
    def spare(parameter):
        if parameter.grad.norm() > 3:
            parameter.grad.zero_()

    parameter.register_post_accumulate_grad_hook(spare)


@pytest.mark.parametrize("register", [before_accumulation, after_accumulation])
def test_hooks_of_parameters_that_no_single_example_meets_are_refused(register):
    """They get the sum of a step: one more example would change it by 10 bounds."""
    data = TensorDataset(torch.rand(40, 6) * 0.1 + 0.5, torch.zeros(40).long())
    with pytest.raises(TaskError, match=r"parameter '0.weight' has a hook on its gradient"):
        ghost_sum(Table({}), spared(register), data, 0.3)


class Gated(nn.Module):
    """Multiplies by its input, and limits the gradient before that to what is usual."""

    def __init__(self, limit):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.limit = limit

    def forward(self, values):
        hidden = self.inner(values.clamp(-1, 1)).tanh()
        hidden = limited(hidden, lambda each: each.clamp(-self.limit, self.limit))
        return hidden[:, :3] * values[:, :3]


@pytest.mark.parametrize("limit", [1e3, 1e7, 1e12])
def test_limits_of_gradients_that_only_an_outlier_meets_are_refused(limit):
    """Its scaled gradient is not limited: with 1e12 as a value it added 100,000 bounds."""
    data = TensorDataset(torch.rand(4, 6), torch.arange(4) % 3)
    with pytest.raises(TaskError, match="is not in proportion to the loss"):
        ghost_sum(Table({}), Gated(limit), data, 0.3)


class MaskGuard(nn.Module):
    """Subtracts the mean of a batch if a mask is true anywhere."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, inputs):
        values, mask = inputs
        return self.head(values - values.mean(0) if mask.any() else values)


def test_a_guard_that_looks_at_a_mask_of_the_batch_is_refused():
    """No example that is compared has one."""
    task = Table({})
    task.inputs_and_target = lambda batch: (batch[:2], batch[2])
    data = TensorDataset(torch.rand(4, 6), torch.zeros(4, 6).bool(), torch.arange(4) % 3)
    with pytest.raises(TaskError, match="changes with the other examples of its batch"):
        ghost_sum(task, MaskGuard(), data, 0.3)


def test_a_loss_that_compares_examples_is_refused():
    task = Negatives({})
    with pytest.raises(TaskError, match="loss of an example alone has no gradient"):
        ghost_sum(task, task.model(), task.rows(5, seed=1), 0.3)


def test_a_layer_that_refers_to_too_much_is_refused():
    """Whether one of so many objects is set for the time of a call is not found out."""
    holder = SimpleNamespace(scale=1.0, others=[[number] for number in range(20_000)])
    model = nn.Sequential(Scaled(holder, lambda holder: holder.scale), nn.Linear(6, 3))
    data = TensorDataset(torch.rand(4, 6), torch.arange(4) % 3)
    with pytest.raises(TaskError, match=r"'holder' to more than 10,000 objects, too many to see"):
        ghost_sum(Table({}), model, data, 0.3)


class Spectra(nn.Module):
    """Divides by the largest number of a batch if that is large."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, inputs):
        values = torch.view_as_real(inputs).flatten(1)
        largest = values.abs().max()
        return self.head(values / largest if largest > 100 else values)


def test_a_guard_that_looks_at_complex_numbers_of_the_batch_is_refused():
    """No example that is compared has a large one."""
    data = TensorDataset(torch.rand(4, 3, dtype=torch.cfloat), torch.arange(4) % 3)
    with pytest.raises(TaskError, match="changes with the other examples of its batch"):
        ghost_sum(Table({}), Spectra(), data, 0.3)


def test_what_collate_keeps_and_forward_uses_is_refused():
    """Nothing of it changes within a step: the examples have been read before."""
    task = Levelled({"mean": torch.zeros(6)}, uses=True)
    source = SampledExamples(task, task.rows(40, seed=3), range(40), 0.2, CPU)
    steps = forward_backward(task, task.model())
    steps.check(source.check(range(4))[0])
    with pytest.raises(TaskError, match=r"what collate\(\) or the dataset keeps"):
        steps.run(next(source.batches(0, 1)), 1.0, lambda: ControlSignal.CONTINUE)


def dropping(task):
    """(rows, sum): gets the step's sum of some rows of a model with dropout."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))
    steps = forward_backward(task, model, clip=0.3)

    def total(inputs, target):
        model.zero_grad()
        torch.manual_seed(0)  # what everybody knows
        steps._set_gradients([ExampleGroup((inputs[:1], target[:1]), (inputs, target))])
        return torch.cat([each.grad.flatten() for each in model.parameters()]).double()

    return total


def test_an_example_that_fails_changes_no_dropout_of_others(monkeypatch):
    total = dropping(Table({}))
    inputs, target = torch.randn(9, 3), torch.arange(9) % 3
    failed = inputs.clone()
    failed[4, 1] = math.inf
    monkeypatch.setattr(secrets, "randbits", lambda count: 5)
    assert float((total(failed, target) - total(inputs, target)).norm()) <= 0.3 * (1 + 1e-4)


def test_nobody_knows_the_dropout_of_a_step():
    total = dropping(Table({}))
    inputs, target = torch.randn(9, 3), torch.arange(9) % 3
    assert float((total(inputs, target) - total(inputs, target)).norm()) > 0.03


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_norms_are_those_of_opacus_where_it_has_them():
    """Its norms are float32, and not for tied weights, or positions that examples share."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    torch.manual_seed(1)
    task = Words(embedded(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 8), nn.LayerNorm(8)))
    model, (words, target) = task.model(), task.rows(9, seed=3).tensors
    norms = ExampleNorms(model)
    norms.begin(torch.ones(9, dtype=torch.bool))
    squares = norms.squares(task.loss(model(words), target).mean(1))
    norms.end()
    peer = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    task.loss(peer(words), target).mean(1).sum().backward()
    expected = peer.get_norm_sample().double()
    torch.testing.assert_close(sum(squares.values()).sqrt(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["table", "pictures"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_adds_nothing(name, bad):
    torch.manual_seed(1)
    task = TASKS[name]()
    model, data = task.model(), task.rows(9, seed=3)
    inputs, target = data.tensors
    inputs[4].view(-1)[2], inputs[7].view(-1)[5] = bad, -bad
    keep = [index for index in range(9) if index not in (4, 7)]
    rest = TensorDataset(inputs[keep], target[keep])
    expected = one_by_one(task, model, rest, 0.3)
    found = ghost_sum(task, model, data, 0.3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Functional, r"parameter 'words.weight' .* used outside of them"),
        (embedded(Hook(mixing)), r"or an example changes the outputs of others; set datacenter"),
        (embedded(MixingInTraining()), r"changes the outputs of others in training, .* '0.weight'"),
        (Positions, r"layer '' \(Positions\) has parameters of its own.*clipping = 'per_example'"),
        (embedded(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)), r"MultiheadAttention"),
        (embedded(nn.LSTM(8, 8), Hook(lambda pair: pair[0])), r"\(LSTM\) does not return one"),
        (embedded(Hook(lambda h: h.transpose(0, 1)), nn.Linear(8, 8)), r"'2' \(Linear\) gets .*6"),
        (embedded(FunctionalAtTimes(always=False)), r"'1.inner.weight' .* used outside of them"),
        (lambda: hides(embedded(FunctionalAtTimes(always=True))()), r"'1.inner.weight' .* outside"),
        (Sorting, r"parameter 'head.weight' .* an example changes the outputs of others"),
        (embedded(scale_grad_by_freq=True), r"scale_grad_by_freq=True, which mixes examples"),
        (embedded(max_norm=1.0), r"max_norm, which changes weights without noise"),
        (clamped(1e-4), r"parameter '0.weight' is not in proportion to the loss"),
        (clamped(1.0), r"parameter '0.weight' is not in proportion to the loss"),
        (
            embedded(nn.Tanh(), Hook(normalised)),
            r"parameter '0.weight' is not in proportion to the loss",
        ),
        (lambda: InHalf(torch.float32), r"'inner' \(Linear\) computes in half precision"),
        (lambda: InHalf(torch.bfloat16), r"'inner' \(Linear\) computes in half precision"),
    ],
)
def test_models_whose_norms_cannot_be_found_are_refused(kind, reason):
    torch.manual_seed(1)
    task = Words(kind)
    rows = task.rows(3, seed=1)
    for data in (rows, TensorDataset(*rows[torch.tensor([1, 0])])):  # in both orders
        with pytest.raises(TaskError, match=reason):
            ghost_sum(task, task.model(), data, 1.0)
