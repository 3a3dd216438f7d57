"""Every combination of data, tensor and pipeline parallelism trains like one process.

Checkpoints of one layout load in the others, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from isthmus.task import Participant
from isthmus.task.held_out import HeldOut
from isthmus.task.scoring import build_model, evaluate, losses
from isthmus_datacenter.training.data import ExampleOrder

STEPS = 2
"""The second has gradients at changed parameters, and an optimizer with a state."""
BATCH = 8
"""Examples of all replicas in a step, in every layout, so that one reference is enough."""

SGD = {"optimizer": "SGD", "options": {"lr": 0.2}}
ADAMW = {
    "optimizer": "AdamW",
    "options": {"lr": 0.01, "eps": 1e-3, "fused": True},
    "together": True,  # one layer computes queries, keys and values
}
ADAMW_MIXTURE = {**ADAMW, "together": False}
PLAN = {**SGD, "plan": "right"}
FOUR = {**SGD, "blocks": 4}
"""One for each of four stages."""


def layout(
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    stage: int = 2,
    **more: Any,
) -> dict[str, Any]:
    return {
        "ranks": dp * tp * pp * cp,
        "context_parallel": cp,
        "expert_parallel": ep,
        "data_parallel": dp,
        "tensor_parallel": tp,
        "pipeline_parallel": pp,
        "zero_stage": stage,
        "batch_size": BATCH // dp,
        **more,
    }


UNEVEN = ("Language", SGD)
"""Eleven words, three heads: no width is divisible."""

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one": ("Gpt", ADAMW, layout()),
    "dp2-zero0": (*UNEVEN, layout(2, stage=0)),
    "dp2-zero1": (*UNEVEN, layout(2, stage=1)),
    "dp2-zero2": ("Language", {**ADAMW, "public_held_out": 3}, layout(2)),
    "dp2-zero3": (*UNEVEN, layout(2, stage=3)),
    "dp2-zero0-accumulate": ("Gpt", ADAMW, layout(2, stage=0, accumulate=2)),
    "dp2-zero1-compiled": (
        "Language",
        {
            **SGD,
            "held_out": 4,
        },  # the size of a part of a batch: another is compiled again
        layout(2, stage=1, accumulate=2, compile=True),
    ),
    "dp2-zero2-accumulate": ("Gpt", ADAMW, layout(2, accumulate=4)),
    "dp2-zero3-recompute": (
        "Gpt",
        ADAMW,
        layout(2, stage=3, accumulate=2, checkpoint_activations=True),
    ),
    "dp2-zero3-operators": (
        "Gpt",
        ADAMW,
        layout(2, stage=3, accumulate=2, checkpoint_activations="operators"),
    ),
    "dp2-zero1-cnn-operators": (
        "Pictures",
        SGD,
        layout(2, stage=1, checkpoint_activations="operators"),
    ),
    "dp2-zero1-cnn": ("Pictures", SGD, layout(2, stage=1)),
    "dp2-ep2-zero0": ("Mixture", ADAMW_MIXTURE, layout(2, ep=2, stage=0)),
    "dp2-ep2-zero2-skewed": ("SkewedMixture", SGD, layout(2, ep=2)),
    "dp2-ep2-zero3-operators": (
        "Mixture",
        SGD,
        layout(2, ep=2, stage=3, accumulate=2, checkpoint_activations="operators"),
    ),
    "dp2-ep2-zero3-recompute-skewed": (
        "SkewedMixture",
        SGD,
        layout(2, ep=2, stage=3, checkpoint_activations=True),
    ),
    "dp2-zero0-offload-clip": (*UNEVEN, layout(2, stage=0, offload="parameters", clip_norm=0.2)),
    "dp2-zero3-offload-accumulate": (
        "Gpt",
        ADAMW,
        layout(2, stage=3, offload="parameters", accumulate=2),
    ),
    "dp2-zero2-offload-optimizer": ("Gpt", ADAMW, layout(2, offload="optimizer")),
    "dp2-ep2-zero3-offload": ("Mixture", SGD, layout(2, ep=2, stage=3, offload="parameters")),
    "dp2-zero3-experts": ("Mixture", ADAMW_MIXTURE, layout(2, stage=3)),
    "tp2": ("Gpt", {**ADAMW, "public_held_out": 5}, layout(tp=2)),
    "tp2-plan-recompute": (
        "Gpt",
        PLAN,
        layout(tp=2, accumulate=2, checkpoint_activations=True),
    ),
    "tp2-operators-every-second": (
        "Gpt",
        SGD,
        layout(tp=2, checkpoint_activations="operators", checkpoint_every=2),
    ),
    "tp2-sequence": ("Gpt", ADAMW, layout(tp=2, sequence_parallel=True)),
    "tp2-sequence-separate": (
        "Gpt",
        {**SGD, "blocks": 2},
        layout(tp=2, sequence_parallel=True, checkpoint_activations="operators"),
    ),
    "cp2": ("Gpt", ADAMW, layout(cp=2)),
    "cp2-recompute": ("Gpt", SGD, layout(cp=2, accumulate=2, checkpoint_activations=True)),
    "tp2-uneven": (*UNEVEN, layout(tp=2)),
    "tp2-cnn": ("Pictures", SGD, layout(tp=2)),
    "tp2-compiled": ("Gpt", {**PLAN, "blocks": 1, "held_out": 8}, layout(tp=2, compile=True)),
    "pp2-gpipe": ("Gpt", SGD, layout(pp=2, schedule="gpipe")),
    "pp2-1f1b": (*UNEVEN, layout(pp=2)),
    "pp2-interleaved": ("Gpt", {**ADAMW, "plan": "right"}, layout(pp=2, schedule="interleaved")),
    "pp2-zero-bubble": ("Gpt", FOUR, layout(pp=2, schedule="zero_bubble")),
    "pp2-zero-bubble-views": (
        "Gpt",
        {**FOUR, "views": True},
        layout(pp=2, schedule="zero_bubble"),
    ),
    "pp2-plan-recompute": (
        "Gpt",
        PLAN,
        layout(pp=2, accumulate=2, microbatches=2, checkpoint_activations=True),
    ),
    "pp2-zero-bubble-recompute": (
        "Gpt",
        FOUR,
        layout(pp=2, schedule="zero_bubble", checkpoint_activations=True),
    ),
    "pp2-cnn": ("Pictures", SGD, layout(pp=2)),
    "dp4-zero0": ("Language", ADAMW, layout(4, stage=0)),
    "dp4-zero3": ("Language", ADAMW, layout(4, stage=3)),
    "dp4-zero3-groups2-clip": (
        "Language",
        SGD,
        layout(4, stage=3, shard_groups=2, clip_norm=0.2),
    ),
    "dp4-zero2-groups2-accumulate": (
        "Gpt",
        ADAMW,
        layout(4, shard_groups=2, accumulate=2),
    ),
    "dp4-ep2-zero0-clip": ("Mixture", SGD, layout(4, ep=2, stage=0, clip_norm=0.2)),
    "dp4-ep2-zero1-accumulate": ("Mixture", ADAMW_MIXTURE, layout(4, ep=2, stage=1, accumulate=2)),
    "dp4-ep2-zero2-groups2": ("Mixture", ADAMW_MIXTURE, layout(4, ep=2, shard_groups=2)),
    "dp4-ep2-zero3": ("Mixture", ADAMW_MIXTURE, layout(4, ep=2, stage=3)),
    "dp2-ep2-pp2": ("Mixture", {**SGD, "blocks": 4}, layout(2, pp=2, ep=2)),
    "dp2-tp2-zero0-clip": ("Gpt", SGD, layout(2, 2, stage=0, clip_norm=0.2)),
    "dp2-tp2-zero1": ("Gpt", PLAN, layout(2, 2, stage=1, accumulate=2)),
    "dp2-tp2-zero2": ("Gpt", SGD, layout(2, 2)),
    "dp2-tp2-zero3": ("Gpt", ADAMW, layout(2, 2, stage=3)),
    "dp2-pp2-zero0": ("Gpt", ADAMW, layout(2, pp=2, stage=0)),
    "dp2-pp2-zero1": ("Gpt", SGD, layout(2, pp=2, stage=1)),
    "dp2-pp2-zero2-zero-bubble": ("Gpt", FOUR, layout(2, pp=2, schedule="zero_bubble")),
    "dp2-pp2-zero3-cnn": ("Pictures", SGD, layout(2, pp=2, stage=3)),
    "tp2-pp2": ("Gpt", ADAMW, layout(1, 2, 2)),
    "tp2-pp2-sequence": ("Gpt", ADAMW, layout(1, 2, 2, sequence_parallel=True)),
    "dp2-tp2-zero3-sequence": ("Gpt", SGD, layout(2, 2, stage=3, sequence_parallel=True)),
    "dp2-cp2-zero3": ("Gpt", ADAMW, layout(2, cp=2, stage=3, clip_norm=0.2)),
    "cp2-pp2": ("Gpt", SGD, layout(pp=2, cp=2)),
    "tp2-pp2-plan-clip": ("Gpt", PLAN, layout(1, 2, 2, schedule="gpipe", clip_norm=0.2)),
    "pp4": ("Gpt", FOUR, layout(pp=4, microbatches=4)),
    "dp2-tp2-pp2-zero1": ("Gpt", PLAN, layout(2, 2, 2, stage=1)),
    "dp2-tp2-pp2-zero2": ("Gpt", FOUR, layout(2, 2, 2, schedule="interleaved", microbatches=2)),
    "dp2-tp2-pp2-zero3": ("Gpt", ADAMW, layout(2, 2, 2, stage=3)),
    "dp4-tp2-zero3-groups2": ("Gpt", ADAMW, layout(4, 2, stage=3, shard_groups=2)),
}


@functools.cache
def _reference(
    make: Any, name: str, kind: str, clip: float | None, blocks: int = 2
) -> tuple[torch.Tensor, float]:
    """Parameters and mean loss after the same global batches in one process, by hand."""
    prepared = make(name, {**{"SGD": SGD, "AdamW": ADAMW}[kind], "blocks": blocks})
    task = prepared.task
    model = build_model(task, prepared.job.seed)
    optimizer = task.optimizer(model.parameters(), Participant(name="test", regime="datacenter"))
    data = task.local_data(Participant(name="test", regime="datacenter"))
    order = ExampleOrder(examples=len(data), replicas=1, batch_size=BATCH, seed=prepared.job.seed)
    total, units = 0.0, 0
    for step in range(STEPS):
        rows = [data[i] for i in order.indices(step, step + 1, 0)]
        inputs, target = (torch.stack(column) for column in zip(*rows, strict=True))
        _, values = losses(task, model, inputs, target)
        torch.autograd.backward(values.mean())
        if clip is not None:
            assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
        optimizer.step()
        optimizer.zero_grad()
        total += float(values.total64())
        units += int(values.count())
    return prepared.layout.gather(model), total / units


@dataclasses.dataclass(frozen=True)
class Trained:
    """Results of a case."""

    setup: Any
    values: list[dict[str, Any]]
    """Returned by each rank."""
    blob: bytes
    """The model file."""
    state: str
    """Directory of its checkpoints."""


@pytest.fixture(scope="module")
def trained(make_setup: Any, on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`trained(name)` trains a case; all cases with a number of ranks are trained in one group."""
    directory = tmp_path_factory.mktemp("layouts")

    @functools.cache
    def group(ranks: int) -> dict[str, Trained]:
        cases = {name: case for name, case in CASES.items() if case[2]["ranks"] == ranks}
        setups = {
            name: make_setup(task, extra, **section)
            for name, (task, extra, section) in cases.items()
        }
        operations = []
        for name, prepared in setups.items():
            result = directory / name
            result.write_bytes(prepared.layout.header + bytes(4 * prepared.layout.size))
            command = {
                "op": "train_steps",
                "run_id": "run",
                "until_step": STEPS,
                "evaluate": True,
                "result": str(result),
            }
            operations.append((prepared.open_command(), command, str(directory / f"{name}.state")))
        by_rank = on_ranks(ranks, "train", operations)
        return {
            name: Trained(
                setups[name],
                list(values),
                (directory / name).read_bytes(),
                str(directory / f"{name}.state"),
            )
            for name, values in zip(cases, zip(*by_rank, strict=True), strict=True)
        }

    return lambda name: group(CASES[name][2]["ranks"])[name]


