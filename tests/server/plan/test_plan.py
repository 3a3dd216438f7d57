"""`isthmus plan`: memory, time, refusals, and what would change a plan."""

import dataclasses
import json
import math
import re

import pytest
import torch
from click.testing import CliRunner

import isthmus
from isthmus.errors import UserError
from isthmus.job import with_changes
from isthmus.job.commands import check
from isthmus.task import load_task
from isthmus.task.scoring import build_model
from isthmus_datacenter import planning
from isthmus_datacenter.checks import rows_at_once
from isthmus_datacenter.training.memory_report import memory_of
from isthmus_datacenter.training.profile import count_flops
from isthmus_server.cli.plan import plan as plan_command
from isthmus_server.plan.adapters import adapted_task
from isthmus_server.plan.options import PlanOptions
from isthmus_server.plan.page import _large
from isthmus_server.plan.plan import JobPlan, plan_of

SEQUENTIAL = """
    def model(self):
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
"""
VALIDATION = """
    def validation_data(self, participant):
        return self.local_data(participant)
"""
DEVICES = ("federated.clients=4", "federated.cohort=4")
RANKS = ("datacenter.ranks=2", "datacenter.batch_size=4", *DEVICES)
FEDERATED = (*DEVICES, "strategy.policy=federated")


@pytest.fixture
def job_file(write_task, tmp_path):
    write_task(SEQUENTIAL)
    path = tmp_path / "job.toml"
    path.write_text('name = "table"\n[task]\nsource = "task.py:Learn"\n')
    return path


def figures(found):
    return {each.name: each for each in found}


def test_memory_is_that_of_the_report(job_file):
    options = PlanOptions(ranks=4, layouts=True, memory_gib=1e-6)
    plan = plan_of(job_file, (*RANKS, "strategy.policy=datacenter"), options)
    ranks = plan.sides.datacenter
    task = load_task(plan.job.task.source, {}, base=job_file.parent)
    rows = rows_at_once(plan.job, task, 4)
    known = [each for each in ranks.others if not each.refused]
    for each in [ranks.layout, *known]:
        changes = {f"datacenter.{key}": value for key, value in each.keys.items()}
        job = with_changes(plan.job, {**changes, "datacenter.ranks": 4})
        expected = memory_of(task, job, rows, 4, accelerators=True)
        assert dict(each.memory) == dataclasses.asdict(expected)
    assert plan.sides.devices is None
    assert [each.peak for each in known] == sorted(each.peak for each in known)
    assert {each.keys["tensor_parallel"] for each in known} == {1, 2, 4}
    refused = [each for each in ranks.others if each.refused]
    assert {each.keys["pipeline_parallel"] for each in known} == {1, 2}
    assert {each.keys["pipeline_parallel"] for each in refused} == {4}
    assert all("cannot be split into 4 pipeline stages" in each.refused for each in refused)
    assert ranks.largest == ("0.weight", 4 * 64)
    fits = {plan.fits(each) for each in known}
    assert fits <= {True, False}
    assert plan.fits(known[0]) == (known[0].peak <= 1e-6 * 2**30)


POSITIONS = """
    def model(self):
        class Positions(nn.Module):
            def __init__(self):
                super().__init__()
                self.lift = nn.Linear(4, 8)
                self.places = nn.Embedding(8, 8)
                self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
                self.head = nn.Linear(8, 3)

            def forward(self, x):
                hidden = self.lift(x)[:, None] + self.places(torch.arange(5))
                for block in self.blocks:
                    hidden = block(hidden)
                return self.head(hidden.mean(1))

        return Positions()
"""


def test_a_split_that_fails_is_told_in_one_sentence(job_file, write_task, caplog):
    write_task(POSITIONS)
    options = PlanOptions(ranks=2, layouts=True)
    plan = plan_of(job_file, (*RANKS, "strategy.policy=datacenter"), options)
    refused = [each for each in plan.sides.datacenter.others if each.refused]
    assert {each.keys["pipeline_parallel"] for each in refused} == {2}
    for each in refused:
        assert "for example, no stage can pass over positions(torch.arange(n))" in each.refused
        assert "(Attempting" not in each.refused
        assert "give the task a pipeline_stages(model, n)" in each.refused
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_operations_are_those_that_a_round_counts(job_file):
    plan = plan_of(job_file, ("datacenter.accumulate=2", *RANKS), PlanOptions())
    task = load_task(plan.job.task.source, {}, base=job_file.parent)
    model = build_model(task, 0)
    counted = count_flops(model, lambda: model(torch.ones(4, 4)))
    assert plan.sides.datacenter.operations == counted == 3 * 2 * 4 * (4 * 16 + 16 * 3)


