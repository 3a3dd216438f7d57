"""Which examples are in a step: Poisson sampling, and how they are read."""

import collections
import dataclasses
import enum
import hashlib
import math
import random
import secrets
from typing import Any

import numpy as np
import pytest
import torch
from tests.datacenter.tasks import Table
from torch.utils.data import Dataset, TensorDataset

from isthmus.errors import TaskError
from isthmus_privacy.dp_sgd.examples import SampledExamples
from isthmus_privacy.dp_sgd.sampling import poisson_sample

STEPS, EXAMPLES, PROBABILITY = 4000, 30, 0.2


def draws(examples=range(EXAMPLES)):
    """(STEPS, EXAMPLES): whether each example was chosen in each step; fixed keys."""
    chosen = torch.zeros(STEPS, EXAMPLES)
    for step in range(STEPS):
        key = hashlib.sha256(str(step).encode()).digest()
        chosen[step, poisson_sample(examples, PROBABILITY, key)] = 1
    return chosen


def test_every_example_is_chosen_independently_with_the_probability():
    """Each bound is exceeded by a right sampler with a probability below 1e-6 (keys are fixed)."""
    chosen = draws()
    deviation = math.sqrt(PROBABILITY * (1 - PROBABILITY))
    each = (chosen.mean(0) - PROBABILITY) * math.sqrt(STEPS) / deviation
    assert each.abs().max() < 5.6  # 30 normal numbers
    standard = (chosen - PROBABILITY) / deviation
    pairs = (standard.T @ standard / math.sqrt(STEPS)).triu(1)
    assert pairs.abs().max() < 6.2  # 435 pairs of examples
    steps = (standard[1:] * standard[:-1]).sum() / math.sqrt((STEPS - 1) * EXAMPLES)
    assert abs(steps) < 5  # an example in one step and the next


def test_sizes_of_steps_are_binomial():
    """Their chi-square statistic is above its bound with a probability of 1e-6."""
    sizes = draws().sum(1).long()
    counts = torch.bincount(sizes, minlength=EXAMPLES + 1)
    expected = torch.tensor(
        [
            STEPS * math.comb(EXAMPLES, k) * PROBABILITY**k * (1 - PROBABILITY) ** (EXAMPLES - k)
            for k in range(EXAMPLES + 1)
        ]
    )
    inner = slice(2, 12)  # 10 sizes, and all others together
    observed = torch.cat([counts[inner], counts.sum()[None] - counts[inner].sum()])
    right = torch.cat([expected[inner], STEPS - expected[inner].sum()[None]])
    assert float(((observed - right) ** 2 / right).sum()) < 47  # 10 degrees of freedom


def test_ranks_choose_among_their_own():
    own = [range(rank, EXAMPLES, 3) for rank in range(3)]
    assert sorted(poisson_sample(own[0], 1.0) + poisson_sample(own[1], 1.0)) == sorted(
        [*own[0], *own[1]]
    )
    assert set(poisson_sample(own[2], 0.5)) <= set(own[2])


def test_without_a_key_every_draw_is_new():
    assert poisson_sample(range(200), 0.5) != poisson_sample(range(200), 0.5)


class Uneven(Dataset):
    """Sequences of two lengths, with a name."""

    def __getitem__(self, index):
        return {"x": torch.full((2 + index % 2,), float(index)), "kind": "odd" if index % 2 else ""}


