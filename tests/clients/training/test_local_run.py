"""Local training of a run on one device."""

from types import SimpleNamespace

import pytest
import torch

from isthmus.errors import TaskError
from isthmus.task import Participant, load_task
from isthmus.task.scoring import build_model
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun

from .conftest import Progress, build_start, train

STATISTICS_ALONE = ("statistics.collect=true", "federated.secure_aggregation=true")
LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})


def test_the_update_is_start_minus_end(open_run):
    run = open_run("federated.local_steps=1", "federated.batch_size=20", "task.settings.lr=0.5")
    start = build_start(run)
    model = build_model(run.task, run.job.seed)
    inputs, target = run.dataset.tensors
    run.task.loss(model(inputs), target).mean().backward()
    gradient = torch.cat([model.bias.grad, model.weight.grad.flatten()])
    update, trained, _ = train(run, start=start)
    torch.testing.assert_close(update, 0.5 * gradient)
    assert (trained.examples, trained.steps) == (20, 1)
    assert trained.training["loss"] == pytest.approx(
        run.task.loss(run.layout.scatter(start, model) or model(inputs), target).mean().item()
    )


def test_the_same_seed_round_and_name_give_the_same_bytes(open_run):
    def update(*overrides, name="a", round_=1):
        return train(open_run(*overrides, name=name), round_)[0]

    first = update()
    torch.manual_seed(123)  # the random state of this process has no effect
    assert torch.equal(update(), first)
    assert not torch.equal(update(round_=2), first)
    assert not torch.equal(update("seed=1"), first)
    assert not torch.equal(update(name="b"), first)


def test_a_round_does_not_depend_on_the_one_before(open_run):
    run = open_run()
    start = build_start(run)
    train(run, 1)
    second = train(run, 2, start)[0]
    assert torch.equal(train(open_run(), 2, start)[0], second)


def test_rows_that_were_added_since_the_run_was_opened_are_said_once(open_run, caplog):
    """The weight is that of the opening, and the new rows were left out in silence."""
    run = open_run()
    before = train(open_run())[0]
    train(run)
    assert not caplog.records
    inputs, target = run.dataset.tensors
    run.dataset.tensors = (torch.cat([inputs, inputs[:3]]), torch.cat([target, target[:3]]))
    update, trained, _ = train(run)
    train(run)
    assert torch.equal(update, before)
    assert trained.examples == 20
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "local_data() of a has 23 examples now, and had 20 when this run was opened: the run goes "
    )


def test_training_leaves_the_random_state_alone(open_run):
    run = open_run()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    train(run)
    assert torch.equal(torch.get_rng_state(), before)


DRAWS = """
def model(self):
    class Drawing(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.randn(len(x), 3)
    return Drawing(4, 3)

def split(self, first, last):
    import numpy
    import random
    order = torch.randperm(20)[numpy.random.permutation(random.sample(range(20), 20))]
    return torch.utils.data.Subset(rows(20, seed=1), order[first:last].tolist())

def local_data(self, participant):
    return self.split(0, 15)

def validation_data(self, participant):
    return self.split(15, 20)
"""


@pytest.mark.parametrize("secret", [None, b"of this device"])
def test_what_a_task_draws_for_its_data_and_in_evaluation_is_the_same_each_time(open_run, secret):
    """A server can have one device open a run again, and have it measure a model twice."""
    run, again = (open_run(methods=DRAWS, secret=secret) for _ in range(2))
    assert run.dataset.indices == again.dataset.indices
    payload = run.layout.encode(build_start(run))
    scores = run.score(payload, [[0]])
    counts = run.evaluate(1, payload).counts
    train(run)
    assert run.score(payload, [[0]]) == scores
    assert run.evaluate(2, payload).counts == counts == again.evaluate(1, payload).counts
    assert set(run.dataset.indices).isdisjoint(run._validation.indices)


def test_what_is_drawn_for_data_follows_from_the_devices_secret_if_it_has_one(open_run):
    """And else from the job's seed and the device's name."""

    def drawn(*overrides, **device):
        return open_run(*overrides, methods=DRAWS, **device).dataset.indices

    own = drawn(secret=b"of this device")
    assert drawn("seed=1", "task.settings.lr=0.5", secret=b"of this device") == own
    assert drawn(secret=b"of another device") != own
    assert len({tuple(each) for each in (own, drawn(), drawn("seed=1"), drawn(name="b"))}) == 4


