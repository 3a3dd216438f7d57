"""`isthmus plan --gpu`: the model of a step, by hand and by figures that others have published."""

import dataclasses

import pytest
from click.testing import CliRunner

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.planned import PlannedLayout, PlannedRanks, RankTraffic
from isthmus_server.cli.plan import plan as plan_command
from isthmus_server.plan.compared_layouts import WHERE_TIME, layout_rows, notes_of_layouts
from isthmus_server.plan.gpus import GPUS
from isthmus_server.plan.options import PlanOptions
from isthmus_server.plan.plan import plan_of
from isthmus_server.plan.step_time import (
    LINK_SHARE,
    NETWORK_LATENCY,
    NODE_LATENCY,
    GpuNodes,
    memory_bytes,
    step_time,
)

H100 = GpuNodes(gpu=GPUS["h100"], gpus_per_node=8)
SEQUENTIAL = """
    def model(self):
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
"""


@pytest.fixture
def job_file(write_task, tmp_path):
    write_task(SEQUENTIAL)
    path = tmp_path / "job.toml"
    path.write_text(
        'name = "table"\n[task]\nsource = "task.py:Learn"\n[strategy]\npolicy = "datacenter"\n'
        "[datacenter]\nranks = 4\nbatch_size = 4\nsteps = 10\n"
    )
    return path


def traffic(operation, ranks, size, count=1):
    return RankTraffic(operation=operation, ranks=tuple(ranks), count=count, size=size)


def test_messages_take_what_a_ring_takes():
    inside = 450e9 * LINK_SHARE
    size = 10**9
    two = [0, 1]
    eight = range(8)
    expected = {
        traffic("all_reduce", eight, size): 14 * (size / 8 / inside + NODE_LATENCY),
        traffic("all_gather", eight, size): 7 * (size / 8 / inside + NODE_LATENCY),
        traffic("reduce_scatter", two, size, 3): size / 2 / inside + 3 * NODE_LATENCY,
        traffic("broadcast", eight, size): size / inside + 7 * NODE_LATENCY,
        traffic("send", two, size): size / inside + NODE_LATENCY,
        # Between nodes, each GPU has its part of the network.
        traffic("all_gather", range(16), size): 15
        * (size / 16 / (8 * 50e9 * LINK_SHARE) + NETWORK_LATENCY),
        # Half of what each rank sends goes to the other node.
        traffic("all_to_all", range(16), size): 8 * size / 16 / (50e9 * LINK_SHARE)
        + 15 * NETWORK_LATENCY,
        traffic("all_to_all", eight, size): 7 * (size / 8 / inside + NODE_LATENCY),
        traffic("all_gather", (0, 8), size): size / 2 / (50e9 * LINK_SHARE) + NETWORK_LATENCY,
    }
    for each, seconds in expected.items():
        assert H100.seconds(each) == pytest.approx(seconds)


class Llama:
    """A decoder whose sizes are published, as ranks of a layout would be planned."""

    def __init__(self, elements, embedding, layers, width):
        self.elements = elements
        self.embedding = embedding
        self.layers = layers
        self.width = width

    def planned(self, *, ranks, tensor, sequences, length=8192):
        tokens = sequences * length
        per_token = 6 * (self.elements - self.embedding)
        per_token += 12 * self.layers * self.width * length
        shards = range(0, ranks, tensor)
        part = self.elements / tensor
        # Weights are gathered in both passes in two bytes, and gradients are summed in four.
        found = [
            traffic("all_gather", shards, int(2 * 2 * part), 2 * self.layers),
            traffic("reduce_scatter", shards, int(4 * part), self.layers),
        ]
        if tensor > 1:
            # Each block gathers and scatters its inputs twice in each pass.
            sent = 8 * self.layers
            group = range(tensor)
            found.append(traffic("all_gather", group, sent * tokens * self.width * 2, sent))
        return PlannedRanks(
            ranks=ranks,
            on_gpus=True,
            layout=PlannedLayout(keys={}),
            largest=("head", 0),
            examples=sequences * ranks // tensor,
            operations=per_token * tokens / tensor,
            elements=self.elements,
            traffic=found,
        )