def test_there_is_no_time_without_a_rate(job_file):
    plan = plan_of(job_file, RANKS, PlanOptions())
    assert [each.name for each in plan.step(plan.sides.datacenter)] == ["operations of a step"]
    assert any("give the operations a second of a rank by --tflops" in x for x in plan.lines())
    assert any("give its rate by --mbit" in x for x in plan.lines())
    given = plan_of(job_file, RANKS, PlanOptions(tflops=1e-6, mbit=8.0))
    found = figures(given.step(given.sides.datacenter))
    assert found["time of a step"].value == pytest.approx(2688 / 1e6)
    assert found["time of the run"].value == pytest.approx(10 * 50 * 2688 / 1e6)
    devices = given.sides.devices
    assert devices.link.value == (devices.received[0].value + devices.sent[0].value) / 1e6
    slow = plan_of(job_file, (*RANKS, "time.least_rate=1000"), PlanOptions())
    assert slow.sides.devices.link.most == (
        (devices.received[0].value + devices.sent[0].highest) / 1000
    )
    assert "time.least_rate=1000" in slow.sides.devices.link.how


def test_the_rate_of_this_machine_is_measured(job_file, monkeypatch):
    monkeypatch.setattr(planning, "MEASURED_SECONDS", 0.05)
    plan = plan_of(job_file, RANKS, PlanOptions(measure=True))
    ranks = plan.sides.datacenter
    assert 0 < ranks.rate < math.inf
    assert not ranks.on_gpus
    found = figures(plan.step(ranks))
    assert found["time of a step"].value == ranks.operations / ranks.rate
    assert found["rate"].how == "measured on this machine"


def test_the_table_is_of_jobs_with_the_changes(job_file):
    base = plan_of(job_file, (*RANKS, *DEVICES), PlanOptions())
    rows = {each.name: each for each in base.changes}
    ranks = {"ranks x 2", "ranks / 2", "ZeRO 3"}
    assert {"as it is", "cohort x 2", "cohort / 2", *ranks} <= rows.keys()
    for name in ("cohort x 2", "updates of 3 bits, one element in 4", *sorted(ranks)):
        row = rows[name]
        task = load_task(base.job.task.source, {}, base=job_file.parent)
        changed = with_changes(base.job, row.changes)
        expected = JobPlan.of(changed, task, job_file.parent, PlanOptions()).changes[0]
        assert row.figures == expected.figures, name
    assert "secure_aggregation needs a quorum of at least 3" in rows["cohort / 2"].refused


@pytest.mark.parametrize(
    ("ranks", "row"), [(1, None), (3, "ranks / 3"), (4, "ranks / 2"), (9, "ranks / 3")]
)
def test_fewer_ranks_are_planned_where_their_number_can_be_divided(ranks, row, job_file):
    overrides = (f"datacenter.ranks={ranks}", "strategy.policy=datacenter", "federated.clients=0")
    plan = plan_of(job_file, overrides, PlanOptions())
    rows = {each.name: each for each in plan.changes}
    assert [name for name in rows if name.startswith("ranks / ")] == ([row] if row else [])
    assert ("one rank" in rows) == (ranks in (4, 9))
    batch = plan.job.datacenter.batch_size
    if row:
        fewer = ranks // int(row[-1])
        assert rows[row].changes == {"datacenter.ranks": fewer}
        note = f"a step of the ranks has {batch * fewer} examples, and not {batch * ranks}"
        assert rows[row].notes == [note]
    same = plan_of(job_file, (*overrides, f"datacenter.global_batch={ranks * 4}"), PlanOptions())
    assert not any("a step of the ranks" in note for each in same.changes for note in each.notes)