@pytest.mark.parametrize("name", CASES)
def test_every_layout_trains_like_one_process(
    name: str, trained: Any, make_setup: Any, decode: Any
) -> None:
    case = trained(name)
    prepared, values = case.setup, case.values
    task, extra, section = CASES[name]
    blocks = extra.get("blocks", 2)
    expected, loss = _reference(
        make_setup, task, extra["optimizer"], section.get("clip_norm"), blocks
    )
    parameters = decode(case.blob, prepared.layout)
    assert (parameters - expected).abs().max() <= (1e-6 if extra["optimizer"] == "SGD" else 2e-5)
    assert all(value == {**values[0], "seconds": value["seconds"]} for value in values)
    assert values[0]["training"]["loss"] == pytest.approx(loss, abs=1e-6)
    assert values[0]["examples"] == STEPS * BATCH
    # 23 held-out examples: no batch, no replica and no micro-batch divides them.
    model = build_model(prepared.task, 5)
    prepared.layout.scatter(parameters, model)
    figures = HeldOut(prepared.task).measure(
        lambda data, count: evaluate(
            prepared.task, model, data, range(count), 8, torch.device("cpu")
        ).result()
    )
    assert values[0]["evaluation"] == pytest.approx(figures, abs=2e-6)
    assert ("public_loss" in figures) == ("public_held_out" in extra)


