"""What a model keeps between calls, and what it computes for one example among others."""

import array
import collections
import contextlib
import ctypes
import functools
import io
import queue
import random
import secrets
import sys
import types
import weakref

import numpy as np
import pytest
import torch
from tests.datacenter.tasks import Table
from tests.privacy.dp_sgd import mixing_models
from tests.privacy.dp_sgd.mixing_models import Layer, Mixing
from torch import nn

from isthmus.errors import TaskError
from isthmus_privacy.dp_sgd import kept_state
from isthmus_privacy.dp_sgd.examples import ExampleGroup, SampledExamples
from isthmus_privacy.dp_sgd.gradients import ExampleGradients
from isthmus_privacy.dp_sgd.isolation import (
    GeneratorStates,
    check_same,
    replaced,
    secret_numbers,
)
from isthmus_privacy.dp_sgd.kept_state import KeptState

CPU = torch.device("cpu")
LAST = 0.0


def groups_of(task, count):
    data = task.rows(count, seed=3)
    return SampledExamples(task, data, range(count), 1.0, CPU).read(range(count))


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("running mean, attribute", "model.1.kept"),
        ("running mean, buffer", "model.1.mean"),
        ("running mean, data", "model.1.mean"),
        ("running mean, copied data", "model.1.mean"),
        ("running mean, array", "function.NUMBERS"),
        ("list of a module", "function.KEPT"),
        ("dictionary of a module", "function.KEPT_BY_KEY.last"),
        ("closure", "function.kept"),
        ("class", "model.1.kept"),
        ("default", "function"),
        ("function", "function.kept"),
        ("namespace", "function.space.kept"),
        ("thread", "function.LOCAL.kept"),
        ("context variable", "function.VARIABLE"),
        ("deque", "function.kept[0]"),
        ("queue", "model.1.queue"),
        ("counter", "model.1.kept"),
        ("own generator", "model.1.kept"),
        ("iterator", "function.numbers"),
        ("hook", "kept"),
        ("target network", "target.weight"),
        ("running loss", "task.kept"),
        ("last output", "task.settings.last"),
    ],
)
def test_a_change_is_refused_with_its_place(kind, place):
    task = mixing_models.task_of(kind)
    model = task.model()
    inputs, _ = task.rows(3, seed=1)[:3]
    state = KeptState(task, model, closely=True)
    task.loss(task.forward(model, inputs), torch.zeros(3, dtype=torch.long))
    with pytest.raises(TaskError, match=r"forward\(\) or loss\(\) changes '") as caught:
        state.check()
    assert place in str(caught.value)


class Config(dict):
    """A dictionary with attributes, as configurations of models are."""

    last = 0.0


class Own(collections.UserDict):
    """A mapping that is no dictionary of Python."""


def installed():
    """A module as if it were installed, of a class that is not the task's."""
    module = types.ModuleType("installed")
    module.__file__ = "/site-packages/installed.py"

    def begin(self):
        self.last = 0.0
        self.seen = []

    module.Scaler = type("Scaler", (), {"__init__": begin, "__module__": "installed"})
    module.last = module.Scaler.last = 0.0
    return module


def in_a_cached_function():
    kept = functools.lru_cache(list)
    return lambda number: kept().append(number)


def in_a_generator():
    def mean():
        total = 0.0
        while True:
            total += yield total

    running = mean()
    next(running)
    return running.send


def in_a_queue():
    kept = queue.SimpleQueue()
    return lambda number: kept.put(number)


def in_a_bound_method():
    kept = [0.0]
    return functools.partial(kept.__setitem__, 0)


def in_a_weak_reference():
    class Kept:
        last = 0.0

    kept = Kept()
    sys.modules["imported_late"].held = kept
    reference = weakref.ref(kept)
    return lambda number: setattr(reference(), "last", number)


def in_a_module_that_is_imported_late():
    def put(number):
        import imported_late

        imported_late.LAST = number

    return put


def in_bytes():
    kept = io.BytesIO()
    return lambda number: kept.write(str(number).encode())


def in_a_library():
    return lambda number: setattr(sys.modules["installed"], "last", number)


def in_a_class_of_a_library():
    return functools.partial(setattr, sys.modules["installed"].Scaler, "last")


def in_an_object_of_a_library():
    return functools.partial(setattr, sys.modules["installed"].Scaler(), "last")


def in_an_object_of_pytorch():
    return functools.partial(setattr, torch.distributions.Normal(0.0, 1.0), "last")


def in_a_container_of_a_library():
    return sys.modules["installed"].Scaler().seen.append


def in_a_global_variable_that_no_code_names():
    return lambda number: globals().__setitem__("LAST", number)


