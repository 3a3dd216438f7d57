"""DP-SGD on a device: the right sum, the right noise, and nothing without it."""

import math

import pytest
import torch
from tests.privacy.dp_sgd.test_private_gradients import one_by_one

from isthmus.errors import JobError, TaskError, UserError
from isthmus.task.scoring import build_model
from isthmus.wire import link_pb2
from isthmus_clients.training.steps import private_steps

from .conftest import build_start, train

EXAMPLES, BATCH, CLIP, RATE = 20, 20, 0.3, 0.5
KEYS = (
    "federated.privacy.epsilon=1e9",
    "federated.privacy.delta=1e-3",
    f"federated.privacy.clip={CLIP}",
    f"federated.batch_size={BATCH}",
    f"task.settings.lr={RATE}",
)


def noise(value):
    return f"federated.privacy.noise={value}"


def test_the_clipped_gradients_of_all_examples_are_summed(open_run):
    """With a batch as large as the data every example is in every step."""
    run = open_run(*KEYS, noise(1e-3), "federated.local_steps=2")
    start = build_start(run)
    update, trained, progress = train(run, start=start)
    model = build_model(run.task, run.job.seed)
    for _ in range(2):
        total = one_by_one(run.task, model, run.dataset, CLIP)
        flat = torch.nn.utils.parameters_to_vector(model.parameters())
        torch.nn.utils.vector_to_parameters(flat - RATE * total / BATCH, model.parameters())
    torch.testing.assert_close(update, start - run.layout.gather(model), rtol=0.02, atol=1e-4)
    assert (trained.examples, trained.steps) == (1, 2)  # the number of examples is not sent
    assert dict(trained.training) == {}  # a loss would have no noise
    assert progress.steps == []


def test_the_noise_is_that_of_the_plan_and_never_repeats(open_run):
    """Bounds are exceeded with a probability below 1e-7: 6 standard errors of 12,003 numbers."""
    multiplier = 1e4  # so much that the gradients do not matter
    wide = "def model(self):\n    return nn.Sequential(nn.Linear(4, 1500), nn.Linear(1500, 3))"
    run = open_run(*KEYS, noise(multiplier), "federated.local_steps=1", methods=wide)
    start, unit = build_start(run), RATE * multiplier * CLIP / BATCH
    releases = [train(run, start=start)[0] / unit for _ in range(2)]  # the same round, again
    size = len(start)
    for release in releases:
        assert abs(float(release.var()) - 1) < 6 * math.sqrt(2 / size)
        assert abs(float(release.mean())) < 6 / math.sqrt(size)
    assert abs(float((releases[0] * releases[1]).mean())) < 6 / math.sqrt(size)


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("federated.batch_size=1",),  # some steps have no example
        ("federated.proximal=0.5",),
        ('exchange.personal=["bias"]', "federated.personal_steps=1"),
    ],
)
def test_no_step_is_made_without_noise(open_run, monkeypatch, changes):
    """Every gradient that the optimizer sees has noise of the same deviation."""
    deviations, without = [], private_steps.add_noise
    monkeypatch.setattr(
        private_steps,
        "add_noise",
        lambda total, deviation: (deviations.append(deviation), without(total, deviation)),
    )
    run = open_run(*KEYS, noise(2.0), "federated.local_steps=12", *changes)
    update, trained, _ = train(run)
    assert trained.steps == 12
    assert deviations == [2.0 * CLIP] * 12
    assert update.all()  # in every exchanged element


def test_without_noise_in_the_job_the_device_finds_it(open_run):
    budget = ("federated.privacy.epsilon=3", "federated.local_steps=4", "rounds=7")
    run = open_run(*KEYS, *budget, "federated.batch_size=4")
    plan = run.private_steps.plan
    assert (plan.steps, plan.probability, plan.participations) == (4, 0.2, 7)
    assert 2.99 < plan.epsilon(7) <= 3


