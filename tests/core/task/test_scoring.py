import math
import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from isthmus.errors import TaskError
from isthmus.task import Task, load_task
from isthmus.task.scoring import (
    Averages,
    UnitValues,
    batches,
    build_model,
    count_examples,
    evaluate,
    losses,
)

CPU = torch.device("cpu")


class Echo(Task):
    """Its model hands the inputs on, its loss is the input."""

    def model(self):
        return nn.Identity()

    def loss(self, output, target):
        return output

    local_data = eval_data = optimizer = None  # nobody asks for them here

    def metrics(self, output, target):
        return {"target": target, "parity": target % 2 == 0}


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40),
    st.integers(min_value=1, max_value=50),
)
def test_averages_are_exact_for_batches_of_any_size(values, batch_size):
    data = TensorDataset(torch.tensor(values), torch.arange(len(values)))
    averages = evaluate(Echo({}), nn.Identity(), data, range(len(values)), batch_size, CPU)
    result = averages.result()
    assert result["loss"] == pytest.approx(sum(values) / len(values), rel=1e-12, abs=1e-12)
    assert result["target"] == (len(values) - 1) / 2
    assert result["parity"] == (len(values) + 1) // 2 / len(values)
    assert averages.counts["loss"] == len(values)


def test_sums_are_float64_where_float32_would_lose_count():
    averages = Averages()
    averages.add({"loss": UnitValues(torch.full((3,), 2.0**25))})
    averages.add({"loss": UnitValues(torch.ones(1))})
    assert averages.result()["loss"] == (3 * 2.0**25 + 1) / 4


def test_the_average_of_nothing_is_nan():
    averages = Averages()
    averages.add({"loss": UnitValues(torch.empty(0))})
    assert averages.result()["loss"] != averages.result()["loss"]


def test_evaluation_restores_the_mode_of_the_model():
    seen = []

    class Watching(nn.Module):
        def forward(self, inputs):
            seen.append((self.training, torch.is_grad_enabled()))
            return inputs

    model = Watching().train()
    data = TensorDataset(torch.zeros(2), torch.zeros(2))
    evaluate(Echo({}), model, data, range(2), 2, CPU)
    assert seen == [(False, False)]
    assert model.training


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        (
            "def loss(self, output, target):\n    return output.mean()",
            "loss() must return one value",
        ),
        ("def loss(self, output, target):\n    return 0.5", "loss() must return one value"),
        ("def forward(self, model, inputs):\n    return 1 / 0", "forward() failed at "),
        (
            "def metrics(self, output, target):\n    return {'accuracy': output.mean()}",
            "metrics() must return one value per example for 'accuracy'",
        ),
        (
            "def metrics(self, output, target):\n    return {'accuracy': 0.5}",
            "metrics() must return one value per example for 'accuracy'",
        ),
        (
            "def metrics(self, output, target):\n    return {'accuracy': [1.0, 2.0, 3.0]}",
            "metrics() must return one value per example for 'accuracy', not a list of 3",
        ),
        (
            "def loss(self, output, target):\n    return output.detach().numpy()",
            "loss() must return one value per example as a tensor, which has a gradient, and not",
        ),
        (
            "def metrics(self, output, target):\n    return None",
            "metrics() must return a dictionary of tensors, not NoneType",
        ),
        (
            "def metrics(self, output, target):\n    return {'loss': output}",
            "metrics() has a figure 'loss', which is the name of loss()'s",
        ),
        *(
            (
                f"def metrics(self, output, target):\n    return {{{name!r}: target}}",
                f"metrics() has a figure with the name {ascii(name)[:82]}; use a text of 1 to 80 ",
            )
            for name in (3, None, "", "a\nb", "\x1b[31m", "a\0b", "\udc80", "m" * 81, "\u202egnp")
        ),
    ],
)
def test_a_task_with_averaged_or_invalid_losses_is_refused(write_task, tmp_path, methods, sentence):
    write_task(methods)
    task = load_task("task.py:Learn", {}, base=tmp_path)
    with pytest.raises(TaskError) as caught:
        evaluate(task, build_model(task, 0), task.eval_data(), range(4), 2, CPU)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([(1.0, 2.0, 3.0)], r"must give \(input, target\) pairs, not list of 3"),
        ([1.0], r"must give \(input, target\) pairs, not Tensor"),
        ([{"x": 1.0}], r"must give \(input, target\) pairs, not dict"),
        ([(1.0, object())], r"reading the dataset failed: TypeError"),
    ],
)
def test_a_dataset_without_pairs_is_refused(rows, sentence):
    with pytest.raises(TaskError, match=sentence):
        list(batches(Echo({}), Rows(rows), [0], 1, CPU))