def in_a_view_of_a_large_tensor():
    kept = torch.zeros(3, 1 << 16)
    return lambda number: kept.numpy().__setitem__((1, 7), number)


def in_a_large_array():
    return in_(np.zeros((3, 1 << 16)), (1, 7))


def in_(kept, place):
    return lambda number: kept.__setitem__(place, number)


@pytest.mark.parametrize(
    "make",
    [
        in_a_cached_function,
        in_a_generator,
        in_a_queue,
        in_a_bound_method,
        in_a_weak_reference,
        in_a_module_that_is_imported_late,
        lambda: in_(collections.ChainMap({"last": 0.0}), "last"),
        lambda: in_(Own(last=0.0), "last"),
        lambda: in_([0.0] * 5000, 2500),
        lambda: in_(dict.fromkeys(range(5000), 0.0), 2500),
        lambda: in_(array.array("d", [0.0]), 0),
        lambda: in_((ctypes.c_double * 1)(), 0),
        lambda: in_(np.array([None]), 0),
        lambda: functools.partial(setattr, Config(), "last"),
        in_bytes,
        in_a_library,
        in_a_class_of_a_library,
        in_an_object_of_a_library,
        in_an_object_of_pytorch,
        in_a_container_of_a_library,
        in_a_global_variable_that_no_code_names,
        in_a_view_of_a_large_tensor,
        in_a_large_array,
    ],
)
def test_a_number_is_noticed_wherever_objects_of_python_keep_it(make, monkeypatch):
    """Of examples, and used only in later steps: no comparison of results would meet it."""
    monkeypatch.setitem(sys.modules, "imported_late", types.ModuleType("imported_late"))
    sys.modules["imported_late"].LAST = 0.0
    monkeypatch.setitem(sys.modules, "installed", installed())
    put = make()

    def function(self, hidden):
        put(float(hidden.detach().mean()))
        return hidden

    function.installed = sys.modules["installed"]  # as if it had imported it
    task = Mixing(lambda: Layer(function))
    model = task.model()
    inputs, _ = task.rows(3, seed=1)[:3]
    state = KeptState(task, model, closely=True)
    state.check()
    task.forward(model, inputs)
    with pytest.raises(TaskError, match=r"forward\(\) or loss\(\) changes '"):
        state.check()


def test_what_is_not_changed_is_not_refused():
    task = Table({"dropout": 0.5})
    model = task.model()
    inputs, target = task.rows(3, seed=1)[:3]
    state = KeptState(task, model, closely=True)
    task.loss(task.forward(model, inputs), target).sum().backward()
    state.check()
    with torch.no_grad():
        model[0].weight += 0.0
    with pytest.raises(TaskError, match=r"changes 'model.0.weight'"):
        state.check()


def keep(self, hidden):
    self.kept = hidden.detach()
    return hidden


@pytest.mark.parametrize("examples", [1, 3])
def test_a_tensor_of_a_step_that_is_kept_is_refused(examples):
    """Also if it is never used: it is one that `torch.func` takes for one of the next step."""
    task = Mixing(lambda: Layer(keep))
    gradients = ExampleGradients(task, task.model(), 1.0, 8)
    with pytest.raises(TaskError, match=r"changes 'model.1.kept'"):
        gradients.step_sum(groups_of(task, examples), CPU)
    with pytest.raises(TaskError, match=r"keeps a tensor of an example in 'model.1.kept'"):
        gradients.step_sum(groups_of(task, examples), CPU)


@pytest.mark.parametrize("rows", [1, 4])
def test_an_assignment_of_data_is_refused(rows):
    """PyTorch ends the process at the next use of the tensor."""
    task = mixing_models.task_of("running mean, data")
    gradients = ExampleGradients(task, task.model(), 1.0, 8)
    with pytest.raises(TaskError, match=r"assigns the data of a tensor.*keep nothing between"):
        gradients.check(groups_of(task, rows)[0])


def test_comparisons_draw_no_random_numbers(monkeypatch):
    """Or training with them would not be the same."""
    monkeypatch.setattr(secrets, "randbits", lambda count: 3)
    task = Table({"dropout": 0.5})
    gradients = ExampleGradients(task, task.model(), 1.0, 8)
    groups = groups_of(task, 5)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    before = GeneratorStates(CPU).observed()
    gradients.check(groups[0])
    check_same(before, GeneratorStates(CPU).observed())
    compared = gradients.step_sum(groups, CPU)
    check_same(before, GeneratorStates(CPU).observed())
    with secret_numbers(CPU):
        alone = gradients.zeros(CPU)
        gradients.add_to(alone, groups[0])
    assert torch.equal(compared, alone)
    check_same(before, GeneratorStates(CPU).observed())


