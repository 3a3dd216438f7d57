"""Train small models with Isthmus in many ways, and compare how they moved with a plain loop.

Each cell of the table is one model, one layout and one setting (optimizer, schedule, clipping,
accumulation). Layouts are those of a datacenter's ranks, and federated rounds of four devices,
plain and by secure sums. The plain loop, in one process, is written by hand and has nothing of
Isthmus but the initial model and the order of the examples; for devices it is FedAvg. A cell is
*equal* if no tensor's movement differs by more than 1e-4 of it (by secure sums: the whole model's),
or *refused* with a sentence before training. Everything else is wrong, also what takes longer than
five minutes. Models are own ones and architectures of Hugging Face's transformers, in float32 with
sizes of some ten thousand parameters. Words have ragged masks, devices different numbers of
examples.

All models are trained in the main layouts, each with the next of the settings in turn; some
models also with all settings, and in more layouts.

    python benchmarks/parity.py --quick
    python benchmarks/parity.py --only qwen3,gemma3 --results build/parity.jsonl
    python benchmarks/parity.py --layouts ep2,ep2-zero3,cp2

With `--results` a run that was interrupted goes on with the cells that are not in the file.

Figures: `cells/equal`, `cells/refused`, `cells/wrong`, of which `cells/hanging` took too long;
`share/equal` of all cells; `error/worst`, of the cells that are equal; `secure/worst`, of secure
sums of ten jobs whose updates are 1e-6 to 1e6 long and whose devices have 1 to 5,000,000 rows,
relative to the length of the mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import code_of_tests, command_line, figures
from harness.figures import Target

from isthmus.errors import UserError

# The comparison is also what the tests use.
code_of_tests.make_importable()
if TYPE_CHECKING:
    from tests.parity.comparison import Result

TARGETS = {
    "cells/wrong": Target(at_most=0),
    "cells/hanging": Target(at_most=0),
    "share/equal": Target(at_least=0.85),
    "error/worst": Target(at_most=1e-4),
    "secure/worst": Target(at_most=1e-4),
}
LIMIT_SECONDS = 300.0
"""For one cell."""


class Layout(NamedTuple):
    """Where a model is trained."""

    ranks: int
    """Ranks of the datacenter; one process has all devices."""
    keys: Mapping[str, Any]
    side: Any = "ranks"
    """See `tests.parity.comparison.Cell`."""


PLAIN = {"secure_aggregation": False}
SECURE = {"secure_aggregation": True}
TENSOR = {"tensor_parallel": 2}
MAIN = {
    "ddp": Layout(2, {"zero_stage": 0}),
    "zero3": Layout(2, {"zero_stage": 3}),
    "tp2": Layout(2, TENSOR),
    "pp2": Layout(2, {"pipeline_parallel": 2}),
    "tp2-pp2": Layout(4, {**TENSOR, "pipeline_parallel": 2}),
    "federated": Layout(1, PLAIN, "devices"),
    "secure": Layout(1, SECURE, "devices"),
}
"""For all models."""
MORE = {
    "zero1": Layout(2, {"zero_stage": 1}),
    "zero2": Layout(2, {"zero_stage": 2}),
    "zero3-groups": Layout(4, {"zero_stage": 3, "shard_groups": 2}),
    "compile": Layout(2, {"compile": True}),
    "tp2-recompute": Layout(2, {**TENSOR, "checkpoint_activations": True}),
    "tp2-compile": Layout(2, {**TENSOR, "compile": True}),
    "cp2": Layout(2, {"context_parallel": 2}),
    "tp2-sequence": Layout(2, {**TENSOR, "sequence_parallel": True}),
    "ep2": Layout(2, {"expert_parallel": 2}),
    "ep2-zero3": Layout(4, {"expert_parallel": 2, "zero_stage": 3}),
    "tp2-zero0": Layout(4, {**TENSOR, "zero_stage": 0}),
    "tp2-zero1": Layout(4, {**TENSOR, "zero_stage": 1}),
    "tp2-zero2": Layout(4, {**TENSOR, "zero_stage": 2}),
    "tp2-zero3": Layout(4, {**TENSOR, "zero_stage": 3}),
    "tp4": Layout(4, {"tensor_parallel": 4}),
    "isthmus run": Layout(1, SECURE, "device processes"),
    "recompute": Layout(2, {"checkpoint_activations": True}),
    "operators": Layout(2, {"checkpoint_activations": "operators", "checkpoint_every": 2}),
}
"""For some models."""
LAYOUTS = {**MAIN, **MORE}
WIDELY = ("prelu", "resnet", "qwen3", "bert", "t5", "vit")
"""Models that are trained in all layouts, and in the main ones with all settings."""
SEQUENCES = (
    "llama",
    "mistral",
    "qwen3",
    "gemma3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "modernbert",
    "bart",
)
"""Models whose blocks can share the positions of sequences."""
MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "deepseek_v3")
"""Models with experts."""
IN_PROCESSES = ("prelu", "bert")
"""Models that `isthmus run` trains, whose processes take a minute to start on a busy machine."""
QUICK = {
    "ddp": ("batch-norm", "lstm", "qwen3"),
    "zero3": ("prelu", "qwen3", "qwen3_moe"),
    "tp2": ("prelu", "gated", "qwen3", "gemma3", "exaone4", "olmo2", "phi3", "gpt_neox", "opt"),
    "pp2": ("t5", "bert"),
    "tp2-zero3": ("prelu", "qwen3", "gemma3"),
    "tp2-pp2": ("prelu", "qwen3"),
    "federated": ("batch-norm", "bert", "vit", "qwen3_moe"),
    "secure": ("batch-norm", "t5", "weight-norm", "padding", "qwen3"),
}
"""Models by layout."""
SMOKE = {"tp2": ("prelu", "gated"), "secure": ("batch-norm",)}


class Key(NamedTuple):
    """A cell of the table."""

    model: str
    layout: str
    setting: str


class Outcome(NamedTuple):
    """What became of a cell."""

    text: str
    kind: str
    """equal, refused, wrong or hanging."""
    error: float

    @classmethod
    def of(cls, result: Result) -> Outcome:
        """The outcome of a result."""
        kind = "equal" if result.equal else "refused" if result.refusal else "wrong"
        if "took longer than" in result.fault:
            kind = "hanging"
        return cls(str(result), kind, result.error)


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Compare all cells, and fail if one is wrong."""
    options = command_line.options(__doc__ or "", argv, _add_options)
    command_line.needs("transformers", "transformers")
    from tests.parity.comparison import SCALED, SETTINGS, Cell, compare, secure_error
    from tests.parity.small_models import NAMES
    from tests.warm_ranks import Ranks

    keys = _keys(options, NAMES, list(SETTINGS))
    outcomes = _known(options.results, keys)
    some = options.only or options.layouts
    scaled = [] if some else SCALED[: 1 if options.smoke else None]
    errors = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parity-")))
        counts = {LAYOUTS[key.layout].ranks for key in keys} | ({1} if scaled else set())
        groups = {count: stack.enter_context(Ranks(count, LIMIT_SECONDS)) for count in counts}
        for number, key in enumerate(keys):
            if key in outcomes:
                continue
            layout = LAYOUTS[key.layout]
            cell = Cell(key.model, layout.keys, key.setting, layout.side)
            started = time.monotonic()
            (result,) = compare(groups[layout.ranks], [cell], directory / str(number))
            outcomes[key] = Outcome.of(result)
            seconds = time.monotonic() - started
            print(f"{' / '.join(key)}: {result} [{seconds:.1f} s]", file=sys.stderr, flush=True)
            if options.results is not None:
                with options.results.open("a", encoding="utf-8") as file:
                    print(json.dumps([key, outcomes[key]]), file=file)
        for number, (scale, rows) in enumerate(scaled):
            error = secure_error(groups[1], scale, rows, directory / f"scaled-{number}")
            errors.append((f"{scale:g}", ", ".join(map(str, rows)), error))
    measured = _figures(list(outcomes.values()))
    print(_table(outcomes))
    if errors:
        measured["secure/worst"] = max(error for _, _, error in errors)
        lines = [(scale, rows, f"{error:.0e}") for scale, rows, error in errors]
        print(figures.table(("updates of about", "rows of the devices", "error"), lines))
    values = [(key, f"{value:g}") for key, value in measured.items()]
    print(figures.table(("figure", "value"), values))
    machine = figures.machine("transformers")
    figures.write(options.json, "parity", machine, measured, TARGETS)
    return 1 if measured["cells/wrong"] else 0