def test_whether_one_rank_is_enough_is_said(job_file):
    overrides = (*RANKS, "strategy.policy=datacenter", "datacenter.tensor_parallel=2")
    plan = plan_of(job_file, overrides, PlanOptions(memory_gib=1, tflops=1))
    (row,) = (each for each in plan.changes if each.name == "one rank")
    assert row.changes == {"datacenter.ranks": 1, "datacenter.tensor_parallel": 1}
    fits, time, *_ = row.notes
    assert fits == "one rank is enough for the memory: its peak fits 1 GiB"
    assert re.fullmatch(
        r"the 2 ranks train [\d.]+ times as many examples a second as one"
        r"|one rank trains ([\d.]+ times )?as many examples a second( as the 2 ranks)?",
        time,
    )
    assert any(fits in each for each in plan.lines())
    small = plan_of(job_file, overrides, PlanOptions(memory_gib=1e-9))
    assert not any("one rank is enough" in each for row in small.changes for each in row.notes)


def test_adapters_are_all_that_is_exchanged(job_file):
    base = plan_of(job_file, (*FEDERATED, "federated.secure_aggregation=false"), PlanOptions())
    row = base.changes[-1]
    down = figures(row.figures)["to devices"].value / (4 * 10)
    header = base.sides.devices.received[0].value - 4 * (4 * 16 + 16 + 16 * 3 + 3)
    assert down - 4 * 8 * (4 + 16 + 16 + 3) == pytest.approx(header, abs=300)


def test_adapters_leave_gradients_of_their_own_only(job_file):
    base = plan_of(job_file, (*RANKS, "datacenter.zero_stage=0"), PlanOptions())
    task = adapted_task(load_task(base.job.task.source, {}, base=job_file.parent), 8)
    found = memory_of(task, base.job, rows_at_once(base.job, task, 2), 2, accelerators=True)
    adapters = 4 * 8 * (4 + 16 + 16 + 3)
    assert found.gradients == adapters
    assert found.parameters == adapters + 4 * (4 * 16 + 16 + 16 * 3 + 3)
    assert figures(base.changes[-1].figures)["peak of a rank"].value == found.peak


REFUSED = [
    ("strategy.policy=adaptative",),
    ("federated.clients=2", "federated.cohort=4"),
    ("federated.compression={bits=3}", "federated.compression.codec=none"),
    ("exchange.exclude=['nothing.*']",),
    ("federated.secure_aggregation=false", "federated.aggregation=nothing"),
    ("privacy={mechanism='distributed', epsilon=1e-9, delta=1e-9}",),
    ("evaluation.devices=3",),
    ("strategy.server_optimizer={name='Nothing'}",),
]


@pytest.mark.parametrize("overrides", REFUSED)
def test_refusals_are_those_of_the_check(overrides, job_file):
    overrides = (*FEDERATED, *overrides)
    with pytest.raises(UserError) as checked:
        check.callback(
            job_file, overrides, memory=False, collectives=False, ranks=None, device=None
        )
    with pytest.raises(UserError) as planned:
        plan_of(job_file, overrides, PlanOptions())
    assert str(planned.value) == str(checked.value)


def test_impossible_numbers_of_ranks_are_refused(job_file):
    with pytest.raises(UserError, match=r"tensor_parallel=2 .*needs 2 ranks or a multiple"):
        plan_of(job_file, ("datacenter.tensor_parallel=2",), PlanOptions(ranks=3))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"measure": True, "tflops": 1.0}, "leave one of them out"),
        ({"measure": True, "device": "gpu"}, "says nothing of GPUs"),
        ({"layouts": True}, "--layouts is about the ranks of a datacenter, and the job has none"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, sentence, job_file):
    with pytest.raises(UserError, match=sentence):
        plan_of(job_file, FEDERATED, PlanOptions(**options))


def test_ranks_that_no_round_uses_are_refused_with_the_policy(job_file):
    sentence = r"strategy.policy='federated' trains no rounds there; choose another"
    with pytest.raises(UserError, match=sentence):
        plan_of(job_file, FEDERATED, PlanOptions(ranks=4, layouts=True))
    changes = {each.name for each in plan_of(job_file, FEDERATED, PlanOptions(ranks=4)).changes}
    assert not changes & {"ranks x 2", "ZeRO 3"}


def test_what_changes_only_rounds_of_devices_is_left_out_where_there_are_none(job_file):
    plan = plan_of(job_file, (*RANKS, "strategy.policy=datacenter"), PlanOptions())
    assert [each.name for each in plan.changes] == [
        *("as it is", "ranks x 2", "ranks / 2", "ZeRO 3", "adapters of rank 8, frozen base")
    ]