def test_others_are_replaced_and_one_stays():
    rows = [torch.randn(4, 3), torch.tensor([3, 1, 0, 2])]
    kinds = list(replaced(rows, 2, made_up=True))
    assert len(kinds) == 7
    for values, _ in kinds:
        assert torch.equal(values[2], rows[0][2])
    for values, target in kinds[:5]:
        assert not (values[[0, 1, 3]] == rows[0][[0, 1, 3]]).all(1).any()
        assert set(target.tolist()) <= {0, 1, 2, 3}
    large = [float(values.abs().max()) > 1e4 for values, _ in kinds]
    assert large == [False, False, False, True, False, False, False]
    has_nan = [bool(values.isnan().any()) for values, _ in kinds]
    assert has_nan == [False, False, False, False, True, False, False]
    whole = [target.tolist() for _, target in kinds[5:]]
    assert whole == [[-1024, -1024, 0, -1024], [2**15, 2**15, 0, 2**15]]
    assert list(replaced([torch.zeros(1, 2)], 0, made_up=True)) == []


@pytest.mark.parametrize("kept", [2.0**-15, 2.0**-17])
def test_bits_must_be_equal_unless_a_repetition_has_others(kept):
    one, other = {"the loss": torch.ones(3)}, {"the loss": torch.ones(3) + kept}
    with pytest.raises(TaskError, match="the loss of an example changes with the other examples"):
        check_same(one, other)
    with pytest.raises(TaskError, match="the loss"):
        check_same(one, other, one)
    if kept < 2.0**-16:
        check_same(one, other, {"the loss": torch.ones(3) - 2.0**-20})
    not_finite = {"the loss": torch.tensor([float("nan"), 1.0])}
    check_same(not_finite, {"the loss": not_finite["the loss"].clone()})


KEPT_CALLS = []


@pytest.fixture
def calls():
    """What changes models in these tests; empty before and after."""
    yield KEPT_CALLS
    KEPT_CALLS.clear()


class Counting(Mixing):
    """Keeps something from some call on."""

    def model(self):
        kept = []

        class Late(nn.Module):
            def forward(self, hidden):
                if KEPT_CALLS:
                    kept.append(1)
                return hidden

        return nn.Sequential(nn.Linear(6, 8), Late(), nn.Linear(8, 3))


def test_what_begins_in_training_is_refused(calls):
    task = Counting(nn.Identity)
    gradients = ExampleGradients(task, task.model(), 1.0, 8)
    groups = groups_of(task, 3)
    gradients.check(groups[0])
    for _ in range(2):
        gradients.step_sum(groups, CPU)
    calls.append(1)
    with pytest.raises(TaskError, match=r"changes 'model.1.forward.kept"):
        gradients.step_sum(groups, CPU)


def test_a_mixing_that_begins_in_training_is_found(calls):
    """`torch.func` separates examples, except through rules that a task writes itself."""

    class Mixed(torch.autograd.Function):
        @staticmethod
        def forward(values):
            return values * 1.0

        @staticmethod
        def setup_context(context, inputs, output):
            pass

        @staticmethod
        def backward(context, gradient):
            return gradient

        @staticmethod
        def vmap(info, dims, values):
            return (values - values.mean(0) if KEPT_CALLS else values * 1.0), 0

    task = Mixing(lambda: Layer(lambda self, hidden: Mixed.apply(hidden)))
    gradients = ExampleGradients(task, task.model(), 1.0, 8)
    groups = groups_of(task, 5)
    gradients.check(groups[0])
    gradients.step_sum(groups, CPU)
    calls.append(1)
    gradients._steps = 64
    with pytest.raises(TaskError, match="of an example changes"):
        gradients.step_sum(groups, CPU)


class Levelled(Table):
    """Subtracts a running mean in forward(), which collate() keeps of what it has read."""

    def __init__(self, kept, *, uses):
        super().__init__({})
        self.kept = kept
        self.uses = uses

    def model(self):
        return nn.Linear(6, 3)

    def collate(self, rows):
        inputs, target = super().collate(rows)
        self.kept["mean"] = 0.9 * self.kept["mean"] + 0.1 * inputs.mean(0)
        self.kept["seen"] = self.kept.get("seen", 0) + len(rows)
        return inputs, target

    def forward(self, model, inputs):
        return model(inputs - self.kept["mean"] if self.uses else inputs)


