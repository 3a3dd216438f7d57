"""Gradients of single examples: those of batches of one, clipped, whatever the model does."""

import dataclasses
import random
import secrets
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from tests.datacenter.tasks import Masked, Table, cross_entropy
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

from isthmus.errors import TaskError
from isthmus.task.scoring import losses
from isthmus_privacy.dp_sgd.examples import SampledExamples
from isthmus_privacy.dp_sgd.gradients import ExampleGradients, clipped_sum
from isthmus_privacy.dp_sgd.isolation import secret_numbers, seed_secretly


class Tied(Table):
    """A layer in two places, a parameter of two layers, a norm, and a frozen parameter."""

    def model(self):
        shared, other = nn.Linear(6, 6), nn.Linear(6, 6)
        other.weight = shared.weight
        norm, last = nn.GroupNorm(2, 6), nn.Linear(6, 3)
        last.bias.requires_grad_(False)
        return nn.Sequential(shared, norm, nn.Tanh(), shared, nn.ReLU(), other, last)


class Branching(Table):
    def forward(self, model, inputs):
        return model(inputs) if inputs.sum() > 0 else -model(inputs)


def one_by_one(task, model, data, clip):
    total = 0.0
    trained = [each for each in model.parameters() if each.requires_grad]
    for row in data:
        inputs, target = (each[None] for each in row)
        loss = losses(task, model, inputs, target)[1].mean()
        loss.backward()
        gradient = parameters_to_vector([each.grad for each in trained])
        model.zero_grad()
        total = total + gradient * min(1.0, clip / max(gradient.norm(), 1e-30))
    return total


@pytest.mark.parametrize("kind", [Table, Masked, Tied])
@pytest.mark.parametrize(("clip", "at_once"), [(0.3, 4), (1e6, 100)])
def test_they_are_those_of_batches_of_one(kind, clip, at_once):
    torch.manual_seed(1)
    task = kind({})
    model, data = task.model(), task.rows(9, seed=3)
    gradients = ExampleGradients(task, model, clip, at_once)
    total = torch.zeros(gradients.size)
    source = SampledExamples(task, data, range(9), 1.0, torch.device("cpu"))
    for group in source.read(range(9)):
        gradients.add_to(total, group)
    torch.testing.assert_close(total, one_by_one(task, model, data, clip), rtol=1e-4, atol=1e-6)
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e3, 1e18])
def test_no_example_is_longer_than_the_bound(scale):
    torch.manual_seed(0)
    for _ in range(50):
        parts = [torch.randn(1, 7, 3) * scale, torch.randn(1, 400) * scale]
        norm = float(torch.cat([each.flatten() for each in parts]).double().norm())
        clipped = clipped_sum(parts, 0.7).double().norm()
        assert clipped <= 0.7
        assert clipped == pytest.approx(min(norm, 0.7), rel=1e-5)


@pytest.mark.parametrize(("norm", "clip"), [(1.4e38, 1e-7), (3e38, 1e-6), (3e38, 1e36)])
def test_extreme_numbers_are_not_rounded_above_the_bound(norm, clip):
    total = clipped_sum([torch.full((1, 1), norm)], clip)
    assert clip * (1 - 1e-5) <= float(total) <= clip


@pytest.mark.parametrize("columns", [1, 2, 8])
def test_an_example_changes_a_long_sum_by_no_more_than_the_bound(columns):
    """In float32, small gradients vanish in a sum of 32,768, and do not in one of 32,767."""
    half = 1 << 15
    gradients = torch.zeros(1 + 2 * half, columns)
    gradients[0], gradients[1 : 1 + half] = 0.25, 1.0
    gradients[1 + half :] = -0.49 * torch.finfo(torch.float32).eps * half
    gradients /= columns**0.5
    totals = []
    for scale in (1.0, 0.0):  # zero-out
        gradients[1] *= scale
        totals.append(clipped_sum([gradients], 1.0 + 1e-5))
    assert float((totals[0] - totals[1]).norm()) <= 1.0 + 1e-5


