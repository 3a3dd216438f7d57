"""What `isthmus job check` and `isthmus run` refuse before the first round."""

import io
import re

import pytest
from rich.console import Console

from isthmus.errors import UserError
from isthmus.job.commands import check
from isthmus.job.unused_layout import unused_layout
from isthmus.task import load_task
from isthmus_server.checks import check as server_check
from isthmus_server.runs.local.session import LocalRun

NAN_ROW = """
    def {method}(self{argument}):
        data = rows(20, seed=1)
        data.tensors[0][7, 2] = float("nan")
        return data
"""


@pytest.fixture
def check_job(write_task, tmp_path, capsys):
    def checked(*overrides, methods="pass"):
        write_task(methods)
        path = tmp_path / "job.toml"
        path.write_text('name = "table"\n[task]\nsource = "task.py:Learn"\n')
        changes = ("federated.clients=4", "federated.cohort=4", *overrides)
        check.callback(path, changes, memory=False, collectives=False, ranks=None, device=None)
        return capsys.readouterr().out

    return checked


FEDERATED = "strategy.policy=federated"
PLAIN = "federated.secure_aggregation=false"


def test_one_batch_of_each_side_is_tried(check_job):
    out = check_job("datacenter.ranks=2", "datacenter.batch_size=4")
    assert out.splitlines()[1] == (
        "tried   one batch of held-out data (accuracy, loss), one training batch of the "
        "datacenter, one training batch of client-0"
    )


def test_a_job_can_be_checked_again_in_one_process(check_job):
    """As in a notebook: after a check that found a mistake, and after a change of the task."""
    sides = ("datacenter.ranks=2", "datacenter.batch_size=4")
    mistake = """
        def loss(self, output, target):
            return super().loss(output, target).mean()
        """
    first = check_job(*sides)
    assert check_job(*sides) == first
    with pytest.raises(UserError, match="must return one value per example"):
        check_job(*sides, methods=mistake)
    for stage in (0, 3):
        assert check_job(*sides, f"datacenter.zero_stage={stage}") == first


def test_a_batch_of_the_first_simulated_client_is_tried(check_job):
    overrides = (FEDERATED, "federated.clients=0", "simulation.clients=9")
    methods = """
        def local_data(self, participant):
            assert participant.shard == (0, 9)
            return super().local_data(participant)
        """
    first, second, *_ = check_job(*overrides, methods=methods).splitlines()
    assert first.endswith("policy federated, 9 simulated clients, 0 datacenter ranks")
    assert second.endswith("one training batch of client-0")


def test_the_clients_of_a_run_are_tried_rather_than_those_of_a_simulation(check_job):
    assert "policy federated, 4 clients, " in check_job(FEDERATED, "simulation.clients=9")


NORMALISED = """
    def model(self):
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    """


def test_a_last_batch_of_one_row_is_tried(check_job):
    """The first batch of an epoch trains, and the last one failed in the first round."""
    with pytest.raises(
        UserError,
        match=r"^the last batch of an epoch of client-0 has one row, as local_data\(\) has 20 and "
        r"federated.batch_size=19, and cannot be trained: .*BatchNorm cannot train on a batch of ",
    ):
        check_job(FEDERATED, PLAIN, "federated.batch_size=19", methods=NORMALISED)


def test_a_last_batch_of_one_row_is_left_out_of_secure_runs(check_job):
    out = check_job(FEDERATED, "federated.batch_size=19", methods=NORMALISED)
    assert (
        "one training batch of client-0; a last batch of one row, which it has in each epoch, is "
        "left out, since it cannot be trained: forward() failed"
    ) in out


def test_a_last_part_of_one_row_is_tried(check_job):
    """The second batch has five rows, in parts of four and one."""
    rest = """
    def local_data(self, participant):
        return rows(21, seed=1)
    """
    parts = ("federated.batch_size=16", "federated.accumulate=4")
    with pytest.raises(UserError, match=r"federated.batch_size=16 in 4 parts, and cannot"):
        check_job(FEDERATED, PLAIN, *parts, methods=NORMALISED + rest)