def test_a_gradient_that_is_not_finite_costs_only_its_example(open_run):
    broken = """
        def local_data(self, participant):
            data = rows(20, seed=1)
            data.tensors[0][3] = float("nan")
            return data
    """
    run = open_run(*KEYS, noise(1.0), methods=broken)
    assert train(run)[0].isfinite().all()


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        (
            "def model(self):\n    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))",
            r"layer '1' \(BatchNorm1d\) .*\(federated.privacy\).* use nn.GroupNorm",
        ),
        (
            "def training_step(self, model, batch):\n    return model(batch[0]).mean()",
            r"training_step\(\) gives the loss of a batch .*\(federated.privacy\)",
        ),
        (
            "def order(self, dataset, batch_size, generator):\n    return torch.arange(20)",
            r"order\(\) chooses the examples of a batch.*\(federated.privacy\)",
        ),
        (
            "def local_data(self, participant):\n"
            "    class Endless(torch.utils.data.IterableDataset):\n"
            "        def __iter__(self):\n"
            "            yield from rows(20, 0)\n"
            "    return Endless()",
            r"local_data\(\) is an iterable dataset.*\(federated.privacy\)",
        ),
        (
            "def forward(self, model, inputs):\n"
            "    self.last = model(inputs).detach()\n"
            "    return model(inputs)",
            r"changes 'task.last', so that one example could change the gradients of others",
        ),
        (
            "def collate(self, examples):\n"
            "    inputs, targets = super().collate(examples)\n"
            "    self.last, before = inputs, getattr(self, 'last', 0)\n"
            "    return inputs - before, targets",
            r"an example is another one when it is read again after others",
        ),
        (
            "def local_data(self, participant):\n    return rows(19, 0)",
            r"federated.batch_size=20 is more than the number of examples of this device, 19",
        ),
        (
            "def local_data(self, participant):\n    return rows(1000, 0)",
            r"delta=0.001 is not below 1 / examples, with .*1000",
        ),
    ],
)
def test_what_cannot_be_bounded_is_refused(open_run, methods, sentence):
    with pytest.raises((TaskError, JobError), match=sentence):
        open_run(*KEYS, noise(1.0), "federated.local_steps=2", methods=methods)


def test_frozen_statistics_are_no_reason(open_run):
    methods = "def model(self):\n    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))"
    run = open_run(*KEYS, noise(1.0), "exchange.buffers=frozen", methods=methods)
    assert train(run)[0].isfinite().all()


def test_figures_without_noise_are_refused(open_run):
    run = open_run(*KEYS, noise(1.0))
    model = run.layout.encode(build_start(run))
    with pytest.raises(UserError, match=r"federated.privacy\), and scores of models would get no"):
        run.score(model, [[0]])
    with pytest.raises(UserError, match=r"federated.privacy\), and counts of an evaluation would"):
        run.evaluate(1, model)
    work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1, gradient_scale=1.0)
    result = bytearray(run.layout.gradient_and_update.nbytes)
    with pytest.raises(UserError, match=r"federated.privacy\), and a mean gradient would get no"):
        run.train(work, model, lambda _: None, lambda: False, None, result)


@pytest.mark.parametrize(
    "change",
    [
        "self.net.mean.lerp_(inputs.mean(0), 0.1)",
        "self.net.mean.data.copy_(inputs.mean(0))",
        "self.net.mean = inputs.mean(0)",
        "self.net.offset.copy_(inputs.mean(0))",
    ],
)
def test_what_collate_keeps_in_a_tensor_of_the_model_is_refused(open_run, change):
    """It would change what is computed for others, and a buffer would be sent without noise."""
    keeping = f"""
        def model(self):
            class Net(nn.Linear):
                def __init__(self):
                    super().__init__(4, 3)
                    self.register_buffer("mean", torch.zeros(4))
                    self.offset = nn.Parameter(torch.zeros(4), requires_grad=False)

                def forward(self, inputs):
                    return super().forward(inputs - self.mean - self.offset)

            self.net = Net()
            return self.net

        def collate(self, rows):
            inputs, target = super().collate(rows)
            with torch.no_grad():
                {change}
            return inputs, target
    """
    with pytest.raises(TaskError, match=r"reading an example changes 'model.*in model\(\)"):
        open_run(*KEYS, noise(1.0), methods=keeping)


def test_a_parameter_that_is_none_of_the_model_is_refused(open_run):
    """It would get no gradient, and be trained in a job without the table."""
    methods = """
def __init__(self, *given):
    super().__init__(*given)
    self.scale = nn.Parameter(torch.ones(()))

def loss(self, output, target):
    return nn.functional.cross_entropy(output * self.scale, target, reduction="none")

def optimizer(self, parameters, participant):
    return torch.optim.SGD([*parameters, self.scale], lr=0.1)
"""
    run = open_run(*KEYS, noise(1.0), methods=methods)
    with pytest.raises(TaskError, match="trains a parameter that is none of the model"):
        train(run)