def test_a_long_sum_does_not_overflow():
    """Whether it did would tell whether an example is in it, whatever the noise."""
    total = clipped_sum([torch.full((1000, 1), 3e38)], 1e36)
    assert float(total) == pytest.approx(1e39, rel=1e-5)


def test_a_gradient_that_is_not_finite_adds_nothing():
    parts = [torch.tensor([[1.0, 2.0], [float("inf"), 1.0], [float("nan"), 0.0], [0.0, 0.0]])]
    assert clipped_sum(parts, 10.0).tolist() == [1.0, 2.0]


class Scaled(nn.Module):
    """Has a parameter without dimensions, and one that only the loss uses."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.temperature = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, inputs):
        return self.head(inputs) * self.scale.exp()


class Tempered(Table):
    """Its loss has a learned temperature, and decays the weights."""

    def model(self):
        self.net = Scaled()
        return self.net

    def loss(self, output, target):
        decay = 0.5 * self.net.head.weight.square().sum()
        return super().loss(output / self.net.temperature, target) + decay


@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_parameters_without_dimensions_and_those_of_the_loss_are_trained(clip):
    task = Tempered({})
    torch.manual_seed(1)
    model = task.model()
    data = task.rows(9, seed=3)
    expected = one_by_one(task, model, data, clip)
    gradients = ExampleGradients(task, model, clip, 8)
    source = SampledExamples(task, data, range(9), 1.0, torch.device("cpu"))
    found = gradients.step_sum(source.read(range(9)), torch.device("cpu")).float()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    scale, temperature = torch.split(found, [1, 1, 18, 3])[:2]  # a module's own come first
    assert abs(float(scale)) > 1e-3
    assert abs(float(temperature)) > 1e-3


class Untied(nn.Module):
    """Its second layer has the weight of the first, and is no submodule."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        second = nn.Linear(6, 6, bias=False)
        second.weight = self.first.weight
        self.others = [second]

    def forward(self, inputs):
        return self.head(self.others[0](self.first(inputs).tanh()))


class Listed(nn.Module):
    """Uses a list of its weights."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.weights = [self.first.weight, self.head.weight]

    def forward(self, inputs):
        return (inputs @ self.weights[0].T).tanh() @ self.weights[1].T + self.head.bias


class Decayed(Table):
    """Its loss decays a list of weights."""

    def model(self):
        net = Scaled()
        self.weights = [net.head.weight]
        return net

    def loss(self, output, target):
        return super().loss(output, target) + sum(each.square().sum() for each in self.weights)


def of_model(kind):
    task = Table({})
    task.model = kind
    return task


@pytest.mark.parametrize(
    "kind", [lambda: of_model(Untied), lambda: of_model(Listed), lambda: Decayed({})]
)
def test_a_parameter_that_is_used_by_another_reference_is_refused(kind):
    """Without a word its gradient would lack a part."""
    task = kind()
    gradients = ExampleGradients(task, task.model(), 1.0, 8)
    source = SampledExamples(task, task.rows(3, seed=1), range(3), 1.0, torch.device("cpu"))
    with pytest.raises(TaskError, match="is used by another way than as an attribute"):
        gradients.step_sum(source.read(range(3)), torch.device("cpu"))


class Taught(Table):
    """Adds the outputs of a network that is not trained, and has parameters that could be."""

    def model(self):
        self.teacher = nn.Linear(6, 3)
        return nn.Linear(6, 3)

    def forward(self, model, inputs):
        return model(inputs) * self.teacher(inputs)


def test_a_network_that_is_not_trained_need_not_be_frozen():
    torch.manual_seed(1)
    task = Taught({})
    model = task.model()
    data = task.rows(9, seed=3)
    expected = one_by_one(task, model, data, 0.5)
    source = SampledExamples(task, data, range(9), 1.0, torch.device("cpu"))
    gradients = ExampleGradients(task, model, 0.5, 8)
    found = gradients.step_sum(source.read(range(9)), torch.device("cpu"))
    assert not found.requires_grad
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("when", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_parameter_is_refused(when):
    """It would not be called."""
    task = Table({})
    model = task.model()
    getattr(model[0].weight, when)(lambda changed: None)
    gradients = ExampleGradients(task, model, 1.0, 8)
    source = SampledExamples(task, task.rows(3, seed=1), range(3), 1.0, torch.device("cpu"))
    with pytest.raises(TaskError, match=r"'0\.weight' has a hook on its gradient"):
        gradients.check(source.read(range(3))[0])


class Dropping(Table):
    """Its model has dropout."""

    def model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))


def test_nobody_knows_the_dropout_of_a_step():
    task = Dropping({})
    torch.manual_seed(1)
    gradients = ExampleGradients(task, task.model(), 1.0, 8)
    data = task.rows(9, seed=1)
    source = SampledExamples(task, data, range(9), 1.0, torch.device("cpu"))
    found = []
    for _ in range(2):
        torch.manual_seed(0)  # what everybody knows
        found.append(gradients.step_sum(source.read(range(9)), torch.device("cpu")))
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
    assert float((found[0] - found[1]).norm()) > 0.1


def numbers_of(secret):
    """What all generators draw, PyTorch's those of more than one block, too."""
    seed_secretly(torch.device("cpu"), secret)
    of_others = torch.tensor([random.random(), float(np.random.rand())])
    return torch.cat([of_others, torch.rand(1000), torch.randn(3)])


