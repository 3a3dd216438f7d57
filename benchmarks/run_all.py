"""Run every benchmark with `--quick`, one after the other, and print one table of their figures.

    make benchmarks                                                # with the environments it needs
    python benchmarks/run_all.py --only secagg,personal            # some of them
    python benchmarks/run_all.py --record build/benchmarks.json    # the table in the documentation

A target stands in the script that measures the figure. One that is for the full sizes is shown and
not compared, since `--quick` measures smaller ones. A script that fails or lacks something is named
at the end with its last sentence; the others run nevertheless, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import figures
from harness.figures import Target

from isthmus.errors import UserError

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "measurements.md"
BEGIN = "<!-- begin of the table of make benchmarks -->\n"
END = "<!-- end of the table -->\n"
NO_MEASUREMENTS = {
    Path(__file__).name: "runs the others",
    "console_screenshots.py": "draws the pictures of docs/console.md",
}
LIMIT_SECONDS = 600.0
"""For one script; `--quick` takes less than 100 s on two cores without other load."""
HEADER = ("script", "figure", "measured", "target", "met")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="A,B", help=f"of {', '.join(scripts())}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help=f"run nothing, and write the figures of such a file into {PAGE.name}",
    )
    options = parser.parse_args(argv)
    try:
        if options.record is not None:
            record(options.record, PAGE)
            return 0
        names = chosen(options.only)
    except UserError as error:
        print(f"run_all.py: {error}", file=sys.stderr)
        return 1
    document = run(names)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(figures.table(HEADER, list(rows(document))))
    print(f"\n{conditions(document)}")
    for name, sentence in document["failures"].items():
        print(f"{name}.py failed: {sentence}", file=sys.stderr)
    return 1 if document["failures"] else 0


def scripts() -> list[str]:
    """The names of all benchmarks: files that can be run, and measure something."""
    return [
        path.stem
        for path in sorted(HERE.glob("*.py"))
        if path.name not in NO_MEASUREMENTS and _is_run_by_name(path)
    ]


def _is_run_by_name(path: Path) -> bool:
    """Whether a file begins something when it is run, and is not only imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(each, ast.If) and "__main__" in ast.unparse(each) for each in tree.body)


def chosen(only: str | None) -> list[str]:
    """The benchmarks that are asked for.

    Raises:
        UserError: there is no such benchmark.
    """
    known = scripts()
    names = only.split(",") if only else known
    for name in names:
        if name not in known:
            raise UserError(f"--only: there is no {name}; there are {', '.join(known)}")
    return names


def run(names: Sequence[str]) -> dict[str, Any]:
    """Run benchmarks; returns their figures and targets by script, and sentences of failures."""
    document: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": figures.machine("flwr"),
        "benchmarks": {},
        "failures": {},
    }
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as scratch:
        for name in names:
            file = Path(scratch) / f"{name}.json"
            print(f"{name}.py ...", file=sys.stderr, flush=True)
            started = time.monotonic()
            sentence = run_one(name, file)
            seconds = time.monotonic() - started
            print(f"{name}.py took {seconds:.0f} s", file=sys.stderr, flush=True)
            # A script that lacks one of its peers has measured the others.
            measured = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            document["benchmarks"][name] = {
                "seconds": round(seconds, 1),
                "figures": measured.get("figures", {}),
                "targets": measured.get("targets", {}),
            }
            if sentence:
                document["failures"][name] = sentence
    return document


def run_one(name: str, file: Path) -> str:
    """Run a benchmark, whose figures go to a file; returns why it failed, or nothing."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--quick", "--json", str(file)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {LIMIT_SECONDS:g} s"
    if done.returncode == 0:
        return ""
    last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
    return last.removeprefix(f"{name}.py: ")


def rows(document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The lines of the table."""
    for name, benchmark in document["benchmarks"].items():
        for key, value in benchmark["figures"].items():
            table = benchmark["targets"].get(key)
            target = None if table is None else Target(**table)
            if target is None:
                met = ""
            elif target.full_size:
                met = "-"
            else:
                met = "yes" if target.is_met(value) else "no"
            shown = "" if target is None else str(target)
            yield name, key, figures.short(value), shown, met


def conditions(document: dict[str, Any]) -> str:
    """When and where the figures were measured, in a sentence."""
    on = document["machine"]
    took = sum(benchmark["seconds"] for benchmark in document["benchmarks"].values())
    gpu = "" if "gpu" in on else "no GPU, "
    return (
        f"{document['date']}, {on['cpu']}, {on['cores']} cores, {on['memory_gib']:g} GiB, {gpu}"
        f"Python {on['python']}, PyTorch {on['torch']}, Flower {on['flwr']}; "
        f"{took / 60:.0f} minutes."
    )


def markdown(document: dict[str, Any]) -> str:
    """The table and its conditions for the documentation."""
    lines = [conditions(document), ""]
    lines += [f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
    before = ""
    for name, key, *cells in rows(document):
        script = "" if name == before else f"`{name}.py`"
        lines.append(f"| {' | '.join((script, f'`{key}`', *cells))} |")
        before = name
    lines += ["", *(f"`{name}.py`: {why}" for name, why in document["failures"].items())]
    return "\n".join(lines).rstrip() + "\n"


def record(file: Path, page: Path) -> None:
    """Replace the table of a page by the figures of a file that `--json` wrote.

    Raises:
        UserError: the file cannot be read, or the page has no place for it.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--record={file} cannot be read: {error}") from None
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise UserError(f"{page} has no lines {BEGIN.strip()} and {END.strip()}")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{markdown(document)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
