"""Training of factors on a device, compared with autograd's, and what devices refuse."""

import pytest
import torch

from isthmus.errors import TaskError
from isthmus.task import Participant
from isthmus.task.scoring import build_model
from isthmus.wire import link_pb2

from .conftest import Progress, build_start, train
from .factor_reference import LOW_RANK, METHODS, STEPS, matrix_of, reference


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("federated.proximal=0.7",),
        ("federated.clip_norm=0.05",),
        ("federated.accumulate=3",),
        ("exchange.exclude=['0.*']",),
    ],
)
@pytest.mark.parametrize(("name", "rank"), [("a", 2), ("c", 8), ("other", 3)])
def test_training_is_that_of_the_product(open_run, overrides, name, rank):
    run = open_low_rank(open_run, *overrides, name=name)
    start = build_start(run)
    update, _, _ = train(run, start=start)
    expected, factors = reference(run, start, rank)
    torch.testing.assert_close(update, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(matrix_of(run, update), -factors.product, rtol=1e-4, atol=1e-6)
    assert rank_of(run, update) == rank


def open_low_rank(open_run, *overrides, name="a", methods=METHODS):
    return open_run(*STEPS, LOW_RANK, *overrides, name=name, methods=methods)


def trained_at(run, start, gradient=None, scale=0.0):
    """A round at a position, with more than the model."""
    payload, result = run.layout.encode(start), None
    if scale:
        result = bytearray(run.layout.gradient_and_update.nbytes)
    work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1, gradient_scale=scale)
    work.position.CopyFrom(link_pb2.RoundPosition(start=0, steps=5, cohort=3))
    encoded = None if gradient is None else run.layout.encode(gradient)
    run.train(work, payload, Progress(), lambda: False, encoded, result)
    if result is None:
        return run.layout.decode(payload).clone(), None
    both = run.layout.gradient_and_update.decode(result)
    return both[run.layout.size :].clone(), both[: run.layout.size].clone()


def rank_of(run, update):
    return int(torch.linalg.matrix_rank(matrix_of(run, update), rtol=1e-4))


def test_a_datacenters_gradient_is_added_by_the_chain_rule(open_run):
    run = open_low_rank(open_run)
    start = build_start(run)
    gradient = torch.randn(run.layout.size, generator=torch.Generator().manual_seed(1))
    update, _ = trained_at(run, start, gradient)
    expected, _ = reference(run, start, 2, gradient)
    torch.testing.assert_close(update, expected, rtol=1e-4, atol=1e-6)


def test_a_measured_gradient_is_that_of_the_matrices(open_run):
    run, whole = open_low_rank(open_run), open_run(*STEPS, methods=METHODS)
    start = build_start(run)
    update, gradient = trained_at(run, start, scale=1.0)
    assert torch.equal(gradient, trained_at(whole, start, scale=1.0)[1])
    assert matrix_of(run, gradient).abs().min() > 0
    assert torch.equal(update, train(run, start=start)[0])


def test_the_same_round_gives_the_same_bytes(open_run):
    run = open_low_rank(open_run)
    start = build_start(run)
    first = train(run, start=start)[0]
    assert not torch.equal(train(run, 2, start)[0], first)
    torch.manual_seed(5)
    assert torch.equal(train(run, start=start)[0], first)
    assert torch.equal(train(open_low_rank(open_run), start=start)[0], first)
    assert [name for name, _ in run.model.named_parameters()] == [
        name for name, _ in build_model(run.task, 0).named_parameters()
    ]
    other = open_low_rank(open_run, name="c")
    shared = other.for_device(run.participant)
    assert torch.equal(train(shared, start=start)[0], first), "one by one, in one process"


def test_frozen_parts_do_not_move(open_run):
    run = open_low_rank(open_run, "exchange.exclude=['0.*']")
    before = {name: each.clone() for name, each in run.model.named_parameters()}
    train(run)
    moved = {name for name, each in run.model.named_parameters() if each.ne(before[name]).any()}
    assert moved == {"2.weight", "2.bias", "4.weight"}