def test_no_generator_has_a_seed_that_one_could_try(monkeypatch):
    """That of PyTorch has 32 bits on processors, and so has NumPy's."""
    first = numbers_of(5)
    assert torch.equal(first, numbers_of(5))
    for other in (5 + 2**32, 5 + 2**64, 5 + 2**255):
        assert not (first == numbers_of(other)).any()
    bits = []
    monkeypatch.setattr(secrets, "randbits", lambda count: bits.append(count) or 7)
    with secret_numbers(torch.device("cpu")):
        drawn = torch.rand(100_000)
    assert bits == [256]
    assert abs(float(drawn.mean()) - 0.5) < 0.006  # six deviations
    assert abs(float(drawn.var()) * 12 - 1) < 0.02


class OfKind(Table):
    """A table for a model."""

    def __init__(self, kind):
        super().__init__({})
        self.kind = kind

    def model(self):
        return self.kind()


class Recurrent(nn.Module):
    def __init__(self, packed):
        super().__init__()
        self.layer, self.head = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 3)
        self.packed = packed

    def forward(self, inputs):
        rows = inputs.unflatten(1, (3, 2))
        if self.packed:
            lengths = (inputs[:, 0] > 0).long() + 2
            rows = nn.utils.rnn.pack_padded_sequence(rows, lengths, True, enforce_sorted=False)
        return self.head(self.layer(rows)[1][0])


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(checkpoint(self.layers, inputs, use_reentrant=False))


