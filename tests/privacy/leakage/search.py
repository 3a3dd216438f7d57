"""Search random sequences of requests for sums that combine to something about few devices.

    python -m tests.privacy.leakage.search --sequences 100000 --seed 1

prints each finding with its seed, and ends with status 1 if there is one. A sequence depends on
nothing but its seed: `--sequences 1 --seed N` plays that of a finding again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.privacy.leakage import devices
from tests.privacy.leakage.combinations import Finding, findings
from tests.privacy.leakage.ideal_crypto import ideal_crypto
from tests.privacy.leakage.lying_server import EVERYTHING, Repertoire, make_job, play

TASK = "class Survey: ...\nclass Second: ...\n"


@dataclasses.dataclass
class Searched:
    """What a search has seen."""

    sequences: int = 0
    opened: int = 0
    """Sums that the server opened."""
    several: int = 0
    """Sequences with more than one."""
    found: list[tuple[int, Finding]] = dataclasses.field(default_factory=list)
    """By the seed of the sequence."""

    def summary(self, first: int, seconds: float) -> str:
        """What was seen, from the `first` seed on, in one line."""
        return (
            f"{self.sequences} sequences from seed {first} in {seconds:.0f} s: "
            f"{self.opened} opened sums, {self.several} sequences with several, "
            f"{len(self.found)} findings"
        )


@contextlib.contextmanager
def model(tasks: Path) -> Iterator[None]:
    """Devices of the model, whose owners have put two tasks into a directory."""
    (tasks.parent / "states").mkdir(exist_ok=True)
    for name, text in (("survey", TASK), ("other", devices.VERSION.decode() + TASK)):
        (tasks / name).mkdir(parents=True, exist_ok=True)
        (tasks / name / "task.py").write_text(text)
    devices.prepare()
    make_job.cache_clear()
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # devices log why they refuse
    try:
        with ideal_crypto() as patch:
            devices.trace(patch)
            yield
    finally:
        logging.disable(disabled)
        make_job.cache_clear()


def search(
    seeds: range,
    tasks: Path,
    *,
    known: Iterable[str] = (),
    choices: Repertoire = EVERYTHING,
    until_found: bool = False,
    tell: Callable[[Searched], None] = lambda searched: None,
) -> Searched:
    """Play the sequences of some seeds.

    Args:
        seeds: of the sequences.
        tasks: the directory of `model`.
        known: see `World.known`.
        choices: what the server chooses from.
        until_found: stop at the first finding.
        tell: called after each sequence.
    """
    searched = Searched()
    for seed in seeds:
        world = devices.make_world(random.Random(~seed), known)
        opened = play(seed, world, tasks, choices)
        searched.sequences += 1
        searched.opened += len(opened)
        searched.several += len(opened) > 1
        searched.found += [(seed, finding) for finding in findings(opened)]
        tell(searched)
        if until_found and searched.found:
            break
    return searched


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=1000, help="sequences between two reports")
    parser.add_argument("--known", choices=devices.BEYOND, nargs="*", default=[])
    options = parser.parse_args()
    started = time.perf_counter()

    def tell(searched: Searched) -> None:
        for seed, finding in searched.found:
            if seed == options.seed + searched.sequences - 1:
                print(f"seed {seed}: {finding}")
        if searched.sequences % options.every == 0:
            print(searched.summary(options.seed, time.perf_counter() - started), flush=True)

    with tempfile.TemporaryDirectory() as folder, model(tasks := Path(folder) / "tasks"):
        seeds = range(options.seed, options.seed + options.sequences)
        searched = search(seeds, tasks, known=options.known, tell=tell)
    print(searched.summary(options.seed, time.perf_counter() - started))
    return 1 if searched.found else 0


if __name__ == "__main__":
    sys.exit(main())