@pytest.mark.parametrize(
    ("overrides", "steps", "examples"),
    [
        ([], 1, 20),
        (["federated.batch_size=8"], 3, 20),
        (["federated.batch_size=8", "federated.local_epochs=2"], 6, 40),
        (["federated.batch_size=8", "federated.local_steps=2"], 2, 16),
        (["federated.batch_size=8", "federated.local_steps=7"], 7, 48),
        (["federated.local_steps=0"], 0, 0),
    ],
)
def test_epochs_and_steps_are_counted(open_run, overrides, steps, examples):
    scored = []
    run = open_run(*overrides)
    loss = run.task.loss
    run.task.loss = lambda output, target: (scored.append(len(target)), loss(output, target))[1]
    update, trained, progress = train(run)
    assert trained.steps == steps
    assert [step for step, _ in progress.steps] == list(range(1, steps + 1))
    assert sum(scored) == examples
    if steps == 0:
        assert not update.any()
        assert "loss" not in trained.training


def test_the_proximal_term_pulls_towards_the_rounds_model(open_run):
    free = train(open_run("federated.local_epochs=10"))[0].norm()
    pulled = train(open_run("federated.local_epochs=10", "federated.proximal=1.0"))[0].norm()
    bound = train(open_run("federated.local_epochs=10", "federated.proximal=5.0"))[0].norm()
    assert bound < pulled < free


def test_the_proximal_gradient_is_mu_times_the_distance(open_run):
    # The loss is the weight itself, so that its own gradient is 1.
    slope = """
        def model(self):
            return nn.Linear(1, 1, bias=False)

        def forward(self, model, inputs):
            return model.weight.expand(len(inputs), 1)

        def loss(self, output, target):
            return output.sum(1)
    """
    run = open_run(
        "federated.local_steps=2", "federated.proximal=0.5", "task.settings.lr=0.1", methods=slope
    )
    update, _, _ = train(run)
    # d1 = lr; d2 = d1 + lr * (1 - mu * d1)
    assert update.item() == pytest.approx(0.1 + 0.1 * (1 - 0.5 * 0.1))


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        (
            "def loss(self, output, target):\n    return output.sum(1) * float('nan')",
            r"^the loss of a is nan at step 1; lower the learning rate or check the data$",
        ),
        (
            "def optimizer(self, parameters, participant):\n"
            "    return torch.optim.SGD(parameters, lr=float('inf'))",
            r"^the update of a is not finite after 1 steps; lower the learning rate",
        ),
        (
            "def loss(self, output, target):\n    return torch.ones(len(target))",
            r"^the backward pass failed.*: RuntimeError: element 0 of tensors does not",
        ),
        (
            "def optimizer(self, parameters, participant):\n    return None",
            r"^optimizer\(\) returned NoneType, not a torch\.optim\.Optimizer$",
        ),
        (
            "def optimizer(self, parameters, participant):\n    return 1 / 0",
            r"^optimizer\(\) failed at .*task\.py:\d+: ZeroDivisionError",
        ),
        (
            "def optimizer(self, parameters, participant):\n"
            "    return torch.optim.SGD(self.model().parameters(), lr=0.1)",
            r"^optimizer\(\) uses none of the parameters that were passed to it; use them$",
        ),
        (
            "def optimizer(self, parameters):\n    return None",  # the call itself fails
            r"^optimizer\(\) failed: TypeError: Learn.optimizer\(\) takes 2 positional arguments",
        ),
        (
            "def optimizer(self, parameters, participant):\n"
            "    return torch.optim.LBFGS(parameters)",
            r"^the optimizer's step failed.*: TypeError: .*closure",
        ),
    ],
)
def test_failed_training_is_reported_in_one_sentence(open_run, methods, sentence):
    with pytest.raises(TaskError, match=sentence):
        train(open_run(methods=methods))


def test_a_device_without_data_declines(open_run):
    with pytest.raises(
        TaskError, match=r"^local_data\(\) of a is empty: there is no data to train"
    ):
        open_run(methods="def local_data(self, participant):\n    return rows(0, 0)")


def test_a_device_with_another_model_declines(open_run):
    other = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 5)})
    with pytest.raises(TaskError) as caught:
        open_run(layout=other)
    assert str(caught.value) == (
        "this device's model is not the server's: parameter 'weight' has shape (3, 4) here and "
        "(3, 5) there"
    )


