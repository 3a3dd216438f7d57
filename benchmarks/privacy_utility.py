"""Accuracy against epsilon: what differential privacy costs by mechanism.

1,000 users have 8 images of MNIST each (its test set; 2,000 others are the test rows here). They
are divided at random into ten cohorts, which train in turn: a user is in every tenth of 200 rounds.
The model is linear, on the images averaged to 7 x 7 pixels: 500 parameters. Clipping, calibration,
noise, encoding and the sum in the ring are those of the product; masks and network are not
simulated, as they change no bit of the sum.

Mechanisms, all with the same schedule, steps, clipping bound and rates, which were tuned with one
seed, without noise and at epsilon 4: `none` (clipped, no noise), `gaussian` (a trusted server adds
independent noise), `correlated` (a trusted server, with the separation of ten rounds) and
`distributed` (each user adds a share, in the ring that the product chooses).

Figures: `accuracy/<mechanism>/<epsilon>`, mean over seeds; `accuracy/none`, without noise;
`gap/distributed_over_central`, the smallest difference in points over epsilons to gaussian;
`gap/correlated_over_gaussian`, likewise; `bits`, the largest ring of distributed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import command_line, figures
from harness.figures import Target
from regime_simulation.readers import MNIST_FILES, mnist

from isthmus.job.privacy import PrivacySection
from isthmus_privacy.crypto.masking import RING
from isthmus_privacy.dp import noisy_vector
from isthmus_privacy.dp.calibration import NoisePlan
from isthmus_privacy.dp.clipping import clip_to_norm
from isthmus_privacy.dp.distributed import fit_ring
from isthmus_server.budgets.server_noise import ServerNoise

USERS, COHORTS = 1000, 10
EACH = USERS // COHORTS
IMAGES = 8
SIDE, CLASSES = 7, 10
SIZE = (SIDE**2 + 1) * CLASSES
ROUNDS, QUICK_ROUNDS = 200, 60
DELTA = 1e-5
EPSILONS, QUICK_EPSILONS = (1.0, 2.0, 4.0, 8.0), (2.0, 8.0)
MECHANISMS = ("gaussian", "correlated", "distributed")
TARGETS = {
    "gap/distributed_over_central": Target(at_least=-1),
    "gap/correlated_over_gaussian": Target(at_least=0),
}
SEEDS, QUICK_SEEDS = (0, 1, 2), (0, 1)
LOCAL_STEPS, LOCAL_RATE = 8, 2.0
CLIP, SERVER_RATE = 1.0, 1.0
"""Found while tuning, with seed 0 only."""


class Digits:
    """The users' images (users, images, inputs + 1) and labels, and the test rows."""

    def __init__(self, folder: Path, seed: int) -> None:
        train, test = mnist(folder)
        order = torch.randperm(len(train.target), generator=_generator(seed))[: USERS * IMAGES]
        self.inputs = _inputs(train.inputs[order]).view(USERS, IMAGES, -1)
        self.labels = train.target[order].view(USERS, IMAGES)
        self.test_inputs, self.test_labels = _inputs(test.inputs), test.target

    def updates(self, model: torch.Tensor, users: torch.Tensor) -> torch.Tensor:
        """Start minus end of local training (users, SIZE) from a model (SIZE)."""
        weights = model.view(-1, CLASSES).repeat(len(users), 1, 1)
        inputs, labels = self.inputs[users], self.labels[users]
        wanted = torch.nn.functional.one_hot(labels, CLASSES).float()
        for _ in range(LOCAL_STEPS):
            wrong = (inputs @ weights).softmax(-1) - wanted
            weights = weights - LOCAL_RATE / IMAGES * inputs.transpose(1, 2) @ wrong
        return model - weights.flatten(1)

    def accuracy(self, model: torch.Tensor) -> float:
        """Share of the test rows that a model (SIZE) recognises."""
        scores = self.test_inputs @ model.view(-1, CLASSES)
        return float((scores.argmax(1) == self.test_labels).double().mean())