@pytest.mark.parametrize(
    "changes",
    [
        ["federated.batch_size=18"],
        ["federated.batch_size=19", "federated.local_steps=1"],
    ],
)
def test_a_last_batch_that_no_round_has_is_not_tried(check_job, changes):
    assert "single row" not in check_job(FEDERATED, *changes, methods=NORMALISED)


def test_a_last_row_that_can_be_trained_is_no_mistake(check_job):
    out = check_job(FEDERATED, "federated.batch_size=19")
    assert out.splitlines()[1].endswith("one training batch of client-0 and one of a single row")


COUNTED = """
    def model(self):
        class Counted(nn.Linear):
            def __init__(self):
                super().__init__(4, 3)
                self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
                self.register_buffer("table", torch.tensor([1.0, float("nan")]))
                self.register_buffer("cache", torch.zeros(1), persistent=False)

            def forward(self, inputs):
                if self.training:
                    self.seen += len(inputs)
                    self.cache += 1
                return super().forward(inputs)

        return nn.Sequential(Counted(), nn.BatchNorm1d(3))
    """


def test_buffers_that_training_changes_and_that_are_not_exchanged_are_named(check_job):
    """Not running statistics, which are exchanged, nor buffers that stay as they are."""
    out = check_job(
        "datacenter.ranks=2", "datacenter.batch_size=4", "federated.batch_size=10", methods=COUNTED
    )
    sentence = (
        ", which changes buffers that are not exchanged ('0.seen'): the model that is "
        "delivered has the values of model()"
    )
    assert f"batch of the datacenter{sentence}, one training batch of client-0{sentence}\n" in out


EMPTY = """
    def model(self):
        class Empty(nn.Linear):
            def __init__(self):
                super().__init__(4, 3)
                self.extra = nn.Parameter(torch.zeros(0, 2), requires_grad={trained})

            def forward(self, inputs):
                return super().forward(inputs) + self.extra.sum()

        return Empty()
    """


@pytest.mark.parametrize("stage", [1, 3])
def test_an_empty_parameter_is_refused_before_it_is_sharded(check_job, stage):
    """It failed in the first backward pass of a run, and one rank alone shards nothing."""
    datacenter = ("strategy.policy=datacenter", "datacenter.ranks=2", "datacenter.batch_size=4")
    sharded = (*datacenter, f"datacenter.zero_stage={stage}")
    with pytest.raises(
        UserError,
        match=rf"^parameter 'extra' has no elements \(its shape is \(0, 2\)\), and its gradient "
        rf"cannot be sharded with datacenter.zero_stage={stage} ",
    ):
        check_job(*sharded, methods=EMPTY.format(trained=True))
    assert "is fine" in check_job(*sharded, methods=EMPTY.format(trained=False))
    whole = (*datacenter, "datacenter.zero_stage=0")
    assert "is fine" in check_job(*whole, methods=EMPTY.format(trained=True))


def test_what_the_job_takes_from_updates_is_said(check_job):
    out = check_job(FEDERATED, "federated.clip=4", "federated.max_examples=9")
    assert "elements of updates outside of -4 to 4 will be clipped (federated.clip), and the" in out
    assert "with more than 9 examples will count as if they had so many (federated.max" in out
    assert "clipped" not in check_job(FEDERATED)
    plain = check_job(
        FEDERATED,
        "federated.secure_aggregation=false",
        "federated.clip=4",
        "federated.max_examples=9",
    )
    assert "with more than 9 examples will count" in plain
    assert "clipped" not in plain