@pytest.mark.parametrize("uses", [True, False])
def test_what_collate_keeps_is_refused_if_it_changes_what_is_computed(uses):
    """One example more would change the gradients of all others, by 15 bounds of 40."""
    task = Levelled({"mean": torch.zeros(6)}, uses=uses)
    gradients = ExampleGradients(task, task.model(), 1.0, 8)
    source = SampledExamples(task, task.rows(40, seed=3), range(40), 0.2, CPU)
    expected = contextlib.nullcontext()
    if uses:
        expected = pytest.raises(TaskError, match=r"what collate\(\) or the dataset keeps")
    with expected:
        gradients.check(source.check(range(4))[0])
        for groups in source.batches(0, 3):
            gradients.step_sum(groups, CPU)


class InAFile(Mixing):
    """Keeps a number where no object of Python has it, as long as another file says so."""

    def __init__(self, folder):
        super().__init__(nn.Identity)
        self.kept = folder / "kept"
        self.counts = folder / "counts"
        self.kept.write_text("0")

    def forward(self, model, inputs):
        number = int(self.kept.read_text())
        if self.counts.exists():
            self.kept.write_text(str(number + 1))
        return model(inputs) * (1 + number)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("counts", [None, "before", "while"])
def test_what_is_kept_in_a_file_is_refused(tmp_path, counts, batch):
    """While it changes, and if it has changed before, in a step that is not compared."""
    task = InAFile(tmp_path)
    gradients = ExampleGradients(task, task.model(), 1.0, 8)
    group = groups_of(task, 6)[0]
    gradients.check(group)
    if counts is not None:
        task.counts.touch()
    for number in (1, 64):
        gradients._steps = number
        rows = [each[number % 3 :][:batch] for each in group.tensors]
        if number == 1 or counts is None:
            gradients.step_sum([ExampleGroup(group.one, rows)], CPU)
            if counts == "before":
                task.counts.unlink()
            continue
        with pytest.raises(TaskError, match=r"computed again after others: .* perhaps"):
            gradients.step_sum([ExampleGroup(group.one, rows)], CPU)


def test_reference_is_renewed_when_buffers_are_replaced():
    """As at the start of a round; parameters change in each step."""
    task = Mixing(lambda: Layer(lambda self, hidden: hidden - self.mean, mean=torch.zeros(8)))
    model = task.model()
    gradients = ExampleGradients(task, model, 1.0, 8)
    groups = groups_of(task, 3)
    gradients.check(groups[0])
    expected = gradients._reference._expected
    for change in (0.0, 0.5):
        with torch.no_grad():
            model[1].mean += change
            model[0].weight += 0.1
        gradients._steps = 64
        gradients.step_sum(groups, CPU)
        assert (gradients._reference._expected is expected) == (change == 0)


def test_group_of_one_example_is_compared_with_made_up_others():
    task = Mixing(lambda: nn.Identity())
    one = groups_of(task, 1)[0]
    assert isinstance(one, ExampleGroup)
    ExampleGradients(task, task.model(), 1.0, 8).check(one)


class LevelledLater(Table):
    """Keeps a running mean of what it has read in a buffer, once it has read some rows."""

    def model(self):
        self.net = nn.Linear(6, 3)
        self.net.register_buffer("mean", torch.zeros(6))
        self.read = 0
        return self.net

    def collate(self, rows):
        self.read += 1
        if self.read > 20:
            self.net.mean.lerp_(rows[0][0], 0.1)
        return super().collate(rows)

    def forward(self, model, inputs):
        return model(inputs - model.mean)


def test_what_collate_keeps_in_a_buffer_is_refused_in_every_step():
    """Also in steps that are not compared: one example changed sums of others by 10 bounds."""
    task = LevelledLater({})
    source = SampledExamples(task, task.rows(40, seed=3), range(40), 0.2, CPU)
    source.watch(task.model())
    source.check(range(4))
    source._steps = 1
    with pytest.raises(TaskError, match=r"reading an example changes 'model.mean'"):
        for _ in source.batches(0, 10):
            pass


class Deep:
    """What a task keeps far from itself."""

    def __init__(self):
        self.inner = types.SimpleNamespace(part=types.SimpleNamespace(kept={}))


@pytest.mark.parametrize("keeper", ["model", "task"])
def test_data_of_many_objects_do_not_hide_what_is_kept(monkeypatch, keeper):
    """They are looked at last, as only so many objects are."""
    monkeypatch.setattr(kept_state, "_MOST_OBJECTS", 2000)
    task = Table({})
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 3)))
    model[0][0].kept = {}
    task.dialogues = [[[float(turn)] for turn in range(40)] for _ in range(60)]
    task.deep = Deep()
    kept = model[0][0].kept if keeper == "model" else task.deep.inner.part.kept
    state = KeptState(task, model, closely=True)
    assert state.changed() is None
    kept["last"] = 1.0
    assert state.changed() is not None
