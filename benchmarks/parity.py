"""Train small models in many layouts, and compare how they moved with a plain loop in one process.

Each cell of the table is one model, one layout of a datacenter and one optimizer. It is *equal* if
no parameter's movement differs by more than 1e-4 of it, or *refused* with a sentence before
training. Everything else is wrong. The plain loop has nothing of Isthmus but the order of the
examples. Models are own ones and architectures of Hugging Face's transformers, in float32 with
sizes of some ten thousand parameters.

    python benchmarks/parity.py --quick
    python benchmarks/parity.py --only qwen3,gemma3

Figures: `cells/equal`, `cells/refused`, `cells/wrong`; `error/worst`, of the cells that are equal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import command_line, figures
from harness.figures import Target

from isthmus.errors import UserError

# The comparison is also what the tests use.
sys.path.append(str(Path(__file__).parents[1]))

TARGETS = {"cells/wrong": Target(at_most=0), "error/worst": Target(at_most=1e-4)}

Layout = dict[str, Any]

TWO_RANKS: dict[str, Layout] = {
    "tp2": {"tensor_parallel": 2},
    "tp2-recompute": {"tensor_parallel": 2, "checkpoint_activations": True, "accumulate": 2},
    "tp2-compile": {"tensor_parallel": 2, "compile": True},
    "pp2": {"pipeline_parallel": 2},
    "zero0": {"zero_stage": 0},
    "zero3": {"zero_stage": 3},
}
FOUR_RANKS: dict[str, Layout] = {
    "tp2-zero0": {"tensor_parallel": 2, "zero_stage": 0},
    "tp2-zero1": {"tensor_parallel": 2, "zero_stage": 1},
    "tp2-zero2": {"tensor_parallel": 2, "zero_stage": 2},
    "tp2-zero3": {"tensor_parallel": 2, "zero_stage": 3},
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "tp4": {"tensor_parallel": 4},
}
LAYOUTS = {2: TWO_RANKS, 4: FOUR_RANKS}
"""By the number of ranks."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    # With a usual `eps` its first steps are the signs of gradients, also of those of rounding.
    "AdamW": {"lr": 0.01, "eps": 1e-3},
}
QUICK = {
    "tp2": ("prelu", "gated", "qwen3", "gemma3", "exaone4", "olmo2", "phi3", "gpt_neox", "opt"),
    "zero3": ("prelu", "qwen3"),
    "tp2-zero3": ("prelu", "qwen3", "gemma3"),
    "tp2-pp2": ("prelu", "qwen3"),
}
"""Models by layout."""
SMOKE = {"tp2": ("prelu", "gated")}


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Compare all cells, and fail if one is wrong."""
    options = command_line.options(__doc__ or "", argv, _add_options)
    command_line.needs("transformers", "transformers")
    from tests.parity.comparison import Cell, Result, compare
    from tests.parity.small_models import NAMES
    from tests.warm_ranks import Ranks

    full = {layout: tuple(NAMES) for layouts in LAYOUTS.values() for layout in layouts}
    chosen = command_line.of_size(options, full=full, quick=QUICK, smoke=SMOKE)
    optimizers = command_line.of_size(options, full=[*OPTIMIZERS], quick=["SGD"], smoke=["SGD"])
    if options.only:
        unknown = [each for each in options.only.split(",") if each not in NAMES]
        if unknown:
            raise UserError(f"--only: there is no {unknown[0]}; there are {', '.join(NAMES)}")
        chosen = {layout: tuple(options.only.split(",")) for layout in chosen}
    results: dict[tuple[str, str, str], Result] = {}
    for count, layouts in LAYOUTS.items():
        cells = {
            (layout, model, optimizer): Cell(model, keys, optimizer, OPTIMIZERS[optimizer])
            for layout, keys in layouts.items()
            for model in chosen.get(layout, ())
            for optimizer in optimizers
        }
        with Ranks(count) as ranks, tempfile.TemporaryDirectory() as directory:
            compared = compare(ranks, list(cells.values()), Path(directory))
            for key, result in zip(cells, compared, strict=True):
                results[key] = result
                print(*key, result, file=sys.stderr, flush=True)
    equal = [each for each in results.values() if each.equal]
    refused = [each for each in results.values() if each.refusal]
    measured = {
        "cells/equal": float(len(equal)),
        "cells/refused": float(len(refused)),
        "cells/wrong": float(len(results) - len(equal) - len(refused)),
        "error/worst": max((each.error for each in equal), default=0.0),
    }
    print(_table(results))
    values = [(key, f"{value:g}") for key, value in measured.items()]
    print(figures.table(("figure", "value"), values))
    machine = figures.machine("transformers")
    figures.write(options.json, "parity", machine, measured, TARGETS)
    return 1 if measured["cells/wrong"] else 0


def _table(results: Mapping[tuple[str, str, str], Any]) -> str:
    """Models by layouts; sentences are below, by number."""
    layouts = list(dict.fromkeys(layout for layout, _, _ in results))
    sentences: list[str] = []

    def cell(key: tuple[str, str, str]) -> str:
        if key not in results:
            return ""
        what, _, rest = str(results[key]).partition(" (")
        if results[key].equal:
            return f"{what} ({rest}"
        sentence = rest.removesuffix(")")
        if sentence not in sentences:
            sentences.append(sentence)
        return f"{what} [{sentences.index(sentence) + 1}]"

    rows = [
        (f"{model} {optimizer}", *(cell((layout, model, optimizer)) for layout in layouts))
        for model, optimizer in dict.fromkeys(key[1:] for key in results)
    ]
    notes = [f"[{number}] {sentence}" for number, sentence in enumerate(sentences, 1)]
    return "\n".join([figures.table(("model", *layouts), rows), *notes])


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="A,B", help="models, in all layouts of the size")


if __name__ == "__main__":
    sys.exit(main())