class Reversed(torch.autograd.Function):
    """A layer whose backward pass computes it again, as in reversible networks."""

    @staticmethod
    def forward(ctx, inputs, layer):
        ctx.layer = layer
        ctx.save_for_backward(inputs)
        with torch.no_grad():
            return layer(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return again(ctx, gradient), None


class ReversedInFunctions(torch.autograd.Function):
    """The same, and `torch.func.vmap` takes it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs, layer):
        with torch.no_grad():
            return layer(inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.layer = inputs[1]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, gradient):
        return again(ctx, gradient), None


def again(ctx, gradient):
    (inputs,) = ctx.saved_tensors
    with torch.enable_grad():
        inputs = inputs.detach().requires_grad_()
        ctx.layer(inputs).backward(gradient)
    return inputs.grad


class Reversible(Recomputed):
    def __init__(self, function, hidden=False):
        super().__init__()
        self.function = function
        self.first = nn.Linear(6, 6)
        self.elsewhere = [nn.Linear(6, 8)] if hidden else []
        for each in self.elsewhere:
            each.weight = self.layers[0].weight
            each.bias = self.layers[0].bias

    def forward(self, inputs):
        layer = self.elsewhere[0] if self.elsewhere else self.layers
        return self.head(self.function.apply(self.first(inputs), layer))


class LooksAtTarget(Table):
    def loss(self, output, target):
        return cross_entropy(output, target) if target.max() > 0 else -output.sum(1)


NOT_TOGETHER = {
    "GRU": lambda: OfKind(lambda: Recurrent(packed=False)),
    "packed sequence": lambda: OfKind(lambda: Recurrent(packed=True)),
    "activations computed again": lambda: OfKind(Recomputed),
    "reversible": lambda: OfKind(lambda: Reversible(Reversed)),
    "reversible by functions": lambda: OfKind(lambda: Reversible(ReversedInFunctions)),
    "looks at values": lambda: Branching({}),
    "looks at the target": lambda: LooksAtTarget({}),
}


@pytest.mark.parametrize("name", NOT_TOGETHER)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_vmap_cannot_compute_is_computed_one_after_the_other(name):
    """The same clipped gradients as of batches of one."""
    torch.manual_seed(1)
    task = NOT_TOGETHER[name]()
    model = task.model()
    data = task.rows(9, seed=1)
    gradients = ExampleGradients(task, model, 0.3, 4)
    source = SampledExamples(task, data, range(9), 1.0, torch.device("cpu"))
    gradients.check(source.check(range(4))[0])
    expected = one_by_one(task, model, data, 0.3)
    for number in (0, 1):  # with the comparisons, and without
        gradients._steps = number
        found = gradients.step_sum(source.read(range(9)), torch.device("cpu"))
        torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-6)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(self.words(inputs.abs().long().clamp(max=4)).sum(1))


def test_sparse_gradients_are_those_of_dense_ones():
    found = []
    for sparse in (True, False):
        torch.manual_seed(1)
        task = OfKind(Words)
        model = task.model()
        model.words.sparse = sparse
        gradients = ExampleGradients(task, model, 0.3, 4)
        source = SampledExamples(task, task.rows(9, seed=1), range(9), 1.0, torch.device("cpu"))
        gradients.check(source.check(range(4))[0])
        found.append(gradients.step_sum(source.read(range(9)), torch.device("cpu")))
    torch.testing.assert_close(*found)


class OfParameters(Recomputed):
    """Adds a term for each weight that is a parameter, which copies are not."""

    def forward(self, inputs):
        weights = (self.head.weight, self.layers[0].weight)
        added = sum(each.square().sum() for each in weights if isinstance(each, nn.Parameter))
        return self.head(self.layers(inputs)) + added * inputs[:, :3]


OTHER_THAN_PLAIN = {
    "asks for parameters": (OfParameters, "is not that of plain training"),
    "hidden and reversible": (
        lambda: Reversible(Reversed, hidden=True),
        r"'layers\.0\.weight' is used by another way",
    ),
}


@pytest.mark.parametrize("name", OTHER_THAN_PLAIN)
def test_a_gradient_that_is_not_that_of_plain_training_is_refused(name):
    kind, why = OTHER_THAN_PLAIN[name]
    task = OfKind(kind)
    gradients = ExampleGradients(task, task.model(), 1.0, 8)
    source = SampledExamples(task, task.rows(3, seed=1), range(3), 1.0, torch.device("cpu"))
    with pytest.raises(TaskError, match=why):
        gradients.check(source.check(range(3))[0])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_activations_are_computed_again_with_the_parameters_of_the_reference():
    """Training changes those of the model, and the first example is compared all the same."""
    torch.manual_seed(1)
    task = OfKind(Recomputed)
    model = task.model()
    data = task.rows(9, seed=1)
    gradients = ExampleGradients(task, model, 0.3, 4)
    source = SampledExamples(task, data, range(9), 1.0, torch.device("cpu"))
    gradients.check(source.check(range(4))[0])
    for _ in range(2):
        gradients._steps = 0
        gradients.put(gradients.step_sum(source.read(range(9)), torch.device("cpu")))
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.1 * each.grad


class Greedy(nn.Linear):
    """Has too little memory for several examples."""

    def __init__(self, error):
        super().__init__(6, 3)
        self.error = error

    def forward(self, inputs):
        if torch._C._functorch.is_functorch_wrapped_tensor(inputs):
            raise self.error
        return super().forward(inputs)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 20 bytes"),
    ],
)
def test_lack_of_memory_is_told_and_is_no_model_that_vmap_cannot_compute(error):
    task = OfKind(lambda: Greedy(error))
    source = SampledExamples(task, task.rows(3, seed=1), range(3), 1.0, torch.device("cpu"))
    gradients = ExampleGradients(task, task.model(), 1.0, 8)
    with pytest.raises(TaskError, match="to allocate 20"):
        gradients.add_to(torch.zeros(gradients.size), source.read([0, 1])[0])


def test_what_fails_alone_too_is_told_as_before():
    task = OfKind(lambda: nn.Linear(5, 3))
    source = SampledExamples(task, task.rows(3, seed=1), range(3), 1.0, torch.device("cpu"))
    gradients = ExampleGradients(task, task.model(), 1.0, 8)
    with pytest.raises(TaskError, match=r"single examples \(torch.func.vmap\) failed"):
        gradients.add_to(torch.zeros(gradients.size), source.read([0, 1])[0])


class Negatives(Table):
    """Tells the examples of a batch from each other."""

    def loss(self, output, target):
        return cross_entropy(output @ output.T, torch.arange(len(output)))


def test_a_loss_that_compares_examples_is_refused():
    """Alone each has a loss of 0, and nothing but noise would be trained."""
    task = Negatives({})
    source = SampledExamples(task, task.rows(5, seed=1), range(5), 1.0, torch.device("cpu"))
    gradients = ExampleGradients(task, task.model(), 1.0, 8)
    with pytest.raises(TaskError, match=r"an example alone has no gradient.*nothing would"):
        gradients.check(source.check(range(4))[0])


class Worded(Table):
    """Its batches have tensors and text."""

    def collate(self, rows):
        return (rows[0][0][None], f"the sum is {float(rows[0][0].sum())}"), rows[0][1][None]


def test_no_example_is_computed_with_what_is_not_a_tensor_of_another():
    task = Worded({})
    data = task.rows(3, seed=1)
    source = SampledExamples(task, data, range(3), 1.0, torch.device("cpu"))
    groups = source.read(range(3))
    assert [each.one[0][1] for each in groups] == [f"the sum is {float(x.sum())}" for x, _ in data]


@dataclasses.dataclass
class Fields:
    """One of both has the numbers."""

    even: Any = None
    odd: Any = None


class Keyed(Table):
    """Its examples have their numbers under different keys."""

    kind: Any = dict

    def collate(self, rows):
        name = "even" if float(rows[0][1]) > 0 else "odd"
        return self.kind(**{name: rows[0][0][None]}), rows[0][1][None]


@pytest.mark.parametrize("kind", [dict, UserDict, Fields])
def test_examples_with_other_keys_are_not_one_group(kind):
    task = Keyed({})
    task.kind = kind
    inputs, signs = torch.ones(4, 3), torch.tensor([1.0, -1.0, 1.0, -1.0])
    data = torch.utils.data.TensorDataset(inputs, signs)
    groups = SampledExamples(task, data, range(4), 1.0, torch.device("cpu")).read(range(4))
    firsts = [dataclasses.asdict(each.one[0]) if kind is Fields else each.one[0] for each in groups]
    names = [[name for name, value in first.items() if value is not None] for first in firsts]
    assert names == [["even"], ["odd"]]
    assert [len(each) for each in groups] == [2, 2]