def test_cancelled_training_stops_at_the_next_step(open_run):
    run = open_run("federated.local_steps=100")
    progress = Progress()
    work = link_pb2.TrainLocal(run_id="run", round=1, attempt=1)
    with pytest.raises(TaskError, match="no longer wants the update of this round"):
        run.train(
            work, run.layout.encode(build_start(run)), progress, lambda: len(progress.steps) == 3
        )
    assert len(progress.steps) == 3


def test_data_of_the_device_overrides_the_data_of_the_job(write_task, make_job, tmp_path):
    write_task("""
        def local_data(self, participant):
            return rows(int(self.data.read_text()), 0)
    """)
    (tmp_path / "job.txt").write_text("3")
    (tmp_path / "own.txt").write_text("5")
    job = make_job("task.data=job.txt")
    layout = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})
    work = link_pb2.OpenRun(job=job.model_dump_json(), base=str(tmp_path), layout=layout.header)
    who = Participant(name="a", regime="federated")
    assert DeviceRun(work, who, None).examples == 3
    assert DeviceRun(work, who, tmp_path / "own.txt").examples == 5


@pytest.mark.parametrize(
    "source",
    ["task.py:Learn", "../tasks/../task.py:Learn", "tasks:Learn", "statistics:Learn", "{}:Learn"],
)
def test_a_remote_server_can_only_name_tasks_that_the_owner_installed(
    write_task, make_job, tmp_path, source
):
    elsewhere = write_task()
    (tmp_path / "tasks").mkdir()
    job = make_job(f"task.source={source.format(elsewhere)}").model_dump_json()
    work = link_pb2.OpenRun(run_id="run", job=job, base=str(tmp_path), layout=LAYOUT.header)
    who = Participant(name="a", regime="federated")
    with pytest.raises(TaskError, match=r"is not a file in .*tasks, where this machine keeps"):
        DeviceRun(work, who, None, tmp_path / "tasks")


@pytest.mark.parametrize(
    "source",
    [
        "survey/../survey/task.py:Learn",
        "./survey/task.py:Learn",
        "survey/./task.py:Learn",
        "survey//task.py:Learn",
        "../tasks/survey/task.py:Learn",
        "{}:Learn",
    ],
)
def test_a_remote_server_names_a_task_in_one_way(write_task, make_job, tmp_path, source):
    """A device remembers statistics by the code, whose digest has the names of the files."""
    folder = tmp_path / "tasks" / "survey"
    folder.mkdir(parents=True)
    path = write_task().rename(folder / "task.py")
    who = Participant(name="a", regime="federated")

    def opened(source):
        job = make_job(f"task.source={source}").model_dump_json()
        work = link_pb2.OpenRun(run_id="run", job=job, base=str(tmp_path), layout=LAYOUT.header)
        return DeviceRun(work, who, None, tmp_path / "tasks")

    with pytest.raises(TaskError, match="write the path as its files are named in"):
        opened(source.format(path))
    assert opened("survey/task.py:Learn").examples


def test_the_owner_s_copy_of_a_task_and_the_owner_s_data_are_used(write_task, make_job, tmp_path):
    read = """
        def local_data(self, participant):
            return rows(len(self.data.read_text()), 0)
    """
    own = tmp_path / "tasks"
    own.mkdir()
    write_task(read).rename(own / "task.py")
    write_task("def local_data(self, participant):\n    raise SystemExit('not this one')")
    job = make_job("task.data=secrets").model_dump_json()
    work = link_pb2.OpenRun(run_id="run", job=job, base=str(tmp_path), layout=LAYOUT.header)
    who = Participant(name="a", regime="federated")
    (tmp_path / "secrets").write_text("not for the server to choose")
    with pytest.raises(TaskError, match="reads data from a path and none was given"):
        DeviceRun(work, who, None, own)
    (tmp_path / "own.txt").write_text("five!")
    assert DeviceRun(work, who, tmp_path / "own.txt", own).examples == 5


@pytest.mark.parametrize("secure", [True, False])
def test_with_secure_aggregation_a_loss_of_nan_does_not_end_training_early(open_run, secure):
    """The time until the reply would tell in which step it became nan."""
    run = open_run(
        "federated.local_steps=5",
        f"federated.secure_aggregation={str(secure).lower()}",
        methods="""
        steps = 0

        def loss(self, output, target):
            self.steps += 1
            return output.sum(1) * float('nan')
        """,
    )
    with pytest.raises(TaskError, match="is nan at step 1"):
        train(run)
    assert run.task.steps == (5 if secure else 1)