def test_ranks_are_planned_if_a_compared_policy_trains_there(job_file):
    job = (*FEDERATED, "datacenter.batch_size=4", "rounds=2")
    names = ("federated", "datacenter")
    plan = plan_of(job_file, job, PlanOptions(ranks=2, gpu="a100", trial=2, policies=names))
    assert plan.sides.datacenter.ranks == 2
    assert plan.time_of_step > 0
    seconds = {each.policy: each.forecast.seconds for each in plan.trials.policies}
    assert seconds["datacenter"][0] > 0
    assert "time of a step" in plan.html()
    alone = PlanOptions(ranks=2, gpu="a100", trial=2, policies=("federated",))
    with pytest.raises(UserError, match="trains no rounds there; choose another"):
        plan_of(job_file, job, alone)


def test_ranks_of_the_command_are_those_that_the_policy_needs(job_file):
    job = (*DEVICES, "strategy.policy=hybrid", "datacenter.batch_size=4")
    with pytest.raises(UserError, match=r"datacenter\.ranks=0 starts no datacenter"):
        plan_of(job_file, job, PlanOptions())
    plan = plan_of(job_file, job, PlanOptions(ranks=2))
    assert plan.sides.datacenter.ranks == 2


@pytest.mark.parametrize(
    ("every", "words"), [(1, "after every round"), (2, "after every 2 rounds")]
)
def test_how_often_devices_evaluate_is_said(every, words, job_file, write_task):
    write_task(SEQUENTIAL + VALIDATION)
    job = (*FEDERATED, "evaluation.devices=3", f"evaluation.every={every}")
    plan = plan_of(job_file, job, PlanOptions())
    assert any(note.endswith(words) for note in plan.sides.devices.notes)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"calibrate": "nowhere"}, "nowhere"),
        ({"mbit": 0}, r"mbit=0 cannot be planned with: 0.* is not in the range"),
        ({"ranks": 2.5}, r"ranks=2.5 cannot be planned with: '2.5' is not a valid integer"),
        ({"ranks": 2, "device": "tpu"}, r"device='tpu' .*'gpu', 'cpu'"),
        ({"ranks": 8, "gpu": "h100", "gpus_per_node": -1}, r"gpus_per_node=-1 .*range"),
        ({"trial": 1}, r"trial=1 .*range"),
        ({"layouts": 3}, r"layouts=3 .*boolean"),
    ],
)
def test_values_from_python_are_checked_as_those_of_the_command(options, sentence, job_file):
    """Rates of nothing would divide by zero, and a device that is none would be a processor."""
    with pytest.raises(UserError, match=sentence):
        isthmus.plan(job_file, **options)


def test_options_are_the_words_of_their_command():
    given = PlanOptions(layouts=True, memory_gib=0.5, trial=3, policies=("a", "b"))
    words = "--layouts --memory-gib 0.5 --trial 3 --policies a,b"
    assert given.words == words.split()


def test_policies_from_python_are_names(job_file):
    assert PlanOptions.of_values({"policies": "federated"}).policies == ("federated",)
    assert PlanOptions.of_values({"policies": ["a", "b"]}).policies == ("a", "b")
    assert PlanOptions.of_values({"layouts": True, "mbit": None}) == PlanOptions(layouts=True)


def test_a_page_has_many_megabytes_as_gigabytes(job_file):
    plan = plan_of(job_file, (*FEDERATED, "rounds=2000000"), PlanOptions())
    page = plan.html(now=0.0)
    assert re.search(r"bytes, [\d.]+( to [\d.]+)? GB", page)
    assert not re.search(r"\de\+\d", page)
    assert _large([9_999_000_000, 9_999_600_000]) == "9.999 to 10 GB"
    assert _large([9_999_000_000]) == "9999 MB"


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_planned(job_file, tmp_path):
    page = tmp_path / "none/plan.html"
    found = CliRunner().invoke(plan_command, [str(job_file), "--html", str(page)])
    assert isinstance(found.exception, UserError)
    assert "plan.html cannot be written: " in str(found.exception)
    assert str(found.exception).endswith("none is not a directory")


