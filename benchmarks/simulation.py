"""Simulated federated learning against Flower's simulation (Ray) and pfl, and a large population.

1,000 users have 8 images of MNIST each; 50 of them train in each round, for 5 epochs in batches of
4, by SGD from the same rate. All contenders have the same model (`simulation_peers/mnist_users.py`:
an MLP and a small CNN), average the updates, and are measured one after the other in processes of
their own, from the end of the first round to that of the last; nobody evaluates between.
Flower trains with one actor on each core, pfl in one process, as its tutorials do. The test set has
2,000 images. Isthmus trains as its option `auto` decides, and keeps what it keeps of every run:
receipts of each user, and a checkpoint of each round on disk.

The first round is not counted: Ray starts in it, and Isthmus measures both ways of training. With
`--device cuda` all train on a GPU, which Flower's actors share.

Then 1,000,000 users with a linear model train in cohorts of 1,000, with secure sums.

Flower's simulation and pfl are no dependencies of Isthmus. `--peers PYTHON` names the interpreter
of an environment with them (`peers.txt`), which is the one that `make benchmarks` makes if it is
there. A contender that is missing is left out and named at the end. `--only MODEL` measures one
model, without the large population.

Figures: `speedup/<flower|pfl>/<mlp|cnn>`, seconds of the contender over ours;
`accuracy_gap/<flower|pfl>/<mlp|cnn>`, its accuracy minus ours, in points;
`seconds_per_round/<contender>/<model>`; `population/seconds`, `population/peak_mib`, of 10 rounds,
or 2 with `--quick`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import command_line, figures
from harness.figures import Target
from harness.processes import output_of
from regime_simulation.readers import MNIST_FILES, mnist_images
from simulation_peers.mnist_users import write_data

from isthmus.errors import UserError

HERE = Path(__file__).parent
MODELS = ("mlp", "cnn")
PEERS = {"flower": "ray", "pfl": "pfl"}
"""The other contenders, with the module that only their environment has: Flower simulates by Ray,
which Flower without its extra does not install."""
ENVIRONMENT = HERE.parent / ".venv-peers" / "bin" / "python"
"""Made by `make benchmarks`."""
TARGETS = {
    "speedup/flower/*": Target(at_least=10),
    "speedup/pfl/*": Target(at_least=2),
    "population/seconds": Target(at_most=600),
    "population/peak_mib": Target(at_most=4096),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements."""

    models: tuple[str, ...] = MODELS
    rounds: int = 50
    peers: tuple[str, ...] = tuple(PEERS)
    population: int = 1_000_000
    population_cohort: int = 1000
    population_rounds: int = 10


QUICK = Sizes(rounds=5, population_rounds=2)
# Ray alone takes half a minute to start.
SMOKE = Sizes(
    models=("mlp",), rounds=2, peers=(), population=50, population_cohort=5, population_rounds=1
)


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""

    def more(parser: argparse.ArgumentParser) -> None:
        command_line.add_data(parser)
        peers = str(ENVIRONMENT) if ENVIRONMENT.exists() else sys.executable
        parser.add_argument("--peers", default=peers, help="Python with Flower and pfl")
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        parser.add_argument("--only", choices=MODELS, help="one model")

    options = command_line.options(__doc__ or "", argv, more)
    sizes = command_line.of_size(options, full=Sizes(), quick=QUICK, smoke=SMOKE)
    folder = command_line.data_folder(options, *MNIST_FILES)
    missing = [name for name in sizes.peers if not is_installed(PEERS[name], options.peers)]
    contenders = ["isthmus", *(name for name in sizes.peers if name not in missing)]
    results: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="simulation-") as scratch:
        data = Path(scratch) / "users.pt"
        write_data(*mnist_images(folder), data)
        for model in [options.only] if options.only else sizes.models:
            measured = {
                name: contender(name, model, sizes.rounds, data, options) for name in contenders
            }
            own = measured["isthmus"]
            for name, (seconds, accuracy) in measured.items():
                results[f"seconds_per_round/{name}/{model}"] = seconds
                if name != "isthmus":
                    results[f"speedup/{name}/{model}"] = seconds / own[0]
                    results[f"accuracy_gap/{name}/{model}"] = 100 * (accuracy - own[1])
                rows.append(
                    (
                        f"{model}, {name}",
                        f"{1000 * seconds:.0f} ms",
                        figures.times(seconds / own[0]),
                        f"{accuracy:.1%}",
                    )
                )
    print(figures.table(("50 of 1,000 users", "per round", "to ours", "accuracy"), rows))
    if options.only is None:
        results |= population(sizes)
        print(
            f"{sizes.population:,} users, cohorts of {sizes.population_cohort:,}: "
            f"{results['population/seconds']:.1f} s, "
            f"{results['population/peak_mib']:.0f} MiB"
        )
    machine = figures.machine("flwr")
    if options.device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    figures.write(options.json, "simulation", machine, results, TARGETS)
    if missing:
        raise UserError(
            f"{options.peers} has no {' and no '.join(PEERS[name] for name in missing)}, so that "
            f"{' and '.join(missing)} were not measured; `make benchmarks` installs them, and "
            "`pip install -r benchmarks/peers.txt` in an environment for --peers"
        )
    return 0