def test_an_interrupted_training_leaves_nothing(open_run):
    run = open_low_rank(open_run)
    start = build_start(run)
    first = train(run, start=start)[0]
    calls = iter(range(100))
    with pytest.raises(TaskError, match="no longer wants"):
        train(run, start=start, stopped=lambda: next(calls) > 2)
    assert torch.equal(train(run, start=start)[0], first)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_precision_is_that_of_the_model(open_run, precision):
    run = open_low_rank(open_run, f"federated.precision={precision}", "federated.proximal=0.1")
    update, _, _ = train(run)
    exact, _, _ = train(open_low_rank(open_run, "federated.proximal=0.1"))
    assert rank_of(run, update) == 2
    assert not torch.equal(update, exact)
    torch.testing.assert_close(update, exact, rtol=0.5, atol=0.05)


def test_in_the_steps_of_personal_parameters_matrices_stay(open_run):
    head = "exchange.personal=['4.weight']"
    last = open_low_rank(open_run, head, "federated.personal_steps=4")
    most = open_low_rank(open_run, head, "federated.personal_steps=1")
    updates = train(last)[0], train(most)[0]
    assert [rank_of(last, update) for update in updates] == [2, 2]
    assert 0 < updates[0].abs().max() < updates[1].abs().max()


def test_a_device_is_tuned_with_factors_before_it_evaluates(open_run):
    methods = METHODS + "\ndef validation_data(self, participant):\n    return rows(9, seed=2)\n"
    keys = ("evaluation.devices=2", "evaluation.quorum=2", "federated.fine_tune_steps=5")
    run = open_low_rank(open_run, *keys, methods=methods)
    start = build_start(run)
    run.evaluate(1, run.layout.encode(start))
    tuned = start - run.layout.gather(run.model)
    assert rank_of(run, tuned) == 2


SEVERAL = (
    METHODS
    + """
def training_step(self, model, batch, optimizer):
    return self.loss(model(batch[0]), batch[1]).mean()

def optimizer(self, parameters, participant):
    assert set(parameters.named) >= {"2.weight.A", "2.weight.B"}
    assert "2.weight" not in parameters.named
    first = parameters.of("0") + parameters.of("4")
    return {
        "ends": torch.optim.SGD(first, lr=0.1),
        "middle": torch.optim.SGD(parameters.of("2.weight"), lr=0.1),
    }
"""
)


def test_several_optimizers_train_in_turn(open_run):
    run = open_low_rank(open_run, methods=SEVERAL)
    update, _, _ = train(run)
    assert rank_of(run, update) == 2
    parts = dict(run.layout.parts(update))
    assert parts["0.weight"].abs().max() > 0
    assert parts["2.bias"].abs().max() == 0, "no optimizer has it"


def test_a_gradient_is_measured_with_the_names_of_training(open_run):
    """Each optimizer's loss gives its own matrices a gradient, as without factors."""
    methods = SEVERAL.replace(
        "return self.loss", "return (3 - 2 * (optimizer == 'ends')) * self.loss"
    )
    run = open_low_rank(open_run, methods=methods)
    start = build_start(run)
    update, gradient = trained_at(run, start, scale=1.0)
    names = [line for line in methods.splitlines() if "assert" not in line]
    whole = open_run(*STEPS, methods="\n".join(names))
    assert torch.equal(gradient, trained_at(whole, start, scale=1.0)[1])
    assert matrix_of(run, gradient).abs().max() > 0
    assert torch.equal(update, train(run, start=start)[0])


@pytest.mark.parametrize("rank", ["0", "13", "True", "2.0", "'2'"])
def test_a_rank_that_a_device_cannot_have_is_a_sentence(open_run, rank):
    methods = METHODS + f"\ndef adapter_rank(self, participant):\n    return {rank}\n"
    sentence = r"adapter_rank\(\) of a returned .*; it must be a whole number from 1 to 12, the sm"
    with pytest.raises(TaskError, match=sentence):
        open_low_rank(open_run, methods=methods)


def test_a_failure_of_the_task_is_a_sentence(open_run):
    methods = (
        METHODS + "\ndef adapter_rank(self, participant):\n    raise ValueError('no memory')\n"
    )
    with pytest.raises(TaskError, match=r"adapter_rank\(\).*no memory"):
        open_low_rank(open_run, methods=methods)


def test_devices_of_one_name_have_one_rank(open_run):
    run = open_low_rank(open_run, name="c")
    assert run.for_device(Participant(name="b", regime="federated"))._low_rank.rank == 4