@pytest.mark.parametrize(
    ("overrides", "imported"), [((), ["torch._dynamo"]), (STATISTICS_ALONE, [])]
)
def test_what_the_first_optimizer_imports_is_there_when_a_run_is_open(
    open_run, monkeypatch, overrides, imported
):
    names = []
    importing = SimpleNamespace(import_module=names.append)
    monkeypatch.setattr("isthmus_clients.training.local_run.importlib", importing)
    open_run(*overrides)
    assert names == imported


def test_gradients_are_clipped_to_a_norm(open_run):
    options = ["federated.local_steps=1", "federated.batch_size=20", "task.settings.lr=0.5"]
    whole, clipped = (
        train(open_run(*options, *more))[0] for more in ([], ["federated.clip_norm=0.01"])
    )
    assert whole.norm() > 0.005
    torch.testing.assert_close(clipped, whole * 0.005 / whole.norm(), rtol=1e-3, atol=1e-7)
    assert torch.equal(train(open_run(*options, "federated.clip_norm=1e6"))[0], whole)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_layers_compute_in_the_precision_of_the_job(open_run, precision):
    seen = """
    def loss(self, output, target):
        self.seen = output.dtype
        return super().loss(output, target)
    """
    options = ["federated.local_steps=4", f"federated.precision={precision}"]
    run = open_run(*options, methods=seen)
    update = train(run)[0]
    assert run.task.seen == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert {each.dtype for each in run.model.parameters()} == {torch.float32}
    exact = train(open_run("federated.local_steps=4", methods=seen))[0]
    assert not torch.equal(update, exact)
    torch.testing.assert_close(update, exact, rtol=0.1, atol=0.01)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own modules
def test_a_compiled_model_trains_as_another_does(open_run):
    expected = train(open_run("federated.local_steps=2"))[0]
    with torch.compiler.set_stance("force_eager"):
        run = open_run("federated.local_steps=2", "federated.compile=true")
    assert run._trained is not run.model
    with torch.compiler.set_stance("force_eager"):  # the compiler would take long
        assert torch.equal(train(run)[0], expected)


def test_a_participant_has_the_round_where_an_optimizer_is_made(open_run):
    methods = """
    def local_data(self, participant):
        self.rounds = [participant.round]
        return super().local_data(participant)

    def optimizer(self, parameters, participant):
        self.rounds.append(participant.round)
        return super().optimizer(parameters, participant)
    """
    run = open_run(methods=methods)
    train(run, 1)
    train(run, 7)
    assert run.task.rounds == [0, 1, 7]


NORMALISED = """
    def model(self):
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
"""


def test_running_statistics_start_from_the_server_and_travel(open_run):
    run = open_run("federated.local_steps=2", methods=NORMALISED)
    start = build_start(run)
    trained = run.layout.trained_size
    start[trained:] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])  # means, then variances
    update, *_ = train(run, start=start)
    model = run.model
    ends = torch.cat([model[1].running_mean, model[1].running_var])
    torch.testing.assert_close(update[trained:], start[trained:] - ends)
    again, *_ = train(run, start=start)
    assert torch.equal(again, update), "nothing is left of the first training"


SCALED_BY_HAND = """
    def forward(self, model, inputs):
        return model((inputs - inputs.mean(0)) / inputs.std(0))
"""
SCALED_WITHIN = """
    def forward(self, model, inputs):
        output = model(inputs)
        output = output - output.mean(0)
        return output / (output.square().mean(0).sqrt() + 1e-5)
"""
"""Its loss of one row is finite, and its gradient is not."""
IN_TURN = """
    def model(self):
        return nn.ModuleDict({"first": nn.Linear(4, 3), "second": nn.Linear(4, 3)})

    def optimizer(self, parameters, participant):
        return {
            name: torch.optim.SGD(parameters.of(name), lr=0.1) for name in ("first", "second")
        }

    def training_step(self, model, batch, optimizer):
        inputs, target = batch
        return nn.functional.cross_entropy(model[optimizer](inputs), target)
"""
NORMALISED_IN_TURN = IN_TURN.replace(
    '"second": nn.Linear(4, 3)', '"second": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))'
)
PENALISED = """
    def training_step(self, model, batch):
        inputs, target = batch
        inputs = inputs.clone().requires_grad_()
        output = model(inputs)
        (slopes,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return nn.functional.cross_entropy(output, target) + slopes.square().mean()
"""