def test_python_and_the_command_say_the_same(job_file):
    arguments = [str(job_file), "--json", "--set", "rounds=3", "--ranks", "2", "--mbit", "5"]
    found = CliRunner().invoke(plan_command, arguments, catch_exceptions=False)
    table = json.loads(found.output)
    assert isthmus.plan(job_file, ranks=2, mbit=5, rounds=3).to_json() == table
    assert table["rounds"] == 3
    made = f"isthmus plan {job_file} --set rounds=3 --ranks 2 --mbit 5"
    assert table["command"] == made
    assert (
        f"Made by <code>{made}</code>" in isthmus.plan(job_file, ranks=2, mbit=5, rounds=3).html()
    )
    source = f"{job_file.parent / 'task.py'}:Learn"
    alone = isthmus.plan({"task": {"source": source}})
    assert alone.command == ""
    assert "Made by" not in alone.html()
    text = CliRunner().invoke(plan_command, arguments[:1], catch_exceptions=False).output
    assert text.startswith("table: 10 rounds; nothing was trained or booked\n")


def test_adapters_have_the_memory_of_a_rank(job_file):
    plan = plan_of(job_file, (*RANKS, "strategy.policy=datacenter"), PlanOptions())
    assert not plan.changes[-1].refused
    assert figures(plan.changes[-1].figures)["peak of a rank"].value > 0


def test_figures_of_the_run_say_which_rounds_they_are_of(job_file):
    limits = ("budget=7", "device_bytes=5000000000")
    plan = plan_of(job_file, (*RANKS, "strategy.policy=alternate", *limits), PlanOptions())
    assert all(each.how.startswith("if each round asks") for each in plan.sides.devices.run)
    text = "\n".join(plan.lines())
    assert "it ends before a round that exceeds budget=7\n" in text
    assert "it ends before a round that exceeds device_bytes=5000000000\n" in text
    target = ("strategy.target_metric={name='loss', at_most=0.5}", "seconds=9")
    text = "\n".join(plan_of(job_file, (*FEDERATED, *target), PlanOptions()).limits)
    assert "it ends before a round that would begin after seconds=9\n" in text
    assert text.endswith(
        "ends after the round that reaches strategy.target_metric, loss of at most 0.5"
    )
    alone = plan_of(job_file, FEDERATED, PlanOptions())
    assert not any("if each round" in each.how for each in alone.sides.devices.run)


def test_invited_devices_need_not_all_send_their_updates(job_file):
    overrides = (*FEDERATED, "federated.secure_aggregation=false", "federated.cohort=2")
    devices = plan_of(job_file, overrides, PlanOptions()).sides.devices
    more = (*overrides, "federated.over_selection=2")
    invited = plan_of(job_file, more, PlanOptions()).sides.devices
    assert invited.run[0].value == 2 * devices.run[0].value
    assert invited.run[1].value == devices.run[1].value
    assert invited.run[1].most == 2 * devices.run[1].value
    assert "from the updates wanted to those of all invited" in invited.run[1].how


@pytest.mark.parametrize(
    ("policy", "kinds"),
    [
        (("alternate",), {"datacenter": 2, "federated": 1}),
        (
            ("schedule", 'strategy.schedule=[{regime="federated",rounds=1},{regime="hybrid"}]'),
            {"federated": 1, "hybrid": 2},
        ),
        (("adaptive",), None),
    ],
)
def test_the_cost_of_the_jobs_own_policy_is_said(policy, kinds, job_file):
    prices = plan_of(job_file, (*RANKS, "strategy.policy=adaptive", "rounds=3"), PlanOptions())
    each = {
        figure.name.removeprefix("all rounds "): figure.value / 3 for figure in prices.sides.cost
    }
    plan = plan_of(
        job_file, (*RANKS, f"strategy.policy={policy[0]}", *policy[1:], "rounds=3"), PlanOptions()
    )
    own = plan.sides.cost[0]
    mixture = plan.sides.cost[-1]
    assert own.name == f"the job's policy, {policy[0]}"
    if kinds is None:
        assert (own.value, own.most) == (mixture.value, mixture.most)
        assert "which it chooses is not known before it runs" in own.how
    else:
        assert own.most is None
        assert own.value == pytest.approx(sum(each[kind] * count for kind, count in kinds.items()))