def _keys(options: argparse.Namespace, names: Sequence[str], settings: Sequence[str]) -> list[Key]:
    """The cells of a size, by model.

    Raises:
        UserError: there is no such model, or no such layout.
    """
    only = _chosen(options.only, "--only", names)
    layouts = _chosen(options.layouts, "--layouts", list(LAYOUTS)) or list(LAYOUTS)
    full = {**dict.fromkeys(MAIN, tuple(names)), **dict.fromkeys(MORE, WIDELY)}
    full["isthmus run"] = IN_PROCESSES
    full["tp2-sequence"] = full["cp2"] = SEQUENCES
    full["ep2"] = full["ep2-zero3"] = MIXTURES
    chosen = command_line.of_size(options, full=full, quick=QUICK, smoke=SMOKE)
    if only:
        chosen = dict.fromkeys(chosen, tuple(only))
    is_full = not options.quick and not options.smoke
    keys = []
    for row, model in enumerate(names):
        for column, layout in enumerate(LAYOUTS):
            if layout not in layouts or model not in chosen.get(layout, ()):
                continue
            widely = is_full and model in WIDELY and layout in MAIN
            turn = (row + column) % len(settings)
            wanted = settings if widely else settings[turn : turn + 1]
            keys += [Key(model, layout, setting) for setting in wanted]
    return keys


