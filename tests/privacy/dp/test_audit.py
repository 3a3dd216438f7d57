"""Audits by canaries: what the released sums reveal is below the claim, unless noise is missing.

Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run": each of m canaries
is in the data by the toss of a coin, and somebody who sees what is released guesses for some of
them. With (epsilon, delta)-differential privacy so many guesses are right with a small probability.

A canary is one device, whose update is one coordinate of the clipping bound, or zeros. Sums are
independent of each other, so the canaries of all of them count together.
"""

import dataclasses
import math
import os

import pytest
import torch
from scipy.stats import binom
from tests.privacy.dp.test_correlated import inverse_of

from isthmus.job.federated import FederatedSection
from isthmus.job.privacy import FederatedPrivacy, PrivacySection
from isthmus_privacy.crypto.masking import RING
from isthmus_privacy.dp import noisy_vector
from isthmus_privacy.dp.accounting import Composition, Gaussian, ZeroConcentrated
from isthmus_privacy.dp.auditing import Claim
from isthmus_privacy.dp.calibration import NoisePlan
from isthmus_privacy.dp.distributed import fit_ring
from isthmus_privacy.dp_sgd.device_examples import DeviceExamplesPlan
from isthmus_server.budgets.server_noise import ServerNoise

DELTA = 1e-6
ERROR = 0.05
"""Probability with which an audit finds more than there is."""

CANARIES = 200_000
SERVER_CANARIES, SERVER_GUESSES = 400_000, 6000
"""So many that an audit of noise, which has no seed, decides wrongly once in 10^11 runs."""
DEVICES = 50
CLIP = 1.0


def found(scores, present, guesses):
    """The lower bound on epsilon by so many guesses, the surest ones (theorem 5.2, appendix D).

    `scores` are around 0 for absent canaries and around the clipping bound for present ones.
    """
    sure = (scores - CLIP / 2).abs().argsort(descending=True)[:guesses]
    right = int(((scores[sure] > CLIP / 2) == present[sure]).sum())

    def probability(epsilon):
        share = 1 / (1 + math.exp(-epsilon))
        total, worst = 0.0, 0.0
        for fewer in range(1, min(right, 200) + 1):
            total += binom.pmf(right - fewer, guesses, share)
            worst = max(worst, total / fewer)
        at_least = binom.sf(right - 1, guesses, share)
        return at_least + worst * DELTA * 2 * len(scores)

    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) <= ERROR else (low, middle)
    return low


def distributed(present, weaker):
    """Scores of canaries in sums of `DEVICES` by the noise that the devices add."""
    noise, bits = fit_ring(clip=CLIP, multiplier=1.0, honest=DEVICES, clients=DEVICES, size=DEVICES)
    noise = dataclasses.replace(noise, multiplier=1.0 / weaker)
    updates = CLIP * torch.eye(DEVICES)
    nothing, seed = torch.zeros(DEVICES), bytes(32)
    scores = []
    for sums in present.view(-1, DEVICES):
        total, own = torch.zeros(2, DEVICES, dtype=RING[bits])
        for update, here in zip(updates, sums.tolist(), strict=True):
            noisy_vector.encode(noise, update if here else nothing, seed=seed, out=own)
            total += own
        scores.append(DEVICES * noisy_vector.decode(noise, total, seed=seed, clients=DEVICES))
    return torch.cat(scores)


def by_server(mechanism, present, weaker, folder, rounds=1):
    """Scores of canaries that take part in the first of so many rounds, by the server's noise."""
    section = PrivacySection(
        mechanism=mechanism,
        epsilon=50,
        delta=DELTA,
        clip=CLIP,
        noise=1.0 / weaker,
        participations=1,
    )
    plan = NoisePlan.of(section, rounds)
    server, released = ServerNoise(plan, folder, used=False), []
    for row in range(rounds):
        released.append(CLIP * present.float() if row == 0 else torch.zeros(len(present)))
        server.add(released[-1], CLIP, row=row, devices=1)
    if plan.correlated is None:
        return released[0]
    # What the mechanism's matrix makes of the rounds has independent noise, and the first column of
    # the matrix is what a canary in the first round changes.
    column = torch.linalg.inv(inverse_of(plan.correlated))[:, 0]
    rows = [
        sum(column[row - other] * released[other] for other in range(row + 1))
        for row in range(rounds)
    ]
    return sum(each * row for each, row in zip(column, rows, strict=True)) / column.square().sum()


def tossed(canaries):
    return torch.rand(canaries, generator=torch.Generator().manual_seed(7)) < 0.5


@pytest.mark.parametrize("weaker", [1, 6])
def test_the_noise_of_devices_hides_canaries_unless_most_of_it_is_missing(weaker):
    """Each canary takes a device; so few cannot show that half of the noise is missing.

    The noise has no seed: one run in 10^10 is decided wrongly.
    """
    present = tossed(50 * DEVICES)
    claimed = Composition().plus(ZeroConcentrated(0.5)).epsilon(DELTA)
    epsilon = found(distributed(present, weaker), present, guesses=1000 if weaker > 1 else 200)
    assert (epsilon > claimed) == (weaker > 1)
    assert epsilon > claimed / 6


@pytest.mark.skipif(
    "ISTHMUS_TEST_AUDIT" not in os.environ,
    reason="the long audit takes 3 minutes; set ISTHMUS_TEST_AUDIT",
)
@pytest.mark.parametrize("weaker", [1, 2])
def test_many_canaries_find_that_half_of_the_noise_of_devices_is_missing(weaker):
    present = tossed(CANARIES)
    claimed = Composition().plus(ZeroConcentrated(0.5)).epsilon(DELTA)
    epsilon = found(distributed(present, weaker), present, guesses=4000)
    assert (epsilon > claimed) == (weaker == 2)
    assert epsilon > claimed / 2


@pytest.mark.parametrize(("mechanism", "rounds"), [("gaussian", 1), ("correlated", 6)])
@pytest.mark.parametrize("weaker", [1, 2])
def test_the_noise_of_a_server_hides_canaries_unless_it_is_halved(
    tmp_path, mechanism, rounds, weaker
):
    present = tossed(SERVER_CANARIES)
    claimed = Composition().plus(Gaussian(1.0)).epsilon(DELTA)
    scores = by_server(mechanism, present, weaker, tmp_path, rounds)
    epsilon = found(scores, present, SERVER_GUESSES)
    assert (epsilon > claimed) == (weaker == 2)
    assert epsilon > claimed / 2


@pytest.mark.parametrize(
    ("epsilon", "batch", "examples", "rounds"),
    [(1.0, 10, 1000, 10), (1.0, 1, 1000, 50), (0.05, 1, 300, 50), (0.3, 1, 300, 10)],
)
def test_the_claim_of_an_audit_is_within_the_budget(epsilon, batch, examples, rounds):
    """Also of many steps of few examples, of which each loses little; or honest jobs alarm."""
    privacy = FederatedPrivacy(epsilon=epsilon, delta=1e-4)
    section = FederatedSection(batch_size=batch, local_epochs=1, privacy=privacy)
    plan = DeviceExamplesPlan.of(section, rounds, examples)
    claim = Claim(plan.event, rounds, privacy.delta)
    assert claim.epsilon() <= plan.epsilon(rounds) <= epsilon
    exact = Composition().plus(plan.event, rounds).epsilon(privacy.delta)
    assert claim.epsilon() == pytest.approx(exact, rel=0.02)