ROBUST = (
    FEDERATED,
    "federated.clients=240",
    "federated.cohort=240",
    "federated.robust_groups=16",
    "federated.robust_minimum=12",
)
WITHSTOOD = {
    "median": "withstands any lies in 7 groups, so 7 lying devices wherever they are (2.9% of the "
    "cohort), if no honest group is more than 3 times as long as another; and more of them only if "
    "their sums are long: up to 8 groups are left out",
    "trimmed-mean": "withstands any lies in 3 groups, so 3 lying devices wherever they are (1.2% "
    "of the cohort), if no honest group is more than 3 times as long as another; and more of them "
    "only if their sums are long: up to 12 groups are left out whose mean is more than 3 times as "
    "long as those of the 4 shortest; if a tenth of the devices lies, more than 12 groups have a "
    "liar in 62.8% of the rounds",
    "norm-bound": "bounds what each group adds, and withstands no lying device; up to 14 groups",
}


@pytest.mark.parametrize("rule", WITHSTOOD)
def test_how_many_lying_devices_a_robust_rule_withstands_is_said(check_job, rule):
    settings = ("federated.robust_settings={norm=1}",) if rule == "norm-bound" else ()
    out = check_job(*ROBUST, f"federated.robust={rule}", *settings)
    said = f"federated.robust='{rule}' over 16 random groups of 15 devices {WITHSTOOD[rule]}"
    assert said in " ".join(out.split())


def test_one_group_and_one_device_are_told_in_the_singular(check_job):
    few = ("federated.clients=24", "federated.cohort=24", "federated.robust_groups=4")
    out = check_job(*ROBUST, *few, "federated.robust_minimum=6", "federated.robust=median")
    assert (
        "withstands any lies in 1 group, so 1 lying device wherever it is (4.2% of the cohort)"
    ) in " ".join(out.split())
    share = "federated.robust_settings={share=0.34}"
    two = ("federated.robust_groups=3", "federated.robust_minimum=8", "federated.quorum=24")
    out = check_job(*ROBUST, *few, *two, "federated.robust=trimmed-mean", share)
    assert "up to 1 group is left out whose mean" in " ".join(out.split())
    assert "more than 1 group has a liar" in " ".join(out.split())


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            [*ROBUST, "federated.robust=trimmed-mean", "federated.robust_settings={share=0.05}"],
            r"federated.robust='trimmed-mean' leaves out federated.robust_settings.share=0.05 of "
            r"the groups at each end, and with a quorum of \d+ devices only 1\d of 16 random "
            r"groups need be there, .* raise the share to 0.0\d or more, or federated.robust_",
        ),
        (
            [*ROBUST, "federated.robust=median", "federated.clients=200"],
            "federated.cohort=240 is above federated.clients=200",
        ),
        (
            ["federated.cohort=5", FEDERATED],
            r"federated.cohort=5 is above federated.clients=4, the devices that `isthmus run` "
            "starts; lower one or raise the other",
        ),
        (
            ["federated.cohort=8", FEDERATED],
            "strategy.policy='federated' trains federated rounds, which need 6 devices",
        ),
        (
            ["strategy.policy=hybrid"],
            "strategy.policy='hybrid' trains hybrid rounds, and datacenter.ranks=0 starts no "
            "datacenter; raise it, or choose another policy",
        ),
        (
            ["strategy.policy=adaptive", "federated.clients=0", "datacenter.ranks=1"],
            "strategy.policy='adaptive' trains federated rounds, which need 3 devices .* and "
            "federated.clients=0 starts fewer; ",
        ),
        (
            ["strategy.policy=adaptive", "strategy.target_edge_share=0"],
            "strategy.policy='adaptive' trains datacenter rounds, and datacenter.ranks=0 starts ",
        ),
        (
            ["strategy.policy=rule", "strategy.target_edge_share=0.5"],
            "strategy.policy='rule' trains hybrid rounds, and datacenter.ranks=0 starts no ",
        ),
        (
            ["datacenter.ranks=2"],
            r"datacenter.batch_size=32 for each of 2 replica\(s\) is a batch of 64 examples, and "
            r"local_data\(\) of the datacenter has 20; lower it",
        ),
        (
            [FEDERATED, "strategy.target_metric={name='acuracy', at_least=0.9}"],
            "strategy.target_metric.name='acuracy' is not a held-out metric of the task; it has "
            "accuracy, loss",
        ),
        (
            ["strategy.policy=plateau", "strategy.settings.metric=f1", "strategy.settings.first="
             "federated", "strategy.settings.then=federated"],
            "strategy.settings.metric='f1' is not a held-out metric",
        ),
    ],
)  # fmt: skip
def test_a_job_that_cannot_work_is_refused(check_job, overrides, sentence):
    with pytest.raises(UserError, match=f"^{sentence}"):
        check_job(*overrides)


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        (
            "def loss(self, output, target):\n    return (output - 1).square().mean()",
            r"loss\(\) must return one value per example, not a single number",
        ),
        (
            NAN_ROW.format(method="eval_data", argument=""),
            r"the loss on eval_data\(\) is nan; example 7 of eval_data\(\) has a value that is not "
            "finite; remove or fill it",
        ),
        (
            NAN_ROW.format(method="local_data", argument=", participant"),
            r"the loss of client-0 is nan at step 1; example 7 of local_data\(\) of client-0 has a "
            "value that is not finite; remove or fill it",
        ),
        (
            "def optimizer(self, parameters, participant):\n    return None",
            r"optimizer\(\) returned NoneType",
        ),
        (
            "def optimizer(self, parameters, participant):\n"
            "    parameters.named['weight'].requires_grad_(False)\n"
            "    return torch.optim.SGD(parameters, lr=0.1)",
            r"optimizer\(\) froze 'weight', which would stay so in later rounds; freeze it in "
            r"model\(\), or leave it out of the optimizer$",
        ),
        (
            "def model(self):\n"
            "    model = nn.Linear(4, 3)\n"
            "    model.weight.requires_grad_(False)\n"
            "    return model\n"
            "def optimizer(self, parameters, participant):\n"
            "    parameters.named['weight'].requires_grad_(True)\n"
            "    return torch.optim.SGD(parameters, lr=0.1)",
            r"optimizer\(\) unfroze 'weight', which is not exchanged, because it is frozen; ",
        ),
    ],
)
def test_a_task_that_cannot_be_trained_is_refused(check_job, methods, sentence):
    with pytest.raises(UserError, match=f"^{sentence}"):
        check_job(FEDERATED, methods=methods)


