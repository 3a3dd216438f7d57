"""Record the examples and other runs with real processes, and verify each by its transcript.

`python -m tests.server.read.recorded_examples FOLDER [NAME...]` keeps the runs in FOLDER, passes
over those that are there, and ends with the exit code 1 if the verifier refuses one. Those whose
data are not in `ISTHMUS_TEST_DATA` are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from isthmus_verify import command

EXAMPLES = Path(__file__).parents[3] / "examples"
DATA = Path(os.environ.get("ISTHMUS_TEST_DATA", "none"))
DIGITS = ("run", "digits/job.toml")
SHORT = ("budget=24", "strategy.policy=federated")
PRIVATE = ("privacy.mechanism=distributed", "privacy.epsilon=20", "privacy.delta=1e-3")
SPEAKERS = f"task.data={DATA / 'tinyshakespeare.txt'}"

RUNS: dict[str, tuple[tuple[str, str], tuple[str, ...]]] = {
    "digits": (DIGITS, ()),
    "digits-devices": (DIGITS, SHORT),
    "digits-datacenter": (DIGITS, ("budget=12", "strategy.policy=datacenter")),
    "digits-adaptive": (DIGITS, ("budget=60", "strategy.policy=adaptive")),
    "digits-compressed": (DIGITS, (*SHORT, "federated.compression={}")),
    "digits-private": (DIGITS, (*SHORT, *PRIVATE)),
    "digits-examples-private": (
        DIGITS,
        (*SHORT, "federated.privacy={epsilon=8.0, delta=1e-4}", "federated.local_steps=4"),
    ),
    "digits-evaluated": (DIGITS, (*SHORT, "evaluation.devices=8")),
    "digits-simulated": (("simulate", "digits/job.toml"), (*SHORT, "simulation.clients=100")),
    "flower": (("run", "flower/job.toml"), ("rounds=4",)),
    "heart": (
        ("run", "heart/job.toml"),
        (f"task.data={DATA / 'heart-disease'}", "rounds=4", "evaluation.every=2"),
    ),
    "shakespeare": (("run", "shakespeare/job.toml"), (SPEAKERS,)),
    "shakespeare-decoder": (("run", "shakespeare/decoder.toml"), (SPEAKERS,)),
    "pretrain": (("run", "pretrain/job.toml"), (f"task.data={DATA}", "rounds=2")),
    **{
        f"tasks-{name}": (("run", "tasks/job.toml"), (f"task.source={name}.py:{task}", "rounds=3"))
        for name, task in (
            ("cox", "Cox"),
            ("gan", "Gan"),
            ("simclr", "SimCLR"),
            ("tagging", "Tagging"),
            ("adapters", "Adapters"),
        )
    },
}


def recorded(folder: Path, name: str) -> str:
    """Record a run, prove it and verify it; what came of it, in one line."""
    (kind, job), overrides = RUNS[name]
    if any("none/" in each for each in overrides):
        return "left out: set ISTHMUS_TEST_DATA"
    directory = folder / name
    if not (directory / "model.safetensors").exists():
        sets = [word for each in overrides for word in ("--set", each)]
        arguments = [kind, str(EXAMPLES / job), "--quiet", "--run-dir", str(directory), *sets]
        done = _isthmus(*arguments)
        if done.returncode:
            return f"not recorded: {done.stderr.strip().splitlines()[-1:]}"
    transcript = folder / f"{name}.transcript.jsonl"
    proof = _isthmus("prove", str(directory), "--output", str(transcript))
    if proof.returncode:
        return f"REFUSED to be proven: {proof.stderr.strip()}"
    model = str(directory / "model.safetensors")
    refused = command.main([str(transcript), "--model", model])
    return "REFUSED by the verifier" if refused else "verified"


def _isthmus(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "isthmus", *arguments], capture_output=True, text=True, check=False
    )


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    found = {name: recorded(target, name) for name in sys.argv[2:] or RUNS}
    for name, outcome in found.items():
        print(f"{name:26} {outcome}")
    sys.exit(any("REFUSED" in outcome for outcome in found.values()))
