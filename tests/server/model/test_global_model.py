"""The global model: shared memory, digests, spilling, server optimizer, served average."""

import pytest
import torch

from isthmus.errors import JobError, TaskError, UpdateError
from isthmus.job import ServerOptimizer
from isthmus.task import load_task
from isthmus.tensors.exchange_set import digest
from isthmus.transport.blobs import InFile
from isthmus_server.model import mmap_buffer
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.storage.checkpoints import Checkpoints
from isthmus_server.storage.store import Store


@pytest.fixture
def make_model(write_task, tmp_path):
    """The table task's model on the server, with a server optimizer."""

    def make(methods="pass", name="SGD", seed=0, served_average=0.0, **options):
        write_task(methods)
        task = load_task("task.py:Learn", {}, base=tmp_path)
        config = ServerOptimizer(name=name, options=options or {"lr": 1.0})
        return GlobalModel(task, seed, config, served_average)

    return make


def gradients(model, count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(model.layout.size, generator=generator) for _ in range(count)]


def test_encoding_module_and_vector_share_memory(make_model):
    model = make_model()
    model.vector.fill_(0.5)
    assert model.module.bias.tolist() == [0.5, 0.5, 0.5]
    assert model.layout.decode(model.payload).eq(0.5).all()


def test_the_blob_always_names_the_bytes(make_model):
    model = make_model()
    digests = set()
    for change in (
        lambda: None,
        lambda: model.step(torch.ones(model.layout.size)),
        lambda: model.replace(torch.zeros(model.layout.size)),
        lambda: (model.payload.__setitem__(slice(-4, None), b"\0\0\0\1"), model.mark_changed()),
    ):
        change()
        assert model.blob.sha256 == digest(model.payload)
        assert model.sha256 == digest(model.payload).hex()
        digests.add(model.sha256)
    assert len(digests) == 4


@pytest.mark.parametrize("stored", [True, False])
def test_a_spilled_model_is_in_a_file_and_can_be_restored(
    make_model, tmp_path, monkeypatch, stored
):
    monkeypatch.setattr(mmap_buffer, "LARGE_BYTES", 0)
    model, scratch = make_model(), tmp_path / "scratch"
    scratch.mkdir()
    model.vector.fill_(0.5)
    model.mark_changed()
    before = bytes(model.payload)
    if stored:
        checkpoints = Checkpoints(tmp_path)
        saved = checkpoints.write_model(1, model.payload)
        model.mark_stored(tmp_path / saved.file, saved.sha256)
        scratch.rmdir()  # nothing else is written
    model.spill(scratch)
    assert InFile(model.spilled, len(before)).read(0, len(before)) == before
    assert model.module.bias.tolist() == [0.0, 0.0, 0.0]  # its memory was given back
    with pytest.raises(AssertionError):
        model.vector  # noqa: B018
    model.restore()
    assert bytes(model.payload) == before
    assert model.module.bias.tolist() == [0.5, 0.5, 0.5]
    model.restore()  # has no effect on a model in memory
    model.step(torch.ones(model.layout.size))
    assert model.module.bias.tolist() == [-0.5, -0.5, -0.5]


def test_a_model_that_was_left_is_whole_when_it_is_filled_or_begun_again(
    make_model, tmp_path, monkeypatch
):
    monkeypatch.setattr(mmap_buffer, "LARGE_BYTES", 0)
    model = make_model()
    model.vector.fill_(0.5)
    model.mark_changed()
    before = bytes(model.payload)
    model.leave()
    assert not model.vector.any()
    with model.being_filled() as payload:
        payload[:4] = b"\xff\xff\xff\xff"
    model.restart(torch.full((model.layout.size,), 0.5))
    assert bytes(model.payload) == before
    model.spill(tmp_path)
    model.abandon_spilled()
    model.restore()
    assert not model.vector.any()
    with model.being_filled() as payload:
        payload[:] = before
    assert model.blob.sha256 == digest(before)
    assert model.module.bias.tolist() == [0.5, 0.5, 0.5]


def test_a_truncated_spill_file_is_an_error(make_model, tmp_path):
    model = make_model()
    model.spill(tmp_path)
    model.spilled.truncate(len(model.layout.header) + 1)
    with pytest.raises(OSError, match="which holds the model, was cut short"):
        model.restore()