def is_installed(module: str, python: str) -> bool:
    """Whether an interpreter can import a module.

    Raises:
        UserError: there is no such interpreter.
    """
    probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", probe], check=False).returncode == 0
    except OSError as error:
        raise UserError(f"--peers={python} cannot be run: {error.strerror}") from None


def contender(
    name: str, model: str, rounds: int, data: Path, options: argparse.Namespace
) -> tuple[float, float]:
    """Seconds of a round, and accuracy of the last model.

    Raises:
        RuntimeError: it failed.
    """
    print(f"{model}: {name} ...", file=sys.stderr, flush=True)
    python = sys.executable if name == "isthmus" else options.peers
    program = HERE / "simulation_peers" / f"{name}_run.py"
    environment = {
        "DATA": str(data),
        "PYTHONPATH": _import_path(),
        "DEVICE": options.device,
        "PFL_PYTORCH_DEVICE": options.device,
        "OMP_NUM_THREADS": "1",
    }
    printed = output_of([python, str(program), model, str(rounds)], environment=environment)
    for line in printed.splitlines():
        if line.startswith('{"ends"'):
            found = json.loads(line)
            ends = found["ends"]
            return (ends[-1] - ends[0]) / (len(ends) - 1), found["accuracy"]
    raise RuntimeError(f"{name} printed no figures:\n{printed[-2000:]}")


def population(sizes: Sizes) -> dict[str, float]:
    """Seconds and memory of a simulation with a million users, of the whole command."""
    print(f"{sizes.population:,} users ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="simulation-") as scratch:
        folder = Path(scratch)
        job = folder / "job.toml"
        job.write_text(
            'name = "population"\n[task]\nsource = "simulation_peers.population_task:Population"\n'
            '[strategy]\npolicy = "federated"\n[federated]\nbatch_size = 10\n'
        )
        command = [sys.executable, "-m", "isthmus", "simulate", str(job), "--quiet"]
        command += ["--clients", str(sizes.population), "--cohort", str(sizes.population_cohort)]
        command += ["--set", f"rounds={sizes.population_rounds}", "--run-dir", str(folder / "run")]
        environment = {**os.environ, "PYTHONPATH": _import_path()}
        seconds, peak = _run(command, environment)
    return {"population/seconds": seconds, "population/peak_mib": peak}


def _import_path() -> str:
    """Where children find these modules, and whatever this process was told to import."""
    return os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))


def _run(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Wall time, and the peak of memory in MiB, of a command."""
    started = time.perf_counter()
    child = subprocess.Popen(command, env=environment)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{command} ended with {child.returncode}")
    return time.perf_counter() - started, usage.ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