def test_a_batch_of_one_row_for_batch_norm_is_refused_with_what_to_do(check_job):
    methods = """
        def model(self):
            return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
        def local_data(self, participant):
            return rows(1, seed=1)
        """
    sentence = r"Expected more than 1 value .*; BatchNorm cannot train on a batch of one row, .*"
    with pytest.raises(UserError, match=rf"^forward\(\) failed.*: {sentence}or use GroupNorm$"):
        check_job(FEDERATED, methods=methods)


@pytest.mark.parametrize(
    ("what", "methods"),
    [
        (
            r"optimizer\(\)",
            """
            def optimizer(self, parameters, participant):
                parameters.named["weight"].requires_grad_(False)
                return super().optimizer(parameters, participant)
            """,
        ),
        (
            "training",
            """
            def forward(self, model, inputs):
                output = model(inputs)
                if model.training:
                    model.weight.requires_grad_(False)
                return output
            """,
        ),
    ],
)
def test_a_datacenter_whose_task_freezes_a_parameter_is_refused(check_job, what, methods):
    overrides = ("strategy.policy=datacenter", "datacenter.ranks=1", "datacenter.batch_size=4")
    with pytest.raises(UserError, match=f"^{what} froze 'weight', which would stay so in later"):
        check_job(*overrides, methods=methods)


PLATEAU = (
    "strategy.policy=plateau",
    *[f"strategy.settings.{n}=federated" for n in ("first", "then")],
)