@pytest.mark.parametrize("methods", [NORMALISED, SCALED_BY_HAND, SCALED_WITHIN, NORMALISED_IN_TURN])
def test_a_last_row_that_cannot_be_trained_alone_is_left_out_of_secure_runs(
    open_run, caplog, methods
):
    """20 examples in batches of 19; the update is that of the first batch, in every round."""
    batches = ("federated.batch_size=19", "federated.secure_aggregation=true")
    run = open_run("federated.local_epochs=1", *batches, methods=methods)
    for round_ in (1, 2):
        update, trained, _ = train(run, round_)
        first, *_ = train(open_run("federated.local_steps=1", *batches, methods=methods), round_)
        assert torch.equal(update, first)
        assert trained.steps == 1
    assert caplog.text.count("the last row of each epoch is left out") == 1


@pytest.mark.parametrize("methods", ["pass", IN_TURN, PENALISED])
def test_a_last_row_that_can_be_trained_alone_is_trained_in_secure_runs(open_run, methods):
    settings = ("federated.local_epochs=2", "federated.batch_size=19")
    secure = (*settings, "federated.secure_aggregation=true")
    update, trained, _ = train(open_run(*secure, methods=methods))
    assert torch.equal(update, train(open_run(*settings, methods=methods))[0])
    assert trained.steps == 4


def test_a_last_row_that_cannot_be_trained_alone_ends_other_runs_with_what_to_do(open_run):
    run = open_run("federated.local_epochs=1", "federated.batch_size=19", methods=NORMALISED)
    with pytest.raises(TaskError, match=r"BatchNorm cannot train on a batch of one row, .*"):
        train(run)


def test_whether_a_last_row_is_left_out_follows_from_the_rounds_model(open_run):
    """A device that is opened again between two attempts of a round repeats its update."""
    methods = """
    def forward(self, model, inputs):
        output = model(inputs)
        return output if len(inputs) > 1 or model.weight.sum() < 12 else output * float("nan")
    """
    settings = (
        "federated.local_epochs=1",
        "federated.batch_size=19",
        "federated.secure_aggregation=true",
    )
    run = open_run(*settings, methods=methods)
    start = build_start(run)
    train(run, 1)
    start[:] = 2.0
    update, trained, _ = train(run, 2, start)
    assert trained.steps == 1
    assert torch.equal(update, train(open_run(*settings, methods=methods), 2, start)[0])


def test_frozen_statistics_are_those_of_the_built_model(open_run, write_task, tmp_path, make_job):
    write_task(NORMALISED)
    task = load_task("task.py:Learn", {}, base=tmp_path)
    layout = TensorLayout.of(build_model(task, 0), statistics=False)
    frozen = "exchange.buffers='frozen'"
    run = open_run("federated.local_steps=2", frozen, methods=NORMALISED, layout=layout)
    update, *_ = train(run)
    assert len(update) == layout.trained_size == run.layout.size
    assert run.model[1].running_mean.eq(0).all()
    assert run.model[1].running_var.eq(1).all()


def test_a_frozen_parameter_that_training_changes_is_named(open_run):
    teacher = """
        def model(self):
            model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
            model[1].requires_grad_(False)
            return model

        def forward(self, model, inputs):
            for old, new in zip(model[1].parameters(), model[0].parameters()):
                old.data.lerp_(new.data, 0.5)
            return model[0](inputs)
    """
    run = open_run("federated.local_steps=2", methods=teacher)
    with pytest.raises(TaskError, match=r"^training changed '1.(weight|bias)', which is frozen"):
        train(run)


def test_a_frozen_parameter_without_a_value_yet_trains_as_if_it_had_one(open_run):
    def update(value):
        padded = f"""
        def model(self):
            model = nn.Linear(4, 3)
            model.pad = nn.Parameter(torch.full((4,), {value}), requires_grad=False)
            return model
        """
        return train(open_run("federated.local_steps=2", methods=padded))[0]

    assert torch.equal(update("torch.nan"), update("0.0"))


