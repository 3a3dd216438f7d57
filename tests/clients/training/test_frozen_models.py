"""Kinds of models of which devices hold frozen parameters in smaller types, or are refused."""

import pytest
import torch
from safetensors.torch import save_file
from tests.clients.training.conftest import train
from tests.clients.training.started_runs import opening_of

from isthmus.errors import JobError, TaskError
from isthmus.task import Participant, load_task
from isthmus.task.scoring.frozen_form import ParameterMemory, smaller_types
from isthmus.task.scoring.int8_linear import Int8Linear, hold_in_int8, quantised
from isthmus_clients.training.local_run import DeviceRun

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import isthmus

SAME = torch.bfloat16  # for models that choose a type themselves

{classes}

class Learn(isthmus.Task):
    def model(self):
        return Model()

    def loss(self, output, target):
        return nn.functional.cross_entropy(output.float(), target, reduction="none")

    def local_data(self, participant):
        generator = torch.Generator().manual_seed(3)
        return TensorDataset(torch.randint(0, 6, (12, 5), generator=generator),
                             torch.randint(0, 4, (12,), generator=generator))

    def eval_data(self):
        return self.local_data(None)

    def validation_data(self, participant):
        return self.local_data(None)

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.5)
"""
JOB = """
name = "small"
[task]
source = "task.py:Learn"
[model]
start = "base.safetensors"
[federated]
secure_aggregation = false
batch_size = 4
local_steps = 3
frozen_tolerance = 0.2
frozen_dtype = "bfloat16"
"""
BODY = """
class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 16)
        self.up = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.requires_grad_(False)

    def forward(self, tokens):
        hidden = self.embed(tokens).mean(1)
        return self.norm(hidden + torch.tanh(self.up(hidden)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = Base()
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        return self.head(self.base(tokens).float())
"""


@pytest.fixture
def served(tmp_path):
    """What a server sends to open a run of a model, which has other values than those of a seed."""

    def served(classes, *overrides, dtype=torch.float32, spoiling=None):
        (tmp_path / "task.py").write_text(TASK.format(classes=classes))
        (tmp_path / "job.toml").write_text(JOB)
        plain = load_task("task.py:Learn", {}, base=tmp_path).model()
        generator = torch.Generator().manual_seed(9)
        state = {}
        for name, each in [*plain.named_parameters(), *plain.named_buffers()]:
            if name in plain.state_dict() and each.is_floating_point():
                drawn = torch.randn(each.shape, generator=generator, dtype=torch.float64)
                state[name] = drawn.mul(0.3).to(dtype)
            elif name in plain.state_dict():
                state[name] = each
        if spoiling is not None:
            state["base.up.weight"][2, 3] = spoiling
        save_file(state, tmp_path / "base.safetensors")
        opening, model, _ = opening_of(tmp_path, *overrides)
        return opening, model

    return served


def opened(work, tasks=None):
    return DeviceRun(work, Participant(name="a", regime="federated"), None, tasks)


def plain_steps(run, model, batches):
    """The movement of a plain loop over a model."""
    start = run.layout.gather(model)
    model.train()
    made = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
    for inputs, target in batches:
        made.zero_grad()
        run.task.loss(model(inputs), target).mean().backward()
        made.step()
    return start - run.layout.gather(model)


def in_bfloat16(model):
    """A model as the server has it, whose frozen parameters a user casts by hand."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return model


def in_order(run):
    steps = run.data.steps(run.seed_of(1), 1, run.job.federated)
    return [part.batch for step in steps for part in step]


def full_loss(run, model):
    """The loss of a device's first batch by a model in float32."""
    inputs, target = in_order(run)[0]
    with torch.no_grad():
        return float(run.task.loss(model.eval()(inputs), target).mean())


TIED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 16).requires_grad_(False)
        self.adapter = nn.Linear(16, 16)
        self.out = nn.Linear(16, 6, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens).mean(1)
        hidden = hidden + self.adapter(hidden.float()).to(hidden.dtype)
        return self.out(hidden)[:, :4]
"""
BY_FUNCTION = """
class Model(nn.Module):  # what is frozen is used outside of its module, in its type
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 16).requires_grad_(False)
        self.up = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        hidden = nn.functional.embedding(tokens, self.embed.weight).mean(1)
        hidden = hidden.to(self.up.weight.dtype)
        return self.head((hidden @ self.up.weight.T + self.up.bias).float())