@pytest.mark.parametrize(
    ("overrides", "methods", "sentence"),
    [
        (
            PLATEAU,
            "eval_data = isthmus.Task.eval_data",
            r"strategy.settings.metric='loss' follows a metric, and nothing evaluates the model; ",
        ),
        (
            PLATEAU,
            "def eval_data(self): return None",
            r"strategy.settings.metric='loss' follows a metric, and nothing evaluates the model; ",
        ),
        (
            PLATEAU,
            "eval_data = isthmus.Task.eval_data\ndef public_eval(self): return rows(9, seed=1)",
            r"strategy.settings.metric='loss' is a metric on eval_data\(\), which Learn does not ",
        ),
        (
            ("strategy.policy=adaptive", "datacenter.ranks=1", "datacenter.batch_size=4"),
            "eval_data = isthmus.Task.eval_data",
            r'strategy.policy="adaptive" follows the loss on eval_data\(\), which Learn does not ',
        ),
    ],
)
def test_a_policy_without_the_metric_that_it_follows_is_refused(
    check_job, overrides, methods, sentence
):
    with pytest.raises(UserError, match=f"^{sentence}"):
        check_job(*overrides, methods=methods)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("simulation.clients=3",),
            r"a population of 3 devices \(simulation.clients\) is smaller than the cohort of 4 ",
        ),
        (
            ("simulation.clients=3", "federated.clients=0", "datacenter.ranks=1"),
            r"a population of 3 devices \(simulation.clients\) is smaller than the cohort of 4 ",
        ),
        (
            ("simulation.connected=3",),
            "simulation.connected=3 is below the 4 devices that a round invites; raise it",
        ),
    ],
)
def test_a_population_that_cannot_be_simulated_is_refused(check_job, overrides, sentence):
    with pytest.raises(UserError, match=f"^{sentence}"):
        check_job(FEDERATED, *overrides)


def test_a_simulated_job_whose_devices_are_named_on_the_command_line_is_fine(check_job):
    assert "policy federated, 0 clients, " in check_job(
        FEDERATED, "federated.clients=0", "simulation.step_seconds=2"
    )


@pytest.mark.parametrize("policy", ["adaptive", "alternate"])
@pytest.mark.parametrize("simulation", ["clients=9", "step_seconds=2"])  # or with --clients
def test_simulated_devices_are_those_that_a_policy_needs(
    write_task, make_job, tmp_path, policy, simulation
):
    write_task()
    job = make_job(
        *(f"strategy.policy={policy}", "datacenter.ranks=1"),
        *("federated.clients=0", f"simulation.{simulation}"),
    )
    task = load_task(job.task.source, {}, base=tmp_path)
    assert server_check(job, task, tmp_path) == "one batch of held-out data (accuracy, loss)"


ADAPTIVE = "strategy.policy=adaptive"
HALF = "strategy.target_edge_share=0.5"


@pytest.mark.parametrize("devices", ["federated.clients=4", "simulation.clients=4"])
def test_a_part_of_the_target_that_nobody_learns_is_noted(check_job, devices):
    *_, note = check_job(ADAPTIVE, HALF, "federated.clients=0", devices).splitlines()
    assert note == (
        "note    strategy.target_edge_share=0.5 leaves 0.5 of the target to the data of a "
        "datacenter, and datacenter.ranks=0 starts none: that part is not learned; raise "
        "datacenter.ranks, or set strategy.target_edge_share=1"
    )


@pytest.mark.parametrize(
    "overrides", [(ADAPTIVE,), (FEDERATED, HALF), (ADAPTIVE, HALF, "federated.clients=0")]
)
def test_without_such_a_part_there_is_no_note(check_job, overrides):
    assert "note" not in check_job(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ("datacenter.ranks=0",),  # a server's participants join it
        ("datacenter.ranks=1", "strategy.target_edge_share=0"),
        (
            *("datacenter.ranks=1", "strategy.objective=time"),
            "strategy.target_metric={name='accuracy', at_least=0.9}",
        ),
    ],
)
def test_adaptive_needs_devices_only_where_they_may_not_be_left_out(
    write_task, make_job, tmp_path, overrides
):
    write_task()
    job = make_job("strategy.policy=adaptive", "federated.clients=0", *overrides)
    task = load_task(job.task.source, {}, base=tmp_path)
    assert server_check(job, task, tmp_path) == "one batch of held-out data (accuracy, loss)"