HALF_PRECISION = {
    "dp2-bf16": ("Gpt", SGD, layout(2, stage=3, precision="bf16")),
    "dp2-zero0-bf16": (
        "Gpt",
        SGD,
        layout(2, stage=0, precision="bf16"),
    ),  # fully_shard
    "dp2-states-bf16": ("Gpt", ADAMW, layout(2, stage=3, optimizer_states="bf16")),
    "tp2-states-bf16-offload": (
        "Gpt",
        ADAMW,
        layout(tp=2, optimizer_states="bf16", offload="optimizer"),
    ),
    "dp2-ep2-bf16": ("Mixture", SGD, layout(2, ep=2, stage=3, precision="bf16")),
    "tp2-pp2-bf16": ("Gpt", SGD, layout(1, 2, 2, precision="bf16")),
    "dp2-fp16": ("Gpt", SGD, layout(2, precision="fp16")),
    "dp2-pp2-fp16": ("Gpt", SGD, layout(2, pp=2, precision="fp16", clip_norm=10.0)),
}


def test_half_precision_differs_only_by_rounding(
    make_setup: Any, on_ranks: Any, decode: Any, tmp_path: Path
) -> None:
    for ranks in (2, 4):
        cases = {name: case for name, case in HALF_PRECISION.items() if case[2]["ranks"] == ranks}
        operations, setups = [], []
        for name, (task, extra, section) in cases.items():
            prepared = make_setup(task, extra, **section)
            result = tmp_path / name
            result.write_bytes(prepared.layout.header + bytes(4 * prepared.layout.size))
            command = {
                "op": "train_steps",
                "run_id": "run",
                "until_step": STEPS,
                "result": str(result),
            }
            operations.append((prepared.open_command(), command, str(tmp_path / f"{name}.state")))
            setups.append(prepared)
        values = on_ranks(ranks, "train", operations)[0]
        for name, prepared, value in zip(cases, setups, values, strict=True):
            task, extra, _ = cases[name]
            expected, loss = _reference(make_setup, task, extra["optimizer"], None)
            parameters = decode((tmp_path / name).read_bytes(), prepared.layout)
            difference = float((parameters - expected).abs().max())
            assert 0 < difference < (2e-2 if "bf16" in name else 3e-3), name
            assert value["training"]["loss"] == pytest.approx(loss, abs=2e-2), name