def _chosen(given: str | None, option: str, known: Sequence[str]) -> list[str] | None:
    """The names that an option lists, or None if it is not given.

    Raises:
        UserError: one of them is not known.
    """
    if not given:
        return None
    chosen = given.split(",")
    for each in chosen:
        if each not in known:
            raise UserError(f"{option}: there is no {each}; there are {', '.join(known)}")
    return chosen


def _known(file: Path | None, keys: Sequence[Key]) -> dict[Key, Outcome]:
    """The outcomes of those cells that a file has, with its last ones."""
    if file is None or not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    found = {Key(*key): Outcome(*outcome) for key, outcome in lines}
    return {key: found[key] for key in keys if key in found}


def _figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    def count(*kinds: str) -> float:
        return float(sum(each.kind in kinds for each in outcomes))

    return {
        "cells/equal": count("equal"),
        "cells/refused": count("refused"),
        "cells/wrong": count("wrong", "hanging"),
        "cells/hanging": count("hanging"),
        "share/equal": count("equal") / len(outcomes),
        "error/worst": max((each.error for each in outcomes if each.kind == "equal"), default=0.0),
    }


def _table(outcomes: Mapping[Key, Outcome]) -> str:
    """Models by layouts: the worst error of the settings, or the number of a sentence below."""
    layouts = [each for each in LAYOUTS if any(each == key.layout for key in outcomes)]
    sentences: list[str] = []

    def numbered(outcome: Outcome) -> str:
        if outcome.text not in sentences:
            sentences.append(outcome.text)
        mark = "" if outcome.kind == "refused" else outcome.kind.upper()
        return f"{mark}[{sentences.index(outcome.text) + 1}]"

    def cell(model: str, layout: str) -> str:
        found = [
            each for key, each in outcomes.items() if (key.model, key.layout) == (model, layout)
        ]
        equal = [each.error for each in found if each.kind == "equal"]
        others = dict.fromkeys(numbered(each) for each in found if each.kind != "equal")
        return " ".join([*([f"{max(equal):.0e}"] if equal else []), *others])

    rows = [
        (model, *(cell(model, layout) for layout in layouts))
        for model in dict.fromkeys(key.model for key in outcomes)
    ]
    notes = [f"[{number}] {sentence}" for number, sentence in enumerate(sentences, 1)]
    return "\n".join([figures.table(("model", *layouts), rows), *notes])


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="A,B", help="models, in all layouts of the size")
    parser.add_argument("--layouts", metavar="A,B", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="append the outcome of each cell to this file, and skip those that it has",
    )


if __name__ == "__main__":
    sys.exit(main())