async def test_a_run_whose_policy_needs_devices_ends_at_once(write_task, make_job, tmp_path):
    write_task()
    job = make_job("strategy.policy=adaptive", "datacenter.ranks=1")
    run = LocalRun.new(job, tmp_path, tmp_path / "run")
    with pytest.raises(UserError, match=r"trains federated rounds, which need .* devices"):
        await run.run(None, Console(), None)


async def test_a_run_whose_policy_needs_a_datacenter_ends_at_once(write_task, make_job, tmp_path):
    write_task()
    job = make_job("strategy.policy=hybrid", "federated.clients=8")
    run = LocalRun.new(job, tmp_path, tmp_path / "run")
    with pytest.raises(UserError, match=r"trains hybrid rounds, and datacenter.ranks=0 starts no"):
        await run.run(None, Console(), None)


@pytest.mark.parametrize(
    "budget",
    [
        ("privacy.mechanism=gaussian", "privacy.epsilon=1e-6", "privacy.delta=1e-5"),
        (
            *("datacenter.privacy.epsilon=1e-9", "datacenter.privacy.delta=1e-6"),
            *("datacenter.privacy.examples=200", "datacenter.batch_size=200"),
            *("datacenter.data_parallel=1", "datacenter.zero_stage=0"),
        ),
    ],
)
def test_a_budget_that_no_noise_meets_leaves_no_directory(write_task, make_job, tmp_path, budget):
    """The corrected job can then be given the same one."""
    write_task()
    with pytest.raises(UserError, match=r"would need noise of"):
        LocalRun.new(make_job("rounds=5", *budget), tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_schedule_needs_the_length_of_a_federated_round(check_job):
    methods = """
    def optimizer(self, parameters, participant):
        optimizer = super().optimizer(parameters, participant)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5)
    """
    sentence = "set federated.local_steps or learning_rate.federated_round_steps"
    with pytest.raises(UserError, match=sentence):
        check_job(FEDERATED, methods=methods)
    check_job(FEDERATED, "learning_rate.federated_round_steps=7", methods=methods)


LATE = """
    def model(self):
        class Late(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Linear(4, 3), None
            def forward(self, inputs):
                hidden = self.body(inputs)
                if self.head is None:
                    self.head = nn.Linear(3, 3)
                return self.head(hidden)
        return Late()

    def eval_data(self):
        return {held_out}
"""


@pytest.mark.parametrize("side", [FEDERATED, "strategy.policy=datacenter"])
@pytest.mark.parametrize("held_out", ["rows(20, seed=1)", "None"])
def test_a_layer_that_forward_makes_is_refused(check_job, side, held_out):
    ranks = "datacenter.ranks=0" if side == FEDERATED else "datacenter.ranks=1"
    with pytest.raises(UserError, match=r"^running the model added the parameter 'head.weight'"):
        check_job(side, ranks, "datacenter.batch_size=4", methods=LATE.format(held_out=held_out))


ON_DEVICES = """
    def validation_data(self, participant):
        return rows(15, seed=3)

    def device_metrics(self):
        return {"accuracy": isthmus.Mean()}
"""
BROKEN = """
    def metrics(self, output, target):
        accuracy = (output.argmax(-1) == target).float()
        return {"accuracy": accuracy, "broken": accuracy * float("nan"), "far": 1 / accuracy}
"""


@pytest.mark.parametrize(
    ("asked", "present", "left"),
    [
        (4, 4, ("p10, devices_accuracy_p90: 50 ", "devices_accuracy_p50: 10 ")),
        (49, 60, ("p10, devices_accuracy_p90: 50 ",)),
        (50, 50, ()),
        # Three quarters of those that are asked are enough for an evaluation, and not for these.
        (60, 45, ("p10, devices_accuracy_p90: 50 ",)),
    ],
)
def test_quantiles_that_too_few_devices_give_are_said(check_job, asked, present, left):
    devices = (FEDERATED, f"evaluation.devices={asked}", f"federated.clients={present}")
    out = check_job(*devices, methods=ON_DEVICES)
    measured = out.partition("devices will evaluate (")[2].partition(")")[0].split(", ")
    assert ("devices_accuracy_p10" in measured) is (not left)
    assert ("devices_accuracy_p50" in measured) is (asked >= 10)
    assert out.count("no round will have") == len(left)
    for words in left:
        assert f"{words}devices have to evaluate" in out
    assert ("evaluate, and there are 45," in out) is (present < asked)


def test_metrics_that_are_not_finite_are_said(check_job):
    overrides = (FEDERATED, "evaluation.devices=4")
    assert "where" not in check_job(*overrides, methods=ON_DEVICES)
    broken = BROKEN + ON_DEVICES.replace("Mean()}", 'Mean(), "broken": isthmus.Mean()}')
    out = check_job(*overrides, methods=broken)
    assert "held-out data (accuracy, broken, far, loss), where broken is nan, far is inf" in out
    assert "one validation batch of client-0, where broken had values that are not finite\n" in out


def test_losses_beyond_the_bounds_of_secure_sums_are_said(check_job):
    overrides = (FEDERATED, "evaluation.devices=4")
    large = """
    def loss(self, output, target):
        return 1e4 * super().loss(output, target)
    """
    # Another length: Python takes a file of one second and size for the one it has compiled.
    for methods in (ON_DEVICES, ON_DEVICES + large.replace("1e4", "100.0")):
        assert "-1000 to 1000" not in check_job(*overrides, methods=methods)
    out = check_job(*overrides, methods=ON_DEVICES + large)
    assert re.search(
        r"batch of client-0, whose loss is \d+(\.\d+)?: a loss outside of -1000 to 1000 ", out
    )
    assert "counts as the end of that range in the mean of secure sums; scale the loss" in out
    assert re.search(r"where (\d+) of \1 values of devices_loss were not within -1000 to 1000", out)
    assert "isthmus.Mean(low, high), or scale it; a run that this metric decides about would" in out
    plain = check_job(FEDERATED, "federated.secure_aggregation=false", methods=large)
    assert "-1000 to 1000" not in plain


def test_a_value_that_is_not_finite_is_said_where_devices_would_bound_it(check_job):
    """With `[privacy]` it counts as the upper bound, so that no mean shows it."""
    noise = ("privacy.mechanism=gaussian", "privacy.epsilon=8", "privacy.delta=1e-5")
    broken = BROKEN + ON_DEVICES.replace("Mean()}", 'Mean(), "broken": isthmus.Mean()}')
    out = check_job(FEDERATED, "evaluation.devices=4", *noise, methods=broken)
    assert "one validation batch of client-0, where broken had values that are not finite\n" in out


TENSOR = "datacenter.tensor_parallel=2"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            (FEDERATED, TENSOR, "datacenter.zero_stage=3"),
            "[datacenter] zero_stage = 3, tensor_parallel = 2 have no effect: "
            'strategy.policy="federated" has no datacenter rounds; remove what you do not need',
        ),
        (
            ("strategy.policy=adaptive", "strategy.target_edge_share=1", TENSOR),
            "[datacenter] tensor_parallel = 2 has no effect: datacenter.ranks=0 starts no "
            "datacenter; raise it, or remove what you do not need",
        ),
        (
            ("federated.clients=0", TENSOR, "datacenter.pipeline_parallel=3"),
            "[datacenter] tensor_parallel = 2, pipeline_parallel = 3 needs a datacenter of 6 ranks "
            "or a multiple, and how many ranks it has is known when it joins: another number is "
            "refused then",
        ),
        (
            ("federated.clients=0", TENSOR, "datacenter.data_parallel=2"),
            "[datacenter] data_parallel = 2, tensor_parallel = 2 needs a datacenter of 4 ranks, "
            "and how many ranks it has is known when it joins: another number is refused then",
        ),
        (("federated.clients=0", "datacenter.zero_stage=3"), None),
        (("datacenter.ranks=2", "datacenter.batch_size=4", TENSOR), None),
    ],
)
def test_a_layout_that_is_not_used_or_not_checked_is_said(check_job, overrides, sentence):
    notes = [line for line in check_job(*overrides).splitlines() if line.startswith("note")]
    assert notes == ([] if sentence is None else [f"note    {sentence}"])


