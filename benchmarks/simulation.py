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
of an environment with `flwr[simulation]`, `pfl==0.6.0` and torch; a contender that is missing there
is left out; `--only MODEL` measures one model, without the large population.

Figures: `speedup/<flower|pfl>/<mlp|cnn>`, seconds of the contender over ours;
`accuracy_gap/<flower|pfl>/<mlp|cnn>`, its accuracy minus ours, in points;
`seconds_per_round/<contender>/<model>`; `population/seconds`, `population/peak_mib`, of 10 rounds
(2 with `--quick`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import figures
from regime_simulation.readers import mnist_images
from simulation_peers.mnist_users import write_data

HERE = Path(__file__).parent
MODELS = ("mlp", "cnn")
ROUNDS, QUICK_ROUNDS = 50, 5
POPULATION, POPULATION_COHORT, POPULATION_ROUNDS, QUICK_POPULATION_ROUNDS = 1_000_000, 1000, 10, 2
CONTENDERS = ("isthmus", "flower", "pfl")


def main() -> None:
    """Measure, print, write."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--peers", default=sys.executable, help="Python with Flower and pfl")
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        parser.add_argument("--only", choices=MODELS, help="one model")

    options = figures.options(__doc__ or "", more=more)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    results: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="simulation-") as scratch:
        data = Path(scratch) / "users.pt"
        write_data(*mnist_images(Path(os.environ["ISTHMUS_TEST_DATA"])), data)
        for model in [options.only] if options.only else MODELS:
            measured = {
                name: found
                for name in CONTENDERS
                if (found := contender(name, model, rounds, data, options)) is not None
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
        results |= population(QUICK_POPULATION_ROUNDS if options.quick else POPULATION_ROUNDS)
        print(
            f"1,000,000 users, cohorts of 1,000: {results['population/seconds']:.1f} s, "
            f"{results['population/peak_mib']:.0f} MiB"
        )
    machine = figures.machine("flwr")
    if options.device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    figures.write(options.json, "simulation", machine, results)


def contender(
    name: str, model: str, rounds: int, data: Path, options: argparse.Namespace
) -> tuple[float, float] | None:
    """Seconds of a round, and accuracy of the last model; None if it is not installed.

    Raises:
        RuntimeError: it failed.
    """
    print(f"{model}: {name} ...", file=sys.stderr, flush=True)
    python = sys.executable if name == "isthmus" else options.peers
    program = HERE / "simulation_peers" / f"{name}_run.py"
    environment = {
        **os.environ,
        "DATA": str(data),
        "PYTHONPATH": _import_path(),
        "FLWR_TELEMETRY_ENABLED": "0",
        "DEVICE": options.device,
        "PFL_PYTORCH_DEVICE": options.device,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [python, str(program), model, str(rounds)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith('{"ends"'):
            found = json.loads(line)
            ends = found["ends"]
            return (ends[-1] - ends[0]) / (len(ends) - 1), found["accuracy"]
    if name != "isthmus" and "ModuleNotFoundError" in done.stderr + done.stdout:
        print(f"{name} is not installed in {python}", file=sys.stderr)
        return None
    raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")


def population(rounds: int) -> dict[str, float]:
    """Seconds and memory of a simulation with a million users, of the whole command."""
    print("a million users ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="simulation-") as scratch:
        folder = Path(scratch)
        job = folder / "job.toml"
        job.write_text(
            'name = "population"\n[task]\nsource = "simulation_peers.population_task:Population"\n'
            '[strategy]\npolicy = "federated"\n[federated]\nbatch_size = 10\n'
        )
        command = [sys.executable, "-m", "isthmus", "simulate", str(job), "--quiet"]
        command += ["--clients", str(POPULATION), "--cohort", str(POPULATION_COHORT)]
        command += ["--set", f"rounds={rounds}", "--run-dir", str(folder / "run")]
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
    main()