def test_sgd_with_a_learning_rate_of_one_is_fedavg(make_model):
    model = make_model()
    before, pseudo_gradient = model.vector.clone(), gradients(model, 1)[0]
    model.step(pseudo_gradient)
    assert torch.equal(model.vector, before - pseudo_gradient)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 1.0}),
        ("SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        ("Adam", {"lr": 0.01}),
        ("AdamW", {"lr": 0.01, "amsgrad": True}),
        ("Adagrad", {"lr": 0.1}),
        ("NAdam", {"lr": 0.01}),
        ("RMSprop", {"lr": 0.01, "centered": True}),
        ("Rprop", {"lr": 0.01}),
        ("Yogi", {"lr": 0.01}),
    ],
    ids=str,
)
def test_restored_optimizer_state_continues_bit_for_bit(
    make_model, make_job, tmp_path, name, options
):
    original = make_model(name=name, **options)
    steps = gradients(original, 6)
    for step in steps[:3]:
        original.step(step)
    store = Store.create(tmp_path / "run", make_job(), tmp_path)
    tensors, numbers = original.optimizer_state()
    model_file = store.checkpoints.write_model(3, original.payload)
    file = store.checkpoints.write_tensors(3, tensors)
    assert (file is None) == (not tensors)

    resumed = make_model(name=name, seed=9, **options)
    assert resumed.sha256 != original.sha256
    store.checkpoints.read_model(model_file, resumed.payload)
    resumed.mark_changed()
    resumed.load_optimizer_state(store.checkpoints.read_tensors(file) if file else {}, numbers)
    for step in steps[3:]:
        original.step(step)
        resumed.step(step)
    assert resumed.sha256 == original.sha256
    store.close()


def test_the_optimizer_state_affects_the_next_step(make_model):
    one, other = make_model(name="Adam", lr=0.1), make_model(name="Adam", lr=0.1)
    steps = gradients(one, 2)
    one.step(steps[0])
    other.replace(one.vector)
    one.step(steps[1])
    other.step(steps[1])
    assert one.sha256 != other.sha256


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        (
            "Sgd",
            {},
            r"optimizer\.name='Sgd' is not an optimizer of torch\.optim, nor Yogi",
        ),
        ("Yogi", {"betas": (0.9, 1.0)}, r"server_optimizer\.options: Yogi: .*betas=\(0.9, 1.0\)"),
        ("Optimizer", {}, r"name='Optimizer' is not an optimizer of torch\.optim"),
        ("lr_scheduler", {}, r"name='lr_scheduler' is not an optimizer of torch\.optim"),
        ("LBFGS", {}, r"name='LBFGS' needs a closure; choose another"),
        ("SparseAdam", {}, r"name='SparseAdam' takes sparse gradients only; choose another"),
        ("SGD", {"lr": -1.0}, r"server_optimizer\.options: SGD: Invalid learning rate: -1\.0"),
        ("SGD", {"lrr": 1.0}, r"server_optimizer\.options: SGD: .*'lrr'"),
        ("SGD", {"lr": "fast"}, r"server_optimizer\.options: SGD: "),
        ("Adam", {"fused": True, "foreach": True}, r"server_optimizer\.options: Adam: "),
    ],
)
def test_an_invalid_server_optimizer_is_one_sentence(make_model, name, options, sentence):
    with pytest.raises(JobError, match=sentence):
        make_model(name=name, **options)


def test_a_step_to_infinity_is_refused_with_advice(make_model):
    model = make_model(lr=3e38)
    with pytest.raises(UpdateError, match=r"not finite; lower its lr \(strategy\.server_opt"):
        model.step(torch.full((model.layout.size,), 100.0))


def test_large_finite_values_whose_sum_overflows_are_finite(make_model):
    model = make_model()
    model.replace(torch.full((model.layout.size,), 3e38))
    model.step(torch.zeros(model.layout.size))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_evaluation_uses_the_vector_in_any_module_precision(make_model, dtype):
    model = make_model(f"""
        def model(self):
            return nn.Linear(4, 3).to(torch.{dtype})

        def forward(self, model, inputs):
            return model(inputs.to(torch.{dtype}))
    """)
    weight = torch.zeros(3, 4)
    weight[0, 0] = weight[1, 1] = weight[2, 2] = 50.0
    weight[2, 3] = 25.0
    before = model.evaluate(7)
    model.replace(torch.cat([torch.zeros(3), weight.flatten()]))
    after = model.evaluate(7)
    assert after["accuracy"] > 0.6 > before["accuracy"]
    # Kernels may round differently for batches of another size: by a few units in the last place.
    rounding = 16 * torch.finfo(getattr(torch, dtype)).eps
    assert after == pytest.approx(model.evaluate(30), rel=rounding)