@pytest.mark.parametrize(
    "layout",
    [
        (TENSOR, "datacenter.sequence_parallel=true"),
        ("datacenter.zero_stage=3", "datacenter.shard_groups=2"),
        ("datacenter.pipeline_parallel=2", "datacenter.microbatches=4"),
        ("datacenter.data_parallel=2", "datacenter.global_batch=8"),
        ("datacenter.layout=auto",),
    ],
)
def test_one_batch_is_tried_on_one_rank_whatever_the_layout_of_several(check_job, layout):
    out = check_job("datacenter.ranks=2", "datacenter.batch_size=4", *layout)
    assert "one training batch of the datacenter" in out
    divides = any("tensor_parallel=2" in each or "pipeline_parallel=2" in each for each in layout)
    assert ("can divide the model is found when the run opens, or before" in out) == divides


async def test_a_run_says_that_a_layout_has_no_effect(write_task, make_job, tmp_path):
    write_task()
    job = make_job(
        *("strategy.policy=adaptive", "strategy.target_edge_share=1", "federated.cohort=4"),
        *(TENSOR, "federated.clients=2"),
    )
    said = io.StringIO()
    run = LocalRun.new(job, tmp_path, tmp_path / "run")
    with pytest.raises(UserError, match="which need 3 devices"):
        await run.run(None, Console(file=said, width=200), None)
    assert said.getvalue().startswith("[datacenter] tensor_parallel = 2 has no effect: ")
    assert "needs a datacenter of 2 ranks or a multiple" in unused_layout(job, joinable=True)