"""
BY_HAND = """
class Model(nn.Module):  # it computes in float32 itself
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 16).requires_grad_(False)
        self.weight = nn.Parameter(torch.zeros(16, 16), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(16, dtype=torch.bool), persistent=False)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        self.calls += 1
        hidden = self.embed(tokens).float().mean(1) * self.mask
        return self.head(torch.tanh(hidden @ self.weight.float()))
"""
IN_LISTS = """
class Model(nn.Module):  # its code has parameters in a list, and a name for one
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 16).requires_grad_(False)
        self.embed.weight.scale = 2.0
        self.layers = nn.ModuleList(nn.Linear(16, 16).requires_grad_(False) for _ in range(2))
        self.weights = [each.weight for each in self.layers]
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        hidden = self.embed(tokens).mean(1) * self.embed.weight.scale
        for weight in self.weights:
            hidden = torch.tanh(hidden @ weight)
        return self.head(hidden.float())
"""
RECURRENT = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 16).requires_grad_(False)
        self.lstm = nn.LSTM(16, 16, batch_first=True).requires_grad_(False)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0].mean(1).float())
"""
ATTENTION = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 16).requires_grad_(False)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.layer.requires_grad_(False)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens)).mean(1).float())
"""
NORMED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 16).requires_grad_(False)
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)).requires_grad_(False)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        return self.head(torch.tanh(self.up(self.embed(tokens).mean(1))).float())
"""
CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 16).requires_grad_(False)
        self.adapter = nn.Linear(16, 16)
        self.up = nn.Linear(16, 4).requires_grad_(False)

    def forward(self, tokens):
        return checkpoint(self.inner, tokens, use_reentrant=False)

    def inner(self, tokens):
        hidden = self.embed(tokens).mean(1)
        return self.up((hidden + self.adapter(hidden.float())).to(hidden.dtype))