def test_tied_weights_are_stored_once(make_model):
    model = make_model("""
        def model(self):
            model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
            model[1].weight = model[0].weight
            return model
    """)
    assert model.layout.size == 16
    model.vector.fill_(2.0)
    assert model.module[1].weight.eq(2.0).all()


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        ("def eval_data(self):\n    return rows(0, 0)", r"^eval_data\(\) is empty"),
        ("def public_eval(self):\n    return rows(0, 0)", r"^public_eval\(\) is empty"),
        (
            "def eval_data(self):\n    return 1 / 0",
            r"^eval_data\(\) failed at .*task\.py:\d+: Zero",
        ),
    ],
)
def test_invalid_held_out_data_is_one_sentence(make_model, methods, sentence):
    with pytest.raises(TaskError, match=sentence):
        make_model(methods).evaluate(10)


def test_metrics_of_public_held_out_data_have_a_prefix(make_model):
    public = make_model("def public_eval(self):\n    return rows(4, 5)").evaluate(10)
    assert set(public) == {"accuracy", "loss", "public_accuracy", "public_loss"}
    alone = make_model("def eval_data(self):\n    return rows(4, 5)").evaluate(10)
    assert alone == {name: public[f"public_{name}"] for name in ("accuracy", "loss")}


def test_a_metric_with_the_name_of_a_public_one_is_refused(make_model):
    model = make_model("""
        def public_eval(self):
            return rows(4, 5)

        def metrics(self, output, target):
            return {"public_loss": output[:, 0]}
    """)
    with pytest.raises(TaskError, match=r"^metrics\(\) has a figure 'public_loss', which is the"):
        model.evaluate(10)


# -- optimizer reset, served average ---------------------------------------------------------------


def test_resetting_the_optimizer_clears_momentum(make_model):
    model, fresh = (make_model(name="SGD", lr=1.0, momentum=0.9) for _ in range(2))
    first, second = gradients(model, 2)
    model.step(first)
    fresh.replace(model.vector)
    model.reset_optimizer()
    model.step(second)
    fresh.step(second)
    assert model.sha256 == fresh.sha256


def test_the_served_model_is_a_mean_and_then_a_moving_average(make_model):
    model = make_model(served_average=0.75)
    rounds = []
    for step in gradients(model, 6):
        model.step(step)
        model.average()
        rounds.append(model.vector.clone())
    expected = torch.stack(rounds[:4]).mean(0)
    for later in rounds[4:]:
        expected = 0.75 * expected + 0.25 * later
    torch.testing.assert_close(model.served_vector, expected)
    assert model.served_sha256 != model.sha256
    model.restart(rounds[0])
    assert model.served_sha256 == model.sha256


def test_evaluation_uses_the_served_model(make_model):
    averaging, plain = make_model(served_average=0.9), make_model()
    for step in gradients(plain, 3):
        averaging.step(step)
        averaging.average()
    before = averaging.evaluate(10)
    averaging.vector.zero_()
    assert averaging.evaluate(10) == before
    plain.replace(averaging.served_vector)
    assert plain.evaluate(10) == before


def test_without_an_average_the_served_model_is_the_model(make_model):
    model = make_model()
    model.average()
    assert model.served_payload is model.payload
    assert model.served_sha256 == model.sha256


def test_the_server_optimizer_does_not_apply_to_running_statistics(make_model):
    """They become the participants' mean, whatever the optimizer makes of parameters."""
    model = make_model(
        """
        def model(self):
            return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        """,
        name="Adam",
        lr=0.1,
    )
    trained = model.layout.trained_size
    for _ in range(2):
        before = model.vector.clone()
        change = torch.linspace(-0.4, 0.4, model.layout.size)
        model.step(change)
        assert torch.equal(model.vector[trained:], before[trained:] - change[trained:])
        assert not torch.equal(model.vector[:trained], before[:trained] - change[:trained])
    assert torch.equal(model.module[1].running_mean, model.vector[trained : trained + 3])
    assert len(model.optimizer.param_groups[0]["params"]) == 4


def test_a_running_variance_does_not_become_negative(make_model):
    """The mean of zeros, of a constant input, is rounded; the root of a negative one is nan."""
    model = make_model(
        """
        def model(self):
            return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, eps=1e-12))
        """
    )
    mean, variance = model.module[1].running_mean, model.module[1].running_var
    change = torch.zeros(model.layout.size)
    change[-6:] = torch.tensor([0.5, 0.5, 0.5, 1.0, 1 + 1e-6, 0.5])
    model.step(change)
    assert mean.tolist() == [-0.5] * 3
    assert variance.tolist() == [0.0, 0.0, 0.5]
    assert model.module.eval()(torch.ones(2, 4)).isfinite().all()
    change[-1] = torch.nan
    with pytest.raises(UpdateError, match="is not finite"):
        model.step(change)