def _inputs(images: torch.Tensor) -> torch.Tensor:
    pooled = torch.nn.functional.avg_pool2d(images, images.shape[-1] // SIDE).flatten(1)
    return torch.cat([pooled, torch.ones(len(pooled), 1)], 1)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def train(
    digits: Digits, seed: int, rounds: int, privacy: PrivacySection | None
) -> tuple[float, int]:
    """The accuracy of the model after so many rounds, and the bits of the ring (0 without)."""
    model, bits = torch.zeros(SIZE), 0
    cohorts = torch.randperm(USERS, generator=_generator(seed + 1000)).view(COHORTS, EACH)
    plan = None if privacy is None else NoisePlan.of(privacy, rounds)
    with tempfile.TemporaryDirectory(prefix="privacy-") as folder:
        server = None
        if plan is not None and plan.privacy.mechanism != "distributed":
            server = ServerNoise(plan, Path(folder), used=False)
        for round_ in range(rounds):
            updates = digits.updates(model, cohorts[round_ % COHORTS])
            if plan is not None and server is None:
                mean, bits = distributed_mean(plan, updates, round_)
            else:
                for update in updates:
                    clip_to_norm(update, CLIP)
                mean = updates.mean(0)
                if server is not None:
                    server.add(mean, plan.privacy.clip, row=round_, devices=EACH)
            model = model - SERVER_RATE * mean
    return digits.accuracy(model), bits


def distributed_mean(
    plan: NoisePlan, updates: torch.Tensor, round_: int
) -> tuple[torch.Tensor, int]:
    """The mean (SIZE) of updates to which each user adds its share of the noise, and the bits."""
    noise, bits = fit_ring(
        clip=CLIP, multiplier=plan.multiplier, honest=EACH, clients=EACH, size=SIZE
    )
    seed = round_.to_bytes(32, "little")
    total, own = torch.zeros(2, SIZE, dtype=RING[bits])
    for update in updates:
        noisy_vector.encode(noise, update, seed=seed, out=own)
        total += own
    return noisy_vector.decode(noise, total, seed=seed, clients=EACH), bits


def section(mechanism: str, epsilon: float, rounds: int) -> PrivacySection:
    """The job's table for a mechanism."""
    often = {"separation": COHORTS} if mechanism == "correlated" else {}
    limited = {} if often else {"participations": -(-rounds // COHORTS)}
    return PrivacySection.model_validate(
        {"mechanism": mechanism, "epsilon": epsilon, "delta": DELTA, "clip": CLIP} | often | limited
    )


def _more_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_data(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures, as PNG")


def plot(results: dict[str, float], epsilons: tuple[float, ...], path: Path) -> None:
    """Draw accuracy against epsilon."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6, 3.6), layout="tight")
    axes = drawing.subplots()
    axes.axhline(100 * results["accuracy/none"], color="gray", linestyle="--", label="none")
    for mechanism, marker in zip(MECHANISMS, "so^", strict=True):
        of = [100 * results[f"accuracy/{mechanism}/{each:g}"] for each in epsilons]
        axes.plot(epsilons, of, marker=marker, label=mechanism)
    axes.set_xscale("log", base=2)
    axes.set_xticks(epsilons, [f"{each:g}" for each in epsilons])
    axes.set_xlabel(f"epsilon of each user, delta {DELTA:g}")
    axes.set_ylabel("test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend()
    drawing.savefig(path, format="png", dpi=120, metadata={"Software": None})


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv, _more_options)
    if options.plot is not None:
        command_line.needs("matplotlib", "matplotlib")
    folder = command_line.data_folder(options, *MNIST_FILES)
    seeds, rounds, epsilons = command_line.of_size(
        options,
        full=(SEEDS, ROUNDS, EPSILONS),
        quick=(QUICK_SEEDS, QUICK_ROUNDS, QUICK_EPSILONS),
        smoke=(SEEDS[:1], COHORTS, EPSILONS[-1:]),
    )
    digits = {seed: Digits(folder, seed) for seed in seeds}
    results: dict[str, float] = {}
    without = [train(digits[seed], seed, rounds, None)[0] for seed in seeds]
    results["accuracy/none"] = statistics.mean(without)
    rows = [("none", *(f"{results['accuracy/none']:.1%}" for _ in epsilons))]
    bits = 0
    for mechanism in MECHANISMS:
        cells = [mechanism]
        for epsilon in epsilons:
            privacy = section(mechanism, epsilon, rounds)
            runs = [train(digits[seed], seed, rounds, privacy) for seed in seeds]
            values = [accuracy for accuracy, _ in runs]
            bits = max([bits, *(ring for _, ring in runs)])
            results[f"accuracy/{mechanism}/{epsilon:g}"] = statistics.mean(values)
            cells.append(f"{statistics.mean(values):.1%} [{min(values):.1%}..{max(values):.1%}]")
        rows.append(tuple(cells))
    compared = {"distributed_over_central": "distributed", "correlated_over_gaussian": "correlated"}
    for name, first in compared.items():
        results[f"gap/{name}"] = min(
            100 * (results[f"accuracy/{first}/{e:g}"] - results[f"accuracy/gaussian/{e:g}"])
            for e in epsilons
        )
    results["bits"] = bits
    print(figures.table(("mechanism", *(f"epsilon {each:g}" for each in epsilons)), rows))
    if options.plot is not None:
        plot(results, epsilons, options.plot)
    figures.write(options.json, "privacy_utility", figures.machine(), results, TARGETS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