NEIGHBOURS = (1, 2, 4)
"""Distances, in the order of the cases, from a layout to those whose checkpoints it loads."""


def _sources(names: list[str], reader: str) -> list[str]:
    """Layouts whose checkpoints a layout loads: three, or all if the environment says so."""
    if len(names) <= len(NEIGHBOURS) + 1 or os.environ.get("ISTHMUS_TEST_PAIRS") == "all":
        return names
    index = names.index(reader)
    return [names[(index + distance) % len(names)] for distance in NEIGHBOURS]


@pytest.mark.parametrize("task", ["Gpt", "Language", "Mixture"])
def test_checkpoints_load_in_other_layouts(
    task: str, trained: Any, make_setup: Any, on_ranks: Any, decode: Any, tmp_path: Path
) -> None:
    """One process loads the checkpoints of every layout; `make pairs` compares all pairs."""
    names = [
        name
        for name, (kind, extra, _) in CASES.items()
        if kind == task and extra["optimizer"] == "AdamW"
    ]
    saved = {name: trained(name) for name in names}
    states = {name: case.state for name, case in saved.items()}
    one_process = make_setup(task, ADAMW, **layout()).open_command()
    on_ranks(1, "store_state", one_process, list(states.values()), STEPS, str(tmp_path))
    for case in saved.values():
        stored = torch.load(tmp_path / Path(case.state).name)
        for name, part in case.setup.layout.parts(decode(case.blob, case.setup.layout)):
            assert torch.equal(stored[name]["value"], part)
            assert stored[name].keys() == {"value", "step", "exp_avg", "exp_avg_sq"}
    elements = 3 * case.setup.layout.size  # each parameter also has a count of steps
    for ranks in (2, 4, 8):
        readers = {
            name: _sources(names, name) for name in names if CASES[name][2]["ranks"] == ranks
        }
        if not readers:
            continue
        requests = [
            (saved[reader].setup.open_command(), [states[source] for source in sources])
            for reader, sources in readers.items()
        ]
        by_rank = on_ranks(ranks, "compare_state", requests, STEPS, str(tmp_path))
        for (reader, sources), comparisons in zip(
            readers.items(), zip(*by_rank, strict=True), strict=True
        ):
            for source, rows in zip(sources, zip(*comparisons, strict=True), strict=True):
                same = sum(count for count, _ in rows)
                print(f"{source} -> {reader}: {same} identical numbers on {ranks} ranks")
                assert not any(differing for _, differing in rows), (source, reader, rows)
                assert same >= elements


