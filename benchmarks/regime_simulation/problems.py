"""The problems of each data set: how its public data can help or mislead.

A: public data of some classes or sources only; the devices have the whole target.
B: some classes or sources exist only in the public data, the others only on devices.
P: all public labels are wrong (poisoned); the devices have the whole target.

A file has the settings of the data set, and a table for each problem with what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regime_simulation.data_sets import DATA_SETS
from regime_simulation.scenario import Scenario, read_table, validated

from isthmus.errors import UserError

PROBLEMS = ("A", "B", "P")
FOLDER = Path(__file__).parents[1] / "scenarios" / "problems"


def load_problems(
    names: Sequence[str], problems: Sequence[str] = PROBLEMS, eval_data: str = "public"
) -> list[Scenario]:
    """The scenarios of data sets; with `eval_data = "target"` their names end in `-target`.

    Raises:
        UserError: an unknown data set or problem.
        JobError: a file is not valid.
    """
    for what, given, known in (
        ("data set", names, tuple(DATA_SETS)),
        ("problem", problems, PROBLEMS),
    ):
        unknown = [each for each in given if each not in known]
        if unknown:
            raise UserError(f"no {what} {unknown[0]!r}; there are {', '.join(known)}")
    suffix = "-target" if eval_data == "target" else ""
    scenarios = []
    for name in names:
        path = FOLDER / f"{name}.toml"
        table = read_table(path)
        differences = {problem: table.pop(problem, {}) for problem in PROBLEMS}
        for problem in problems:
            fixed = {
                "name": f"{name}-{problem}{suffix}",
                "data": name,
                "eval_data": eval_data,
            }
            merged = _merged(_merged(table, differences[problem]), fixed)
            scenarios.append(validated(merged, path))
    return scenarios


def figure_key(scenario: Scenario) -> str:
    """The scenario's part of the keys of figures, `<data set>/<problem>`."""
    return f"{scenario.data}/{scenario.name.removeprefix(f'{scenario.data}-')}"


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `changes`, table by table."""
    merged = dict(base)
    for key, value in changes.items():
        before = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(before, Mapping)
        merged[key] = _merged(before, value) if both else value  # type: ignore[arg-type]  # both are tables
    return merged
