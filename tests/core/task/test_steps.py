"""Values with masks, and losses of a batch as a whole."""

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from isthmus.errors import TaskError
from isthmus.task import load_task
from isthmus.task.definition import Parameters
from isthmus.task.optimizers import TaskOptimizers
from isthmus.task.scoring import Averages, UnitValues, evaluate
from isthmus.task.scoring.steps import training_step
from isthmus.task.scoring.units import losses_of, unit_values

CPU = torch.device("cpu")
BATCH = [torch.ones(4, 4), torch.zeros(4)]


@pytest.fixture
def load(write_task, tmp_path):
    def load(methods):
        write_task(methods)
        return load_task("task.py:Learn", {}, base=tmp_path)

    return load


def test_masked_values_do_not_matter_even_if_not_finite():
    values = torch.tensor([1.0, 3.0, torch.nan], requires_grad=True)
    units = unit_values((values, torch.tensor([True, True, False])), "loss()")
    assert (units.mean().item(), float(units.total64()), float(units.count())) == (2.0, 4.0, 2.0)
    units.mean().backward()
    assert values.grad.tolist() == [0.5, 0.5, 0.0]
    assert units.scored("loss()").tolist() == [1.0, 3.0]


def test_weights_are_weights():
    units = UnitValues(torch.tensor([1.0, 4.0]), torch.tensor([3.0, 1.0]))
    averages = Averages()
    averages.add({"loss": units})
    assert averages.result()["loss"] == float(units.mean()) == 1.75
    with pytest.raises(TaskError, match="weights other than 0 and 1"):
        units.scored("score()")


def test_a_batch_in_which_nothing_is_scored_has_the_loss_zero():
    units = UnitValues(torch.ones(2), torch.zeros(2, dtype=torch.bool))
    assert float(units.mean()) == 0.0


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(TaskError, match=r"values of shape \(2,\) and a mask of \(3,\)"):
        unit_values((torch.ones(2), torch.ones(3)), "loss()")


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("torch.ones(3)", "an isthmus.StepLoss of one, not Tensor of shape (3,)"),
        ("3.0", "an isthmus.StepLoss of one, not float"),
        ("isthmus.StepLoss(torch.ones(()), weight=-1)", "has the weight -1"),
        ("isthmus.StepLoss(torch.ones(()), parts={'loss': torch.ones(())})", "the part 'loss'"),
        ("isthmus.StepLoss(torch.ones(()), parts={'a': 1.0})", "the part 'a', which must be"),
        (
            "isthmus.StepLoss(torch.ones(()), parts={3: torch.ones(())})",
            "the name 3; use a text",
        ),
        ("torch.ones((), dtype=torch.complex64)", "returned complex numbers; return real ones"),
        ("isthmus.StepLoss(torch.ones(()), parts={'a': torch.tensor(1j)})", "complex numbers; ret"),
        ("1 / 0", "training_step() failed at"),
    ],
)
def test_a_step_that_cannot_be_used_is_refused(load, returned, sentence):
    task = load(f"def training_step(self, model, batch):\n    return {returned}")
    with pytest.raises(TaskError) as caught:
        training_step(task, nn.Identity(), BATCH)
    assert sentence in str(caught.value)


def test_a_part_does_not_take_the_place_of_the_loss_of_an_optimizer(load):
    task = load("""
        def training_step(self, model, batch, optimizer=""):
            return isthmus.StepLoss(torch.ones(()), parts={"generator_loss": torch.zeros(())})
    """)
    training_step(task, nn.Identity(), BATCH, "discriminator")
    with pytest.raises(TaskError, match=r"another name than 'generator_loss'"):
        training_step(task, nn.Identity(), BATCH, "generator")


def test_the_weight_of_a_step_is_its_number_of_examples_unless_given(load):
    task = load("def training_step(self, model, batch):\n    return batch[0].mean()")
    assert training_step(task, nn.Identity(), BATCH).weight == 4
    with pytest.raises(TaskError, match=r"different numbers of rows.*StepLoss\(loss, weight="):
        training_step(task, nn.Identity(), [torch.ones(4), torch.ones(3)])


def test_an_evaluation_step_is_averaged_by_weight(load):
    task = load("""
        def evaluation_step(self, model, batch):
            x, _ = batch
            return isthmus.StepLoss(x.mean(), parts={"double": 2 * x.mean()})
    """)
    data = TensorDataset(torch.tensor([1.0, 3.0, 8.0]), torch.zeros(3))
    averages = evaluate(task, nn.Identity(), data, range(3), 2, CPU)
    assert averages.result() == {"double": 8.0, "loss": 4.0}


def test_held_out_data_need_a_way_to_evaluate(load):
    task = load("def training_step(self, model, batch):\n    return batch[0].mean()")
    type(task).loss = type(task).__mro__[2].loss
    with pytest.raises(TaskError, match=r"neither loss\(\) nor evaluation_step\(\)"):
        evaluate(task, nn.Identity(), TensorDataset(torch.ones(1)), [0], 1, CPU)


def test_optimizers_by_name_train_their_own_parameters_alone():
    model = nn.ModuleDict({"encoder": nn.Linear(1, 1), "encoder2": nn.Linear(1, 1)})
    parameters = Parameters(model.named_parameters())
    assert parameters.of("encoder") == list(model["encoder"].parameters())
    made = {name: torch.optim.SGD(parameters.of(name), lr=1.0) for name in model}
    optimizers = TaskOptimizers(made, parameters)
    with optimizers.alone("encoder2"):
        assert [each.requires_grad for each in parameters] == [False, False, True, True]
    assert all(each.requires_grad for each in parameters)
    for bad, sentence in (
        ({1: made["encoder"]}, "keys must be names"),
        ({}, "keys must be names"),
        ({"a": made["encoder"], "b": torch.optim.SGD(parameters)}, "gives one parameter to 'a'"),
    ):
        with pytest.raises(TaskError, match=sentence):
            TaskOptimizers(bad, parameters)


def test_numpy_arrays_count_as_tensors():
    """Also with a mask, and of other kinds of numbers."""
    mask = numpy.array([True, False, True])
    for dtype in ("float32", "float64", "int64", "bool"):
        values = numpy.array([1, 5, 0]).astype(dtype)
        units = unit_values((values, mask), "metrics()")
        assert (float(units.total64()), float(units.count())) == (1.0, 2.0)
    assert unit_values(numpy.array(["a"]), "metrics()") is None
    assert unit_values(numpy.float32(1), "metrics()") is None


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_values_are_refused(dtype):
    values = torch.ones(3, dtype=dtype)
    for returned in (values, (values, torch.ones(3))):
        with pytest.raises(TaskError, match=r"^metrics\(\) returned complex numbers; return real"):
            unit_values(returned, "metrics()")
    with pytest.raises(TaskError, match=r"^metrics\(\) returned complex weights; return real"):
        unit_values((torch.ones(3), values), "metrics()")


@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_a_loss_that_is_no_floating_point_number_is_refused(load, dtype):
    task = load(f"""
        def loss(self, output, target):
            return (output - target).to(torch.{dtype})
    """)
    with pytest.raises(TaskError, match=rf"^loss\(\) returned values of torch\.{dtype}, which"):
        losses_of(task, torch.ones(4), torch.zeros(4))