SMALL = Llama(8.03e9, 0.525e9, 32, 4096)
LARGE = Llama(70.6e9, 1.05e9, 80, 8192)
FULL = {"checkpoint_activations": True}
PUBLISHED = [
    # Model, GPU, ranks, tensor parallelism, sequences, float8, more keys, tokens a second of a GPU
    (SMALL, "h100", 8, 1, 2, False, {}, 6667),
    (SMALL, "h100", 128, 1, 2, False, {}, 6514),
    (SMALL, "h100", 64, 8, 12, False, {}, 4378),
    (LARGE, "h100", 256, 8, 16, False, FULL, 597.3),
    (SMALL, "h100", 8, 1, 2, True, {}, 8532),
    (SMALL, "h100", 128, 1, 2, True, {}, 8380),
    (SMALL, "h200", 32, 1, 2, True, {}, 10938),
    (SMALL, "h200", 64, 1, 2, True, {}, 10753),
]
"""Of compiled blocks, sequences of 8,192 tokens: benchmarks/ of github.com/pytorch/torchtitan,
llama3_h100_202412 (tables 1 and 3), asyncTP_llama3_h100_2025-06 (without async TP) and
llama3-8b_h200_202506."""


@pytest.mark.parametrize(
    ("model", "gpu", "ranks", "tensor", "sequences", "float8", "keys", "published"), PUBLISHED
)
def test_published_steps_are_met(model, gpu, ranks, tensor, sequences, float8, keys, published):
    """Within 20 %; the shares of the peak rates were chosen for those without `tensor`."""
    section = {"ranks": ranks, "precision": "bf16", "zero_stage": 3, "float8": float8}
    section |= {"tensor_parallel": tensor, "compile": True, **keys}
    job = Job.model_validate(
        {"name": "llama", "task": {"source": "task.py:Learn"}, "datacenter": section}
    )
    planned = model.planned(ranks=ranks, tensor=tensor, sequences=sequences)
    nodes = GpuNodes(gpu=GPUS[gpu], gpus_per_node=8)
    step = step_time(job, planned, nodes, None)
    rate = sequences * 8192 / tensor / step.seconds
    assert rate == pytest.approx(published, rel=0.2)


def test_a_rank_reads_its_own_experts_only():
    def read(expert_parallel):
        section = {"ranks": 8, "zero_stage": 3, "expert_parallel": expert_parallel}
        job = Job.model_validate(
            {"name": "mixture", "task": {"source": "task.py:Learn"}, "datacenter": section}
        )
        planned = PlannedRanks(
            ranks=8,
            on_gpus=True,
            layout=PlannedLayout(keys={}, memory={"activations": 100, "optimizer": 7}),
            largest=("head", 0),
            examples=8,
            operations=1.0,
            elements=1000,
            expert_elements=800,
        )
        return memory_bytes(job, planned)

    # Four bytes an element in two passes, and activations and state written and read.
    assert read(1) == 2 * (4 * 1000 + 100) + 2 * 7
    assert read(4) == 2 * (4 * (200 + 800 / 4) + 100) + 2 * 7


def test_the_parts_of_a_step_are_said_with_what_is_assumed(job_file):
    plan = plan_of(job_file, (), PlanOptions(gpu="h100", gpus_per_node=2, peak_share=0.5))
    ranks = plan.sides.datacenter
    found = {each.name: each.value for each in plan.step(ranks)}
    assert found["computing in a step"] == ranks.operations / (0.5 * 67e12)
    assert found["memory traffic in a step"] > 0
    expected = sum(
        GpuNodes(gpu=GPUS["h100"], gpus_per_node=2).seconds(each) for each in ranks.traffic
    )
    assert found["messages in a step"] == expected > 0
    longer = max(found["computing in a step"], found["memory traffic in a step"])
    assert found["time of a step"] == longer + expected
    assert found["time of a round"] == 10 * found["time of a step"]
    lines = plan.lines()
    assert any("assumed: H100: 67 TFLOPS in fp32" in each for each in lines)
    assert any("2 GPUs in a node" in each for each in lines)
    assert any("it fits 79 GiB" in each for each in lines)
    stored = plan.to_json()["datacenter"]
    assert stored["assumptions"] == plan.assumptions != []
    page = plan.html()
    assert "Time of a step: H100" in page


def test_changed_plans_have_the_time_of_their_rounds(job_file):
    def round_of(found):
        (round_,) = (
            each for each in found if each.name in ("a datacenter round", "time of a round")
        )
        return round_.value

    plan = plan_of(job_file, (), PlanOptions(gpu="h100"))
    rows = {each.name: each.figures for each in plan.changes}
    assert round_of(rows["as it is"]) == round_of(plan.step(plan.sides.datacenter))
    more = plan_of(job_file, ("datacenter.ranks=8",), PlanOptions(gpu="h100"))
    expected = round_of(more.step(more.sides.datacenter))
    assert round_of(rows["ranks x 2"]) == expected != round_of(rows["as it is"])
    assert "a datacenter round" not in str(plan_of(job_file, (), PlanOptions()).changes)