def test_examples_of_equal_shapes_are_read_together_and_collated_alone():
    source = SampledExamples(Table({}), Uneven(), range(6), 1.0, torch.device("cpu"))
    (groups,) = source.batches(7, 8)
    assert [[row.tolist() for row in group.tensors] for group in groups] == [
        [[[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]],
        [[[1.0] * 3, [3.0] * 3, [5.0] * 3]],
    ]
    rows = next(iter(groups[1].parts(2)))
    batch = groups[1].batch_of([each[1] for each in rows])
    assert batch["x"].tolist() == [[3.0] * 3]
    assert batch["kind"] == ["odd"]


def test_a_tensor_dataset_is_read_at_once():
    data = TensorDataset(torch.arange(5.0)[:, None], torch.arange(5))
    source = SampledExamples(Table({}), data, range(5), 1.0, torch.device("cpu"))
    (group,) = source.read([3, 1])
    assert [each.flatten().tolist() for each in group.tensors] == [[3.0, 1.0], [3, 1]]
    assert source.read([]) == []


class Numbers(Dataset):
    """Examples (1) of ones, less what a kind of data keeps of those that were read before."""

    def __init__(self, kind):
        self.kind = kind
        self.kept = torch.zeros(1)
        self.cache = {}
        self.numbers = np.random.default_rng(0)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        value = torch.full((1,), float(index + 1))
        if self.kind == "last":
            before = self.kept
            self.kept = value
            return value - before
        if self.kind == "largest":  # the first one is the least: it does not change the second time
            self.kept = torch.maximum(self.kept, value)
            return value / self.kept
        if self.kind == "own generator":
            return value * float(self.numbers.random())
        if self.kind == "cached":
            return self.cache.setdefault(index, value)
        if self.kind == "augmented":
            return value * torch.rand(1) * float(np.random.rand()) * random.random()
        if self.kind == "augmented until it fits":
            while (drawn := torch.rand(1)) > 0.9 / (1 + index) or random.random() > 0.5:
                np.random.rand()
            return value * drawn * float(np.random.rand()) * random.random()
        if self.kind == "reused memory":
            return self.kept.copy_(value)
        return value


class Collating(Table):
    """Centres by the last examples that were collated."""

    kept = 0.0

    def collate(self, rows):
        batch = super().collate(rows)
        before = self.kept
        self.kept = batch
        return batch - before


class Alone(Table):
    """Does not copy a single row."""

    def collate(self, rows):
        return rows[0][None] if len(rows) == 1 else super().collate(rows)


class OfArrays(Table):
    """Leaves it to `forward()` to make tensors."""

    def collate(self, rows):
        return {"x": super().collate(rows), "array": np.ones(3)}


def source_of(kind):
    if kind == "arrays":
        return SampledExamples(OfArrays({}), Numbers(kind), range(6), 1.0, torch.device("cpu"))
    if kind == "reused memory":
        return SampledExamples(Alone({}), Numbers(kind), range(6), 1.0, torch.device("cpu"))
    task = Collating({}) if kind == "collate" else Table({})
    return SampledExamples(task, Numbers(kind), range(6), 1.0, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["last", "largest", "own generator", "collate"])
def test_data_that_keep_something_are_refused(kind):
    with pytest.raises(TaskError, match="is another one when it is read again after others"):
        source_of(kind).check(range(4))


@pytest.mark.parametrize("kind", ["plain", "cached", "augmented"])
def test_data_of_examples_alone_are_read_as_before(kind, monkeypatch):
    monkeypatch.setattr(secrets, "randbits", lambda count: 7)
    found = []
    for read in (lambda source: source.check(range(4)), lambda source: source.read(range(4))):
        seed_everything(7)
        (group,) = read(source := source_of(kind))
        (groups,) = source.batches(0, 1)
        found.append([group.tensors[0], groups[0].tensors[0], torch.rand(1)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", ["augmented", "augmented until it fits"])
def test_what_an_example_draws_changes_nothing_of_others(kind, monkeypatch):
    """Nor of what is drawn later: neither by what it draws nor by whether it is there."""
    found = []
    for indices in ([0, 1, 2, 3], [5, 1, 2, 3], [1, 2, 3]):
        seed_everything(7)
        with monkeypatch.context() as patched:
            patched.setattr(secrets, "randbits", lambda count: 7)
            (group,) = source_of(kind).read(indices)
        drawn = torch.rand(1), torch.tensor(np.random.rand()), torch.tensor(random.random())
        found.append([group.tensors[0][-3:], *drawn])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_each_example_of_each_step_draws_what_nobody_knows():
    found = []
    for _ in range(2):
        seed_everything(7)  # what everybody knows
        (group,) = source_of("augmented").read([1, 2])
        found += (group.tensors[0].flatten() / torch.tensor([2.0, 3.0])).tolist()
    assert len(set(found)) > 2  # two of four such numbers are equal once in a million runs


def test_examples_are_copied_from_memory_that_is_used_again():
    (group,) = source_of("reused memory").check([3, 1, 0])
    assert group.tensors[0].flatten().tolist() == [4.0, 2.0, 1.0]


def test_what_is_neither_tensor_nor_number_nor_text_is_refused():
    with pytest.raises(TaskError, match=r"has a numpy\.ndarray, which is not compared when"):
        source_of("arrays").check(range(2))


class Label(str):
    """Text with an attribute."""


class Secret(str):
    """Text that always looks the same."""

    def __repr__(self):
        return "Secret"


class Attributed(dict):
    """Its keys are attributes, too."""

    def __init__(self, items):
        super().__init__(items)
        self.__dict__ = self


class Listed(list):
    """A list with attributes."""


class Slotted(dict):
    """Has an attribute that is in no `__dict__`."""

    __slots__ = ("scale",)


@dataclasses.dataclass
class Assigned:
    """A field that is assigned afterwards."""

    x: Any
    scale: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass
class Derived:
    """A field that follows from another one."""

    x: Any
    scale: Any = dataclasses.field(init=False)

    def __post_init__(self):
        self.scale = self.x.abs().sum()


class Kind(enum.Enum):
    ONE = 1


def with_scale(value, scale):
    value.scale = scale
    return value


def encoded(x):
    """As a tokenizer returns it."""
    from transformers import BatchEncoding

    found = BatchEncoding({"x": x})
    found._encodings = [f"what was made of {float(x.sum())}"]
    return found


HIDDEN = {
    "mapping": lambda x: with_scale(collections.OrderedDict(x=x), x.sum()),
    "user's mapping": lambda x: with_scale(collections.UserDict(x=x), x.sum()),
    "slot": lambda x: with_scale(Slotted(x=x), x.sum()),
    "encoding": lambda x: with_scale(encoded(x), x.sum()),
    "keys that are attributes": lambda x: Attributed({"x": x}),
    "text": lambda x: {"x": x, "text": with_scale(Label("a"), x.sum())},
    "text that looks the same": lambda x: {"x": x, "text": Secret(float(x.sum()))},
    "list": lambda x: with_scale(Listed([x]), x.sum()),
    "field": lambda x: with_scale(Assigned(x), x.sum()),
    "field within": lambda x: [{"x": [with_scale(Assigned(x), x.sum())]}],
}
PLAIN = {
    "mapping": lambda x: collections.OrderedDict(x=x),
    "mapping of defaults": lambda x: collections.defaultdict(list, x=x),
    "encoding": encoded,
    "field that follows": Derived,
    "numbers of NumPy": lambda x: {"x": x, "number": np.float64(0.5), "text": np.str_("a")},
    "member": lambda x: {"x": x, "kind": Kind.ONE},
}


def collated(kind):
    task = Table({})
    task.collate = lambda rows: kind(rows[0][None])
    return SampledExamples(task, Numbers("plain"), range(6), 1.0, torch.device("cpu"))


@pytest.mark.parametrize("nested", [False, True])
def test_a_key_of_a_batch_that_may_have_attributes_is_refused(nested):
    def keyed(x):
        key = with_scale(Label("x"), x.sum())
        return {(1, key) if nested else key: x}

    with pytest.raises(TaskError, match=r"has a key of type \S+Label"):
        collated(keyed).read(range(3))


def test_numbers_in_slots_are_those_of_each_example():
    source = collated(lambda x: with_scale(Slotted(x=x), float(x)))
    assert [group.one.scale for group in source.read(range(3))] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "made",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        lambda x: torch.nested.nested_tensor([*x]),
        lambda x: torch.nested.nested_tensor([*x], layout=torch.jagged),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: x.to("meta"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_that_examples_cannot_be_put_together_of_is_refused(made):
    """In a sentence: such as that a bag of words is sparse."""
    with pytest.raises(TaskError, match="is sparse, nested, quantized or without values"):
        collated(lambda x: made(x.expand(1, 2))).check(range(3))


@pytest.mark.parametrize("kind", HIDDEN)
def test_what_a_batch_has_besides_its_items_is_refused(kind):
    """A group of examples has the structure of its first one, and would have its attributes."""
    with pytest.raises(TaskError, match=r"with the attribute '\w+'|which is not compared"):
        collated(HIDDEN[kind]).read(range(4))


@pytest.mark.parametrize("kind", PLAIN)
def test_usual_batches_are_one_group(kind):
    (group,) = collated(PLAIN[kind]).read(range(4))
    assert len(group) == 4
    assert getattr(group.one, "_encodings", None) is None


def test_examples_whose_batches_have_other_attributes_are_not_one_group():
    source = collated(lambda x: with_scale(collections.OrderedDict(x=x), float(x.sum())))
    assert [group.one.scale for group in source.read(range(4))] == [1.0, 2.0, 3.0, 4.0]


def test_data_that_begin_to_keep_something_are_refused_in_a_later_step():
    source = source_of("plain")
    source.check(range(4))
    steps = source.batches(0, 65)
    next(steps)
    source._dataset.kind = "largest"
    with pytest.raises(TaskError, match="is another one when it is read again after others"):
        list(steps)


def seed_everything(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