def test_batches_keep_the_order_of_the_indices():
    data = TensorDataset(torch.arange(10), torch.arange(10))
    found = [inputs.tolist() for inputs, _ in batches(Echo({}), data, [7, 1, 5], 2, CPU)]
    assert found == [[7, 1], [5]]


def test_inputs_may_be_nested():
    Pair = namedtuple("Pair", ["left", "right"])
    rows = Rows([({"a": torch.ones(2), "b": [torch.zeros(1)]}, Pair(1.0, "text"))])
    ((inputs, target),) = batches(Echo({}), rows, [0], 1, torch.device("meta"))
    assert inputs["a"].device.type == inputs["b"][0].device.type == "meta"
    assert target.left.device.type == "meta"
    assert list(target.right) == ["text"]


def test_a_dataset_must_have_a_length_and_an_example():
    with pytest.raises(
        TaskError, match=r"^eval_data\(\) is empty: there is no data to train or evaluate on$"
    ):
        count_examples(Rows([]), "eval_data()")
    with pytest.raises(TaskError, match=r"^eval_data\(\) is a DataLoader; return its dataset"):
        count_examples(DataLoader(Rows([(1, 2)])), "eval_data()")
    with pytest.raises(TaskError, match=r"^len\(\) of eval_data\(\) failed: TypeError"):
        count_examples(None, "eval_data()")
    assert count_examples(Rows([(1, 2)]), "eval_data()") == 1


@pytest.mark.parametrize("draw", ["torch.randn(9)", "random.random()", "np.random.randn(9)"])
def test_a_seed_determines_the_model_and_restores_the_random_state(write_task, tmp_path, draw):
    write_task(f"""
        def model(self):
            import random, numpy as np
            model = nn.Linear(4, 3)
            model.weight.data += torch.as_tensor({draw}).sum()
            return model
    """)
    task = load_task("task.py:Learn", {}, base=tmp_path)
    one = build_model(task, seed=7)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(2)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    other = build_model(task, seed=7)
    third = build_model(task, seed=8)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    assert torch.equal(one.weight, other.weight)
    assert not torch.equal(one.weight, third.weight)
    assert torch.equal(after[0], states[0])
    assert after[1] == states[1]
    assert (after[2] == states[2]).all()


def test_a_model_must_be_a_module(write_task, tmp_path):
    write_task("def model(self):\n    return [1.0]")
    with pytest.raises(TaskError, match=r"^model\(\) returned list, not a torch\.nn\.Module$"):
        build_model(load_task("task.py:Learn", {}, base=tmp_path), 0)


def test_losses_are_one_per_scored_unit_of_any_shape():
    output, values = losses(Echo({}), nn.Identity(), torch.ones(2, 3), None)
    assert values.values.shape == output.shape == (2, 3)


@pytest.mark.parametrize("weight", [-1.0, -math.inf, math.inf, math.nan])
def test_a_weight_that_is_not_usable_is_refused(weight):
    averages = Averages()
    weights = torch.tensor([5.0, weight])
    averages.add({"accuracy": UnitValues(torch.ones(2), weights)})
    averages.add({"accuracy": UnitValues(torch.ones(2), torch.ones(2))})
    with pytest.raises(TaskError, match=r"metrics\(\)\['accuracy'\] returned a weight that is neg"):
        averages.result()


def test_weights_of_0_leave_values_out():
    averages = Averages()
    averages.add({"loss": UnitValues(torch.tensor([1.0, math.nan]), torch.tensor([3, 0]))})
    averages.add({"loss": UnitValues(torch.tensor([5.0]), torch.tensor([0.5]))})
    assert averages.result() == {"loss": (3 * 1 + 0.5 * 5) / 3.5}