@pytest.mark.parametrize("side", ["eval_data = isthmus.Task.eval_data", "pass"])
def test_a_loss_of_shapes_that_were_broadcast_is_said(check_job, side):
    methods = f"""
    {side}

    def loss(self, output, target):
        return (output[:, :1] - target.float()) ** 2
    """
    out = check_job(FEDERATED, methods=methods)
    assert out.count(
        ", where loss has a value for each pair of examples (16 for 4); unless that is meant, give "
        "output and target one shape"
    ) == (1 if "eval_data" in side else 2)
    assert "pair" not in check_job(FEDERATED, methods=methods.replace("[:, :1]", "[:, 0]"))


def test_a_metric_of_each_pair_is_said_and_one_of_each_token_is_not(check_job):
    methods = """
    def metrics(self, output, target):
        hit = (output.argmax(-1) == target).float()
        return {"twice": hit[:, None].expand(-1, 2), "apart": (hit[:, None] - hit).abs()}
    """
    assert ", where apart has a value for each pair of examples" in check_job(
        FEDERATED, methods=methods
    )


def test_a_central_metric_with_the_name_of_one_of_devices_is_refused(check_job):
    methods = (
        ON_DEVICES
        + """
    def metrics(self, output, target):
        hit = (output.argmax(-1) == target).float()
        return {"accuracy": hit, "devices_accuracy": hit}
    """
    )
    sentence = r"^metrics\(\) has a figure 'devices_accuracy', which is the name of a metric that "
    with pytest.raises(UserError, match=sentence):
        check_job(FEDERATED, "evaluation.devices=4", methods=methods)
    check_job(FEDERATED, methods=methods)