LATE = """
        def model(self):
            class Late(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.body, self.head = nn.Linear(4, 3), None
                def forward(self, inputs):
                    hidden = self.body(inputs)
                    if self.head is None{when}:
                        self.head = nn.Linear(3, 3)
                    return hidden if self.head is None else self.head(hidden)
            return Late()
"""


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("federated.proximal=0.1", "federated.secure_aggregation=false"),
        ("federated.accumulate=2",),
    ],
)
def test_a_layer_that_forward_makes_is_refused(open_run, settings):
    run = open_run("federated.local_steps=2", *settings, methods=LATE.format(when=""))
    for _ in range(2):
        with pytest.raises(
            TaskError, match=r"^running the model added the parameter 'head.weight'"
        ):
            train(run)


def test_a_layer_that_is_made_when_a_model_is_scored_is_refused(open_run):
    run = open_run(methods=LATE.format(when=" and not self.training"))
    payload = run.layout.encode(build_start(run))
    with pytest.raises(TaskError, match=r"^running the model added the parameter 'head.weight'"):
        run.score(payload, [[0]])


@pytest.mark.parametrize(("at_first", "done"), [(True, "froze"), (False, "unfroze")])
def test_an_optimizer_that_changes_what_is_frozen_is_refused_when_it_does(open_run, at_first, done):
    changing = f"""
        def model(self):
            model = nn.Linear(4, 3)
            model.weight.requires_grad_({at_first})
            return model
        def optimizer(self, parameters, participant):
            parameters.named["weight"].requires_grad_({at_first} == (participant.round < 2))
            return torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.1)
    """
    run = open_run("federated.local_steps=2", methods=changing)
    first = train(run, 1)[0]
    for _ in range(2):
        with pytest.raises(TaskError, match=rf"^optimizer\(\) {done} 'weight', .* leave it out of"):
            train(run, 2)
    assert torch.equal(train(run, 1)[0], first)


def test_an_optimizer_without_a_parameter_leaves_it_as_it_was(open_run):
    bias_only = """
        def optimizer(self, parameters, participant):
            return torch.optim.SGD(parameters.of("bias"), lr=0.1)
    """
    run = open_run("federated.local_steps=2", methods=bias_only)
    update, *_ = train(run)
    parts = dict(run.layout.parts(update))
    assert parts["weight"].eq(0).all()
    assert parts["bias"].ne(0).any()


def test_a_parameter_that_training_freezes_is_named(open_run):
    late = """
        def forward(self, model, inputs):
            output = model(inputs)
            model.bias.requires_grad_(False)
            return output
    """
    run = open_run("federated.local_steps=2", methods=late)
    with pytest.raises(TaskError, match=r"^training froze 'bias', .* freeze it in model\(\)"):
        train(run)


class Counted(torch.utils.data.TensorDataset):
    """Counts which of its rows were read."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def test_a_training_that_fails_reads_no_more_rows_for_a_server_elsewhere(open_run, tmp_path):
    """The search for a row with nan takes time, and a lying server can set `clients` in its job."""
    job = ("federated.secure_aggregation=true", "federated.clients=20", "federated.cohort=20")
    reads = []
    for tasks in (tmp_path, None):
        for bad in (0.0, float("nan")):
            run = open_run(*job, tasks=tasks)
            inputs, target = run.dataset.tensors
            inputs = inputs.clone()
            inputs[-1, -1] = bad
            run.data.dataset = run.dataset = Counted(inputs, target)
            if bad == 0:
                train(run)
            else:
                with pytest.raises(TaskError, match="nan"):
                    train(run)
            reads.append(run.dataset.reads)
    elsewhere, failed_elsewhere, here, failed_here = reads
    assert failed_elsewhere == elsewhere == here < failed_here


HALF = """
def model(self):
    return nn.Linear(4, 3).to(torch.bfloat16)
def forward(self, model, x):
    return model(x.to(torch.bfloat16)).float()
"""


@pytest.mark.parametrize("summed", [True, False])
def test_updates_of_half_precision_are_in_no_sum_of_an_owners_device(open_run, tmp_path, summed):
    """What hides them would be as large as they are."""
    settings = [f"federated.secure_aggregation={str(summed).lower()}", "federated.cohort=20"]
    run = open_run(*settings, methods=HALF, tasks=tmp_path)
    if not summed:
        assert train(run)[0].any()
        return
    with pytest.raises(TaskError, match="'bias' is of type bfloat16, and devices hide"):
        train(run)