"""
KINDS = {
    "a base and a head": BODY,
    "tied embeddings": TIED,
    "parameters used outside of their module": BY_FUNCTION,
    "float32 by hand": BY_HAND,
    "parameters in lists": IN_LISTS,
    "recurrent": RECURRENT,
    "attention": ATTENTION,
    "normalised weights": NORMED,
    "checkpointed": CHECKPOINTED,
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_losses_are_those_of_a_model_that_is_cast_by_hand(served, kind):
    work, model = served(KINDS[kind])
    run = opened(work)
    update, _, _ = train(run, start=run.layout.gather(model))
    assert run.difference.full == pytest.approx(full_loss(run, model), rel=1e-6)
    small = in_bfloat16(model)
    assert run.difference.small == pytest.approx(full_loss(run, small), rel=1e-6)
    expected = plain_steps(run, small, in_order(run))
    assert expected.abs().max() > 1e-3
    assert (update - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_files_may_have_any_floating_type(served, dtype):
    """The server has them in float32, in which a file in float64 would be rounded too."""
    if dtype == torch.float64:
        with pytest.raises(JobError, match=r"is F64 and would be rounded to the torch\.float32"):
            served(BODY, dtype=dtype)
        return
    work, model = served(BODY, dtype=dtype)
    run = opened(work)
    start = run.layout.gather(model)
    held = {name: each for name, each in run.model.named_parameters() if not each.requires_grad}
    assert len(held) == 5
    for name, each in model.named_parameters():
        assert name not in held or held[name].equal(each.bfloat16())
    update, _, _ = train(run, start=start)
    expected = plain_steps(run, in_bfloat16(model), in_order(run))
    assert (update - expected).norm() <= 1e-5 * expected.norm()


def test_a_view_of_a_frozen_parameter_is_refused(served):
    """It would keep the values of the seed, where the parameter has those of the files."""
    code = BODY.replace(
        "        self.head =",
        "        self.other = self.base.up.weight.t()\n        self.head =",
    )
    work, _ = served(code)
    with pytest.raises(TaskError, match=r"keeps the memory of 'base\.up\.weight' elsewhere, too"):
        opened(work)


def test_a_model_without_what_is_to_be_smaller_is_refused(served):
    said = "is for parameters that are not trained, and the model has none in float32"
    work, _ = served(BODY.replace("self.requires_grad_(False)", "pass"))
    with pytest.raises(TaskError, match=said):
        opened(work)
    half = BODY.replace("self.requires_grad_(False)", "self.requires_grad_(False).half()")
    work, _ = served(half, dtype=torch.float16)
    with pytest.raises(TaskError, match=said):
        opened(work)
    with pytest.raises(TaskError, match="the model has nothing to train"):
        served(BODY.replace("nn.Linear(16, 4)", "nn.Linear(16, 4).requires_grad_(False)"))


def test_a_model_that_draws_in_evaluation_is_compared_with_the_same_numbers(served):
    code = BODY.replace("self.base(tokens).float()", "self.base(tokens).float() + torch.randn(16)")
    work, model = served(code)
    run = opened(work)
    train(run, start=run.layout.gather(model))
    assert run.difference.share < 0.02


def test_files_that_change_before_the_first_round_are_noticed(served, tmp_path):
    work, model = served(BODY)
    run = opened(work)
    path = tmp_path / "base.safetensors"
    path.write_bytes(path.read_bytes())
    with pytest.raises(JobError, match="has changed while it was read"):
        train(run, start=run.layout.gather(model))
    path.unlink()
    with pytest.raises(JobError, match="cannot be read: No such file"):
        train(run, start=run.layout.gather(model))


SECURE = ("federated.secure_aggregation=true", "federated.frozen_tolerance=0")


@pytest.mark.parametrize("first", ["train", "evaluate", "score"])
def test_a_device_of_another_machine_fails_by_no_comparison_in_secure_sums(
    served, tmp_path, caplog, first
):
    """Whether it gives zeros would follow from the model that it was asked about first."""
    work, model = served(BODY, *SECURE)
    run = opened(work, tasks=tmp_path)
    vector = run.layout.gather(model)
    payload = run.layout.encode(vector)
    if first == "evaluate":
        assert len(run.evaluate(1, payload).counts)
    elif first == "score":
        assert run.score(payload, [[0]])
    update, _, _ = train(run, start=vector.clone())
    assert caplog.text.count("allows 0.00%; remove federated.frozen_dtype from the job; this") == 1
    assert run.difference.share > 0
    (tmp_path / "base.safetensors").touch()
    again, _, _ = train(run, start=vector.clone())
    assert again.equal(update)
    here = opened(work)
    with pytest.raises(TaskError, match=r"in the smaller type and .*allows 0\.00%"):
        train(here, start=vector.clone())


def test_nor_does_it_by_files_that_cannot_be_compared(served, tmp_path, caplog):
    work, model = served(BODY, *SECURE)
    run = opened(work, tasks=tmp_path)
    vector = run.layout.gather(model)
    (tmp_path / "base.safetensors").unlink()
    update, _, _ = train(run, start=vector.clone())
    assert "cannot be read: No such file" in caplog.text
    assert update.any()


def test_an_evaluation_is_of_a_form_that_was_compared(served):
    work, model = served(BODY, "federated.frozen_tolerance=0")
    run = opened(work)
    payload = run.layout.encode(run.layout.gather(model))
    with pytest.raises(TaskError, match=r"in the smaller type and .*allows 0\.00%"):
        run.evaluate(1, payload)
    work, model = served(BODY)
    run = opened(work)
    assert len(run.evaluate(1, payload).counts)
    assert run.difference.share > 0


def test_personal_adapters_begin_with_the_values_of_the_seed(served):
    code = BODY.replace(
        "self.head = nn.Linear(16, 4)",
        "self.head = nn.Linear(16, 4)\n        self.own = nn.Linear(16, 16)",
    ).replace("self.base(tokens).float()", "self.own(self.base(tokens).float())")
    work, model = served(
        code, "exchange.personal=['own.*']", "model.fresh=['own.*']", "model.unused=['own.*']"
    )
    run = opened(work)
    assert run.model.own.weight.equal(model.own.weight)
    update, _, _ = train(run, start=run.layout.gather(model))
    model.own.requires_grad_(True)
    expected = plain_steps(run, in_bfloat16(model), in_order(run))
    assert (update - expected).norm() <= 1e-5 * expected.norm()


def test_the_weights_of_linear_layers_are_in_int8_and_all_else_in_bfloat16(served):
    work, model = served(BODY, "federated.frozen_dtype='int8'")
    run = opened(work)
    held = {name: each.dtype for name, each in run.model.named_parameters()}
    assert held == {
        "base.embed.weight": torch.bfloat16,
        "base.up.weight": torch.int8,
        "base.up.bias": torch.bfloat16,
        "base.norm.weight": torch.bfloat16,
        "base.norm.bias": torch.bfloat16,
        "head.weight": torch.float32,
        "head.bias": torch.float32,
    }
    layer = run.model.base.up
    assert isinstance(layer, Int8Linear)
    error = (layer.weight_in_float32() - model.base.up.weight).abs()
    assert (error <= layer.weight_scale[:, None] * 0.5001).all()
    assert "weight_scale" not in "".join(run.model.state_dict())


@pytest.mark.parametrize("kind", ["a base and a head", "recurrent", "checkpointed"])
def test_steps_over_int8_are_those_of_plain_operations(served, kind):
    """Gradients pass through the layers by autograd there, which keeps the numbers as floats."""
    work, model = served(KINDS[kind], "federated.frozen_dtype='int8'")
    layers = {
        path: module.weight.detach().clone()
        for path, module in model.named_modules()
        if type(module) is torch.nn.Linear and not module.weight.requires_grad
    }
    if not layers:
        with pytest.raises(TaskError, match=r"for the weights of layers of torch\.nn\.Linear"):
            opened(work)
        return
    run = opened(work)
    update, _, _ = train(run, start=run.layout.gather(model))
    assert run.difference.full == pytest.approx(full_loss(run, model), rel=1e-6)
    small = in_bfloat16(model)
    for path, weight in layers.items():
        largest = weight.abs().amax(1)
        numbers = (weight * 127 / largest[:, None]).round()
        scale = largest / 127
        layer = small.get_submodule(path)

        def forward(hidden, layer=layer, numbers=numbers, scale=scale):
            sums = hidden @ numbers.to(hidden.dtype).T
            return (sums * scale).to(hidden.dtype) + layer.bias

        layer.forward = forward
    assert run.difference.small == pytest.approx(full_loss(run, small), rel=1e-6)
    expected = plain_steps(run, small, in_order(run))
    assert expected.abs().max() > 1e-3
    assert (update - expected).norm() <= 1e-5 * expected.norm()
    for path in layers:
        assert run.model.get_submodule(path).held.dtype == torch.int8, path


def test_the_gradient_through_int8_keeps_no_floats_of_the_weight():
    layer = torch.nn.Linear(64, 64).requires_grad_(False)
    hold_in_int8(layer, *quantised(layer.weight.detach()))
    saved = []
    rows = torch.randn(2, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, id):
        layer(rows)
    assert {each.dtype for each in saved if each.numel() == 64 * 64} == {torch.int8}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gradient_through_int8_is_right(dtype):
    torch.manual_seed(1)
    layer = torch.nn.Linear(5, 3).requires_grad_(False)
    hold_in_int8(layer, *quantised(torch.cat([layer.weight.detach()[:2], torch.zeros(1, 5)])))
    layer = layer.to(dtype)
    rows = torch.randn(4, 5, dtype=dtype, requires_grad=True)
    full = (layer.held.to(dtype) * layer.weight_scale[:, None], layer.bias)
    torch.testing.assert_close(layer(rows), torch.nn.functional.linear(rows, *full))
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(layer, rows)
        assert torch.autograd.gradgradcheck(layer, rows)
    batched = torch.vmap(torch.func.grad(lambda row: layer(row).square().sum()))(rows.detach())
    [expected] = torch.autograd.grad(layer(rows).square().sum(), rows)
    torch.testing.assert_close(batched, expected)
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 as it is
        assert layer(rows).dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)


BY_DATA = BODY.replace(
    "self.up(hidden)",
    "nn.functional.linear(hidden, self.up.weight.data, self.up.bias)",
)
CASTING = BODY.replace("self.up(hidden)", "self.up(hidden.to(self.up.weight.dtype))")


@pytest.mark.parametrize("code", [BY_FUNCTION, BY_DATA, CASTING, ATTENTION])
def test_code_that_reads_a_weight_in_int8_gets_the_values_that_it_stands_for(served, code):
    """And not the whole numbers, which PyTorch would multiply without an error."""
    work, model = served(code, "federated.frozen_dtype='int8'")
    run = opened(work)
    start = run.layout.gather(model)
    run.evaluate(1, run.layout.encode(start.clone()))  # in which attention has a path of its own
    update, _, _ = train(run, start=start.clone())
    assert run.difference.full == pytest.approx(full_loss(run, model), rel=1e-6)
    assert 0 < run.difference.share < 0.01
    expected = plain_steps(run, model, in_order(run))
    assert (update - expected).norm() < 0.05 * expected.norm()


def test_products_in_float16_stay_in_its_range():
    """Sums of numbers up to 127 would be infinite, where those of the values are not."""
    layer = torch.nn.Linear(4096, 2, bias=False).requires_grad_(False)
    layer.weight.fill_(0.01)
    hold_in_int8(layer, *quantised(layer.weight.detach()))
    assert float(layer(torch.ones(1, 4096).half())[0, 0]) == pytest.approx(40.96, rel=1e-2)
    rows = torch.ones(1, 4096, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        found = layer(rows)
    assert float(found.detach()[0, 0]) == pytest.approx(40.96, rel=1e-2)
    found.float().sum().backward()
    assert float(rows.grad[0, 0]) == pytest.approx(0.02, rel=1e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_have_no_number(served, value):
    work, _ = served(BODY, "federated.frozen_dtype='int8'", spoiling=value)
    with pytest.raises(
        JobError, match=r"'base\.up\.weight' cannot be in int8, as a value is not f"
    ):
        opened(work)


@pytest.mark.parametrize("choice", ["bfloat16", "int8"])
def test_values_that_are_not_finite_are_not_the_types_fault(served, choice):
    work, model = served(BODY, f"federated.frozen_dtype='{choice}'")
    model.head.bias.data.fill_(float("nan"))
    run = opened(work)
    said = "is nan with the frozen parameters as they are in the files of model.start; check these"
    with pytest.raises(TaskError, match=said):
        train(run, start=run.layout.gather(model))


def test_values_above_the_range_of_bfloat16_are_refused(served):
    work, _ = served(BODY, spoiling=3.4e38)
    with pytest.raises(JobError, match=r"values that are too large for .* remove frozen_dtype"):
        opened(work)


@pytest.mark.parametrize("value", [0.0, 1e-44])
def test_rows_of_almost_nothing_are_right_in_int8(value):
    rows = torch.randn(3, 8)
    rows[1] = value
    whole, scale = quantised(rows)
    assert (whole * scale[:, None] - rows).abs().amax() <= 0.51 * scale.amax()
    assert (whole[1] * scale[1] - value).abs().amax() < 1e-43


def test_the_memory_of_a_model_is_that_of_the_types_that_it_can_have(served):
    work, model = served(BODY)
    memory = ParameterMemory.of(model, opened(work).layout)
    frozen = 6 * 16 + 16 * 16 + 16 + 2 * 16
    assert memory.trained == 4 * (16 * 4 + 4)
    assert memory.frozen == {
        "float32": 4 * frozen,
        "bfloat16": 2 * frozen,
        "int8": 2 * frozen - 16 * 16 + 4 * 16,
    }
    assert smaller_types(model, "float32") == {}
    _, recurrent = served(RECURRENT)
    assert ParameterMemory.of(recurrent).frozen.keys() == {"float32", "bfloat16"}


def test_each_simulated_device_of_one_model_compares_its_own_batch(served):
    work, model = served(BODY)
    run = opened(work)
    start = run.layout.gather(model)
    devices = [run.for_device(Participant(name=name, regime="federated")) for name in "bc"]
    updates = [train(each, start=start.clone())[0] for each in devices]
    losses = [each.difference.full for each in devices]
    assert losses == [pytest.approx(full_loss(each, model), rel=1e-6) for each in devices]
    assert losses[0] != losses[1]
    for device, update in zip(devices, updates, strict=True):
        work, model = served(BODY)
        expected = plain_steps(device, in_bfloat16(model), in_order(device))
        assert (update - expected).norm() <= 1e-5 * expected.norm()