def test_any_mixture_is_of_all_regimes_that_the_job_can_have(job_file):
    plan = plan_of(job_file, (*RANKS, "strategy.policy=alternate", "rounds=2"), PlanOptions())
    found = figures(plan.sides.cost)
    hybrid = plan_of(job_file, (*RANKS, "strategy.policy=hybrid", "rounds=2"), PlanOptions())
    assert found["all rounds hybrid"].value == hybrid.sides.cost[0].value
    assert found["any mixture"].most == found["all rounds hybrid"].value
    assert found["any mixture"].most > found["all rounds federated"].value
    assert found["any mixture"].value == found["all rounds datacenter"].value
    assert found["the job's policy, alternate"].most is None


def test_costs_say_what_they_leave_out_and_what_goes_beyond_the_budget(job_file):
    plan = plan_of(job_file, (*FEDERATED, "budget=39"), PlanOptions())
    (cost,) = plan.sides.cost
    said = (
        "exact, without failed attempts; beyond budget=39, where the run ends after 9 of 10 "
        "rounds, for 36"
    )
    assert (cost.value, cost.how) == (40, said)
    rows = {each.name: each for each in plan.changes}
    note = "cost: beyond budget=39, where the run ends earlier"
    assert rows["as it is"].notes == rows["adapters of rank 8, frozen base"].notes == [note]
    others = "with federated.clients=8, among whom the task may divide its data anew"
    assert rows["cohort x 2"].notes == [note, others]
    assert {f"    {note}", f"    {others}"} <= set(plan.lines())
    assert f"{note}; {others}" in plan.html()
    rich = plan_of(job_file, (*FEDERATED, "budget=40"), PlanOptions())
    assert rich.sides.cost[0].how == "exact, without failed attempts"
    assert not rich.changes[0].notes
    mixed = plan_of(job_file, (*RANKS, "strategy.policy=alternate", "budget=44"), PlanOptions())
    assert figures(mixed.sides.cost)["any mixture"].how.endswith(
        "its highest beyond budget=44, where the run ends earlier"
    )


def test_a_schedule_beyond_the_budget_says_after_which_round_it_ends(job_file):
    schedule = 'strategy.schedule=[{regime="federated",rounds=1},{regime="hybrid"}]'
    job = (*RANKS, "strategy.policy=schedule", schedule, "rounds=3")
    price = plan_of(job_file, job, PlanOptions()).sides.cost[0].value
    own = plan_of(job_file, (*job, f"budget={price - 1}"), PlanOptions()).sides.cost[0]
    assert own.name == "the job's policy, schedule"
    assert "where the run ends after 2 of 3 rounds, for " in own.how


def test_a_step_has_one_price_for_all_ranks(job_file):
    said = "price of a datacenter's step is of all its ranks together"
    plan = plan_of(job_file, (*RANKS, "strategy.policy=datacenter"), PlanOptions())
    assert any(said in line for line in plan.lines())
    assert said.replace("'", "&#39;") in plan.html(now=0.0)
    alone = plan_of(job_file, FEDERATED, PlanOptions())
    assert not any(said in line for line in alone.lines())


def test_the_page_has_large_sizes_in_mb_and_the_parts_of_layouts(job_file):
    task = (job_file.parent / "task.py").read_text()
    (job_file.parent / "task.py").write_text(task.replace("16", "65536"))
    options = PlanOptions(layouts=True)
    plan = plan_of(job_file, (*RANKS, "strategy.policy=datacenter"), options)
    page = plan.html(now=0.0)
    for each in plan.sides.datacenter.others:
        if not each.refused:
            assert f"{each.peak:,} bytes, {each.peak / 1e6:.4g} MB" in page
            assert f"parameters {each.memory['parameters'] / 1e6:.4g} MB" in page
            assert "optimizer 0 bytes" in page


def test_the_plan_says_why_the_peak_is_no_sum(job_file):
    plan = plan_of(job_file, RANKS, PlanOptions())
    said = "peak is not the sum of the parts: of parameters and gradients that zero_stage 1 to 3 "
    assert any(said in line for line in plan.lines())
    assert said in plan.html(now=0.0)


def test_updates_of_a_buffer_cost_at_least_what_counts(job_file):
    buffered = ("federated.mode=buffered", "federated.secure_aggregation=false")
    plan = plan_of(job_file, (*FEDERATED, *buffered), PlanOptions())
    (cost,) = plan.sides.cost
    assert cost.how.startswith("at least")
    assert any("are on top in bytes and in cost" in each for each in plan.sides.devices.notes)