def test_accumulated_parts_send_what_they_send(job_file):
    def messages(*overrides):
        plan = plan_of(job_file, ("datacenter.zero_stage=3", *overrides), PlanOptions(gpu="h100"))
        return {each.operation: (each.count, each.size) for each in plan.sides.datacenter.traffic}

    once = messages()
    many = messages("datacenter.accumulate=2")
    assert messages("datacenter.global_batch=32") == many
    assert set(once) == {"all_gather", "reduce_scatter"}
    assert {key: (2 * count, 2 * size) for key, (count, size) in once.items()} == many


def test_a_step_is_faster_in_lower_precision(job_file):
    def computing(*overrides):
        plan = plan_of(job_file, overrides, PlanOptions(gpu="h100", peak_share=0.4))
        (found,) = (
            each.value
            for each in plan.step(plan.sides.datacenter)
            if each.name == "computing in a step"
        )
        return found

    ratio = computing() / computing("datacenter.precision=bf16")
    assert ratio == pytest.approx(989.5 / 67)


def test_layouts_are_compared_by_the_time_of_their_steps(job_file):
    plan = plan_of(job_file, (), PlanOptions(gpu="h100", layouts=True))
    ranks = plan.sides.datacenter
    (own,) = (each for each in ranks.others if each.keys == ranks.layout.keys)
    times = {each.name: each.value for each in plan.step(ranks)}
    assert plan.step_seconds(ranks, own) == times["time of a step"]
    for each in ranks.others:
        if each.keys["pipeline_parallel"] == 1:
            alone = plan_of(
                job_file,
                [f"{key}={value}" for key, value in each.changes(4).items() if value is not None],
                PlanOptions(gpu="h100"),
            )
            found = {each.name: each.value for each in alone.step(alone.sides.datacenter)}
            assert plan.step_seconds(ranks, each) == found["time of a step"]
            assert each.examples == alone.sides.datacenter.examples
    rows = layout_rows(plan, ranks)
    taken = [float(f"{each.seconds / each.layout.examples:.3g}") for each in rows]
    assert taken == sorted(taken)
    # With one replica all ZeRO stages are the same.
    (whole,) = (each for each in rows if each.layout.keys["tensor_parallel"] == 4)
    assert whole.text.startswith("zero_stage=0, 1, 2 or 3, tensor_parallel=4")
    assert whole.layout.examples == 4
    lines = plan.lines()
    assert "  layouts, most examples a second first:" in lines
    assert any(f"fits, {whole.step}" in each for each in lines)
    assert "Layouts of the ranks, most examples a second first" in plan.html()
    assert whole.step in plan.html()
    stored = plan.to_json()["datacenter"]["layouts"]
    assert stored[0]["step_seconds"] == rows[0].seconds


def test_a_comparison_of_layouts_says_what_it_is_and_what_it_is_not(job_file):
    plan = plan_of(job_file, (), PlanOptions(gpu="h100", layouts=True))
    ranks = plan.sides.datacenter
    rows = layout_rows(plan, ranks)
    (own,) = (each for each in rows if each.text.endswith(" (the job's own)"))
    assert own.examples == ranks.examples == 16
    for each in rows:
        replicas = each.examples // 4
        assert f", data_parallel={replicas}" in each.text
    batch, alike, launches = notes_of_layouts(plan, ranks, rows)
    assert batch.startswith("layouts have 4 to 16 examples a step, and the job's own 16: with ")
    close = sum(each.rate >= 0.8 * max(row.rate for row in rows) for each in rows)
    assert alike.startswith(f"the first {close} rows differ by less than the 20% by which")
    assert launches in plan.assumptions
    for note in (batch, alike, launches):
        assert f"  {note}" in plan.lines()
        assert f"{note[0].upper()}{note[1:]}.".replace("'", "&#39;") in plan.html()
    slow = [dataclasses.replace(each, seconds=n + 1.0) for n, each in enumerate(rows)]
    apart = [dataclasses.replace(each, examples=16 >> n) for n, each in enumerate(slow)]
    assert len(notes_of_layouts(plan, ranks, apart)) == 1
    same = plan_of(job_file, ("datacenter.global_batch=16",), PlanOptions(layouts=True))
    ranks = same.sides.datacenter
    (note,) = notes_of_layouts(same, ranks, layout_rows(same, ranks))
    assert note == WHERE_TIME