def test_impossible_layouts_are_refused_with_the_reason(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    section = {"ranks": 0, "batch_size": 8}  # the service knows the number of ranks
    cases = [
        (
            make_setup("Gpt", **section, tensor_parallel=2, pipeline_parallel=2),
            "tensor_parallel=2 x pipeline_parallel=2 needs 4 ranks or a multiple, and there are 2",
        ),
        (
            make_setup("Gpt", **section, data_parallel=3),
            "data_parallel=3 needs 3 ranks, and there are 2",
        ),
        (
            make_setup("Gpt", **section, pipeline_parallel=2, microbatches=1),
            "microbatches=1 is below pipeline_parallel=2: some ranks would always be idle",
        ),
        (
            make_setup("Gpt", ranks=0, batch_size=3, pipeline_parallel=2),
            "a batch of 3 examples (batch_size=3 / accumulate=1) cannot be split into "
            "pipeline_parallel=2 equal micro-batches",
        ),
        (
            make_setup(
                "Gpt",
                ranks=0,
                batch_size=9,
                pipeline_parallel=2,
                microbatches=3,
                schedule="interleaved",
            ),
            "needs microbatches in multiples of pipeline_parallel=2, and microbatches=3",
        ),
        (make_setup("Gpt", **section, microbatches=2), "microbatches=2 is for pipelines"),
        (
            make_setup("Language", **section, pipeline_parallel=2, schedule="interleaved"),
            "cannot be split into 4 pipeline stages: its longest Sequential or ModuleList has 2",
        ),
        (
            make_setup("Skipping", **section, pipeline_parallel=2),
            "its forward() does more than call its blocks in order",
        ),
        (
            make_setup("Gpt", {"plan": "shuffled"}, **section, pipeline_parallel=2),
            "pipeline_stages()",
        ),
        (
            make_setup("Gpt", {"plan": "wrong"}, **section, tensor_parallel=2),
            "with its matrices sharded the model",
        ),
        (
            make_setup("Gpt", {"plan": "half"}, **section, tensor_parallel=2),
            "'embed.words.weight' and 'head.weight' are one, and the tensor-parallel plan",
        ),
        (
            make_setup("Gpt", {"plan": "misspelt"}, **section, tensor_parallel=2),
            "names 'layers.*.up', and the model has no such module",
        ),
        (make_setup("Halved", **section, pipeline_parallel=2), "has a forward() of its own"),
    ]
    open_commands = [prepared.open_command() for prepared, _ in cases]
    messages = on_ranks(2, "refusals", open_commands, str(tmp_path / "state"))
    assert messages[0] == messages[1]
    for (_, sentence), message in zip(cases, messages[0], strict=True):
        assert sentence in message