def test_parts_of_a_batch_are_in_the_row_of_a_layout(job_file):
    batch = ("datacenter.global_batch=16", "datacenter.batch_size=4")
    plan = plan_of(job_file, batch, PlanOptions(layouts=True, ranks=2))
    rows = layout_rows(plan, plan.sides.datacenter)
    parts = {each.text.partition(", data_parallel=")[2][:1]: each.text for each in rows}
    assert "data_parallel=2, accumulate=2" in parts["2"]
    assert "data_parallel=1, accumulate=4" in parts["1"]


def test_layouts_without_a_time_are_by_their_peak_and_it_is_said(job_file):
    plan = plan_of(job_file, (), PlanOptions(layouts=True))
    note = "the smallest layout need not be the fastest: name the GPU by --gpu"
    assert any(note in each for each in plan.lines())
    page = plan.html()
    assert "by the peak of a rank" in page
    # They are what was asked for, and come first.
    assert page.index("<details open><summary>Layouts of the ranks") < page.index("Quality and")
    assert page.count("Layouts of the ranks") == 1
    assert "_parallel=1<" not in page.replace(", data_parallel=1", "")
    assert "zero_stage=0, data parallel only, data_parallel=4" in page
    assert f"T{note[1:]}" in plan.html()
    peaks = [each.layout.peak for each in layout_rows(plan, plan.sides.datacenter)]
    assert peaks == sorted(peaks)
    by_rate = plan_of(job_file, (), PlanOptions(layouts=True, tflops=1e-3))
    (first, *_) = layout_rows(by_rate, by_rate.sides.datacenter)
    assert first.seconds == first.layout.operations / 1e9
    assert any("--gpu counts their messages too" in each for each in by_rate.lines())


def test_layouts_that_do_not_fit_come_last_and_have_no_time(job_file):
    ranks = plan_of(job_file, (), PlanOptions(layouts=True)).sides.datacenter
    peaks = sorted(each.peak for each in ranks.others if not each.refused)
    middle = peaks[len(peaks) // 2] / 2**30
    plan = plan_of(job_file, (), PlanOptions(gpu="h100", layouts=True, memory_gib=middle))
    rows = layout_rows(plan, plan.sides.datacenter)
    fits = [each.fits for each in rows]
    assert fits == sorted(fits, reverse=True)
    assert {False, True} == set(fits)
    assert all((each.seconds is not None) == each.fits for each in rows)


REFUSED = {
    "--gpu v100": "--gpu v100 is not in the table (a100, h100, h200, b200)",
    "--gpu h100 --tflops 1": "leave one out",
    "--gpu h100 --device cpu": "--gpu and --device cpu contradict each other",
    "--gpus-per-node 4": "--gpus-per-node is about the GPU that --gpu names; add it",
    "--peak-share 0.4": "--peak-share is about the GPU that --gpu names; add it",
    "--gpu a100 --set datacenter.float8=true --set datacenter.precision=bf16 --set "
    "datacenter.compile=true": "A100 has no rate for fp8",
    "--mtbf-hours 100": "--mtbf-hours needs the seconds of a checkpoint",
    "--checkpoint-seconds 3": "give their rate by --mtbf-hours",
    "--mtbf-hours inf --checkpoint-seconds 3": "--mtbf-hours has to be a number of hours",
    "--mtbf-hours nan --checkpoint-seconds 3": "--mtbf-hours has to be a number of hours",
    "--mtbf-hours 1e308 --checkpoint-seconds 3": "--mtbf-hours 1e+308 is nothing to plan with",
    "--mtbf-hours 9 --checkpoint-seconds nan": "--checkpoint-seconds nan is nothing to plan with",
    "--mtbf-hours 9 --checkpoint-seconds 3 --restart-seconds inf": "--restart-seconds inf is",
    "--tflops nan": "--tflops nan is nothing to plan with; give a number from 1e-12 to 1e+12",
    "--tflops 1e-320": "--tflops 9.99989e-321 is nothing to plan with",
    "--memory-gib inf": "--memory-gib inf is nothing to plan with",
    "--mbit nan": "--mbit nan is nothing to plan with",
    "--gpu h100 --peak-share nan": "--peak-share nan is nothing to plan with",
}


@pytest.mark.parametrize("options", REFUSED)
def test_options_that_do_not_fit_are_refused(options, job_file):
    run = CliRunner().invoke(plan_command, [str(job_file), *options.split()])
    assert isinstance(run.exception, UserError)
    assert REFUSED[options] in str(run.exception)
