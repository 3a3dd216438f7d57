"""Secure aggregation compared with Flower's SecAgg+ functions, on the same vectors.

Both do the same work in turn in this process. Medians of the CPU seconds of the whole process are
compared, because Flower's Shamir sharing and Isthmus' masking use threads.

  * Client masking: mask a quantised vector with k neighbours and the client's own mask, that is k
    key agreements and k + 1 expanded masks. For Flower, the functions of its mod
    (`generate_shared_key`, `pseudo_rand_gen`, `parameters_addition`, `parameters_mod`).
  * Server unmasking: n clients on the complete graph, of which 10 % are lost before they send a
    vector. Reconstruct secrets from shares, repeat the key agreements of the lost clients with
    all others, and subtract the masks. For Flower, the functions of its workflow
    (`combine_shares`, `pseudo_rand_gen`, ...).
  * Shamir: share a client's two secrets among n = 100 with t = 67, and reconstruct both. Flower
    shares the 306-byte PEM of its key, Isthmus the 32-byte key.
  * Mask-and-add: GB of mask expanded and added per second on one core, against only AES-256-CTR.
  * Refusals: every check of the protocol is removed in turn; `killed` counts the removals that a
    test detects.

Figures: `client_mask_speedup/<params>/<k>`, `server_unmask_speedup/<params>/<n>`,
`shamir_speedup/<holders>`, `mask_add_fraction_of_aes`, `refusals`, `refusals_killed`,
`quantise_speedup/<params>`, and `<noise|noisy_vector>_cpu_over_masking/<params>`, of noise and of
the whole encoding of an update with it.
"""

from __future__ import annotations

import os

os.environ["FLWR_TELEMETRY_ENABLED"] = (
    "0"  # before importing flwr, which sends telemetry by default
)
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

import dataclasses
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from harness import code_of_tests, command_line, figures
from harness.figures import Target

from isthmus_privacy.crypto import shamir
from isthmus_privacy.crypto.keys import OneTimeKey
from isthmus_privacy.crypto.masking import add_masks
from isthmus_privacy.dp.discrete_gaussian import add_noise
from isthmus_privacy.dp.distributed import DistributedNoise
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.encoding import encode
from isthmus_privacy.secagg.graph import graph_parameters

try:
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
    from flwr.common.secure_aggregation.ndarrays_arithmetic import (
        parameters_addition,
        parameters_mod,
        parameters_subtraction,
    )
    from flwr.common.secure_aggregation.quantization import quantize
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
    from flwr.supercore.primitives.asymmetric import (
        bytes_to_private_key,
        bytes_to_public_key,
        generate_key_pairs,
        private_key_to_bytes,
        public_key_to_bytes,
    )
except ModuleNotFoundError:
    sys.exit("secagg.py: flwr is not installed; run `pip install flwr`")

code_of_tests.make_importable()

RING_BITS = 32
SALT = bytes(32)
AES_TILE = 256 << 10
TARGETS = {
    "client_mask_speedup/*": Target(at_least=5),
    "server_unmask_speedup/*": Target(at_least=10),
    "noise_cpu_over_masking/*": Target(at_most=3),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements."""

    params: int = 1_000_000
    repeats: int = 5
    degrees: tuple[int, ...] = (10, 50, 100)
    """Neighbours of a client."""
    unmasked: tuple[tuple[int, int], ...] = ((20, 3), (50, 1))
    """Numbers of clients, and the repeats of unmasking for each."""
    shared: tuple[int, int] = (100, 67)
    """Holders and threshold of a secret."""


QUICK = Sizes(repeats=2, unmasked=((20, 1),))
SMOKE = Sizes(params=1000, repeats=1, degrees=(2,), unmasked=((10, 1),), shared=(5, 3))


def cpu_seconds(*works: Callable[[], object], repeats: int) -> list[float]:
    """Median CPU seconds of each function, run in turn, with a warm-up unless `repeats` is 1."""
    taken: list[list[float]] = [[] for _ in works]
    for repeat in range(repeats + (repeats > 1)):
        for i, work in enumerate(works):
            start = time.process_time()
            work()
            if repeat or repeats == 1:
                taken[i].append(time.process_time() - start)
    return [statistics.median(seconds) for seconds in taken]


class Comparison:
    """One comparison: a row of the table and a figure."""

    def __init__(self, what: str, key: str, isthmus: float, flower: float) -> None:
        self.key, self.ratio = key, flower / isthmus
        self.cells = (
            what,
            _milliseconds(isthmus),
            _milliseconds(flower),
            figures.times(self.ratio),
        )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms" if seconds < 10 else f"{seconds:.1f} s"


class FlowerKey:
    """A key pair, encoded as in Flower's protocol."""

    def __init__(self) -> None:
        private, public = generate_key_pairs()
        self.private, self.public = private_key_to_bytes(private), public_key_to_bytes(public)

    def agree(self, other: FlowerKey) -> bytes:
        """Agree on a key as Flower's mod does for each neighbour."""
        return generate_shared_key(
            bytes_to_private_key(self.private), bytes_to_public_key(other.public)
        )


def client_masking(params: int, degree: int, repeats: int) -> Comparison:
    """Compare masking by one client with `degree` neighbours, half of them before it."""
    values = torch.randint(0, 1 << 22, (params,), dtype=torch.int32)
    seed = os.urandom(32)
    own, others = OneTimeKey(), [OneTimeKey() for _ in range(degree)]
    ciphertexts = [other.encapsulate(own.public, SALT, "pair")[1] for other in others]
    quantised_tensor = values.clone()

    def isthmus() -> None:
        seeds = [
            own.decapsulate(other.public, ciphertext, SALT, "pair")
            for other, ciphertext in zip(others, ciphertexts, strict=True)
        ]
        add_masks(quantised_tensor, [seed, *seeds[: degree // 2]], seeds[degree // 2 :], threads=1)

    flower_own, flower_others = FlowerKey(), [FlowerKey() for _ in range(degree)]
    quantised = [values.numpy()]

    def flower() -> None:
        shapes = [array.shape for array in quantised]
        vector = parameters_addition(quantised, pseudo_rand_gen(seed, 1 << RING_BITS, shapes))
        for i, other in enumerate(flower_others):
            mask = pseudo_rand_gen(flower_own.agree(other), 1 << RING_BITS, shapes)
            step = parameters_addition if i < degree // 2 else parameters_subtraction
            vector = step(vector, mask)
        parameters_mod(vector, 1 << RING_BITS)

    a, b = cpu_seconds(isthmus, flower, repeats=repeats)
    what = f"client masks {_short(params)}, k={degree}"
    return Comparison(what, f"client_mask_speedup/{_short(params)}/{degree}", a, b)


def round_config(**settings: Any) -> RoundConfig:
    """The configuration of one sum."""
    common = {"model_hash": SALT, "purpose": SALT}
    return RoundConfig(run_id="bench", round=0, attempt=0, **common, **settings)


def quantising(params: int, repeats: int) -> Comparison:
    """Compare stochastic quantisation of floats."""
    update = torch.empty(params).uniform_(-1, 1)
    config = round_config(size=params, clients_max=1000, clip=8.0)
    a, b = cpu_seconds(
        lambda: encode(config, update, weight=1),
        lambda: quantize([update.numpy()], 8.0, 1 << 22),
        repeats=repeats,
    )
    return Comparison(
        f"client quantises {_short(params)}", f"quantise_speedup/{_short(params)}", a, b
    )


def server_unmasking(params: int, clients: int, repeats: int) -> Comparison:
    """Compare unmasking for `clients` on the complete graph; a tenth of them are lost."""
    lost = clients // 10
    graph = graph_parameters(clients, corrupt_permille=100, dropout_permille=200, clients_min=2)
    survivors, dropped = range(clients - lost), range(clients - lost, clients)
    points = {i: [j + 1 for j in range(clients) if j != i] for i in range(clients)}
    total = torch.randint(-(1 << 31), 1 << 31, (params,), dtype=torch.int64).to(torch.int32)

    seeds = [os.urandom(32) for _ in range(clients)]
    isthmus_keys = [OneTimeKey() for _ in range(clients)]
    dealt = [
        shamir.split(
            [seeds[i] if i in survivors else isthmus_keys[i].secret_bytes()],
            points[i],
            graph.threshold,
        )[: graph.threshold]
        for i in range(clients)
    ]
    used = [points[i][: graph.threshold] for i in range(clients)]
    ciphertexts = {
        (i, j): isthmus_keys[j].encapsulate(isthmus_keys[i].public, SALT, "pair")[1]
        for i in dropped
        for j in survivors
    }

    def isthmus() -> None:
        secrets = shamir.combine(used, dealt)
        plus, minus = [], []
        for i in survivors:
            hashlib.sha256(secrets[i]).digest()  # the seed is checked against its commitment
            minus.append(secrets[i])
        for i in dropped:
            key = OneTimeKey(secrets[i])
            for j in survivors:
                seed = key.decapsulate(isthmus_keys[j].public, ciphertexts[i, j], SALT, "pair")
                (minus if j < i else plus).append(seed)
        add_masks(total, plus, minus, threads=1)

    # Keys and shares that take Flower seconds to create are created once and reused:
    # reconstructing and expanding them takes the same time for any content.
    flower_keys = [FlowerKey() for _ in range(2)]
    seed_shares = create_shares(seeds[0], graph.threshold, clients)[: graph.threshold]
    key_shares = create_shares(flower_keys[0].private, graph.threshold, clients)[: graph.threshold]
    masked = [total.numpy().astype(np.int64) % (1 << RING_BITS)]

    def flower() -> None:
        shapes, vector = [array.shape for array in masked], masked
        for _ in survivors:
            secret = combine_shares(seed_shares)
            mask = pseudo_rand_gen(secret, 1 << RING_BITS, shapes)
            vector = parameters_subtraction(vector, mask)
        for i in dropped:
            secret = combine_shares(key_shares)
            for j in survivors:
                agreed = generate_shared_key(
                    bytes_to_private_key(secret), bytes_to_public_key(flower_keys[1].public)
                )
                mask = pseudo_rand_gen(agreed, 1 << RING_BITS, shapes)
                step = parameters_addition if i > j else parameters_subtraction
                vector = step(vector, mask)
        parameters_mod(vector, 1 << RING_BITS)

    a, b = cpu_seconds(isthmus, flower, repeats=repeats)
    what = f"server unmasks {_short(params)}, n={clients}, {lost} lost"
    return Comparison(what, f"server_unmask_speedup/{_short(params)}/{clients}", a, b)


def sharing(holders: int, threshold: int, repeats: int) -> Comparison:
    """Compare sharing and reconstructing a client's two secrets."""
    seed, key = os.urandom(32), OneTimeKey().secret_bytes()
    points = list(range(1, holders + 1))

    def isthmus() -> None:
        shares = [shamir.split([secret], points, threshold) for secret in (seed, key)]
        secrets = shamir.combine([points[:threshold]] * 2, [s[:threshold] for s in shares])
        assert secrets == [seed, key]

    flower_key = FlowerKey().private

    def flower() -> None:
        for secret in (seed, flower_key):
            shares = create_shares(secret, threshold, holders)
            assert combine_shares(shares[:threshold]) == secret

    (a,) = cpu_seconds(isthmus, repeats=max(5, repeats))
    (b,) = cpu_seconds(flower, repeats=1)
    return Comparison(f"Shamir, n={holders}, t={threshold}", f"shamir_speedup/{holders}", a, b)


def mask_and_add(params: int, masks: int, repeats: int) -> tuple[tuple[str, ...], float]:
    """Measure mask expansion and addition against only AES-CTR.

    Returns:
        A row of the table, and the ratio of the two speeds.
    """
    vector = torch.zeros(params, dtype=torch.int32)
    seeds = [os.urandom(32) for _ in range(masks)]
    blank, stream = bytes(AES_TILE), bytearray(AES_TILE)
    size = params * 4

    def aes_only() -> None:
        for seed in seeds:
            cipher = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
            for start in range(0, size, AES_TILE):
                cipher.update_into(memoryview(blank)[: min(AES_TILE, size - start)], stream)

    a, b = cpu_seconds(
        lambda: add_masks(vector, seeds, [], threads=1), aes_only, repeats=3 * repeats
    )
    speeds = [f"{size * masks / seconds / 1e9:.2f} GB/s" for seconds in (a, b)]
    return ("mask-and-add, compared with only AES-256-CTR", *speeds, f"{b / a:.2f}"), b / a


def noise_cost(params: int, repeats: int) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Measure the CPU time of noise for a cohort of 100 against that of masking.

    Returns:
        Rows of the table, and the ratios.
    """
    noise = DistributedNoise.fit(
        clip=1.0, multiplier=1.0, honest=80, clients=100, size=params, bits=RING_BITS
    )
    config = round_config(size=params, clients_max=100, clients_min=90, noise=noise)
    update, vector = torch.randn(params), torch.zeros(config.length, dtype=torch.int32)
    seeds = [os.urandom(32) for _ in range(51)]
    masks, share, whole = cpu_seconds(
        lambda: add_masks(vector, seeds[:26], seeds[26:], threads=1),
        lambda: add_noise(vector, noise.sigma(params)),
        lambda: encode(config, update, weight=1),
        repeats=3 * repeats,
    )
    rows, ratios = [], {}
    for what, name, seconds in (
        ("noise, compared with masks, k=50", "noise", share),
        ("clip, rotate, round and noise, compared with masks", "noisy_vector", whole),
    ):
        times = (_milliseconds(seconds), _milliseconds(masks), f"{seconds / masks:.2f}")
        rows.append((f"{what}, {_short(params)}", *times))
        ratios[f"{name}_cpu_over_masking/{_short(params)}"] = seconds / masks
    return rows, ratios


def _short(params: int) -> str:
    return f"{params // 1_000_000}M" if params >= 1_000_000 else f"{params // 1000}k"


@command_line.script
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = command_line.options(__doc__ or "", argv)
    sizes = command_line.of_size(options, full=Sizes(), quick=QUICK, smoke=SMOKE)
    params = sizes.params
    repeats = sizes.repeats
    torch.manual_seed(0)
    comparisons = [client_masking(params, degree, repeats) for degree in sizes.degrees]
    comparisons.append(quantising(params, repeats))
    comparisons += [server_unmasking(params, clients, times) for clients, times in sizes.unmasked]
    comparisons.append(sharing(*sizes.shared, repeats))
    speed, fraction = mask_and_add(4 * params, 10, repeats)

    noise_rows, noise_ratios = noise_cost(params, repeats)

    from tests.privacy import mutation

    report = mutation.check()
    results = {comparison.key: comparison.ratio for comparison in comparisons}
    results["mask_add_fraction_of_aes"] = fraction
    results |= noise_ratios
    results["refusals"] = report.refusals
    results["refusals_killed"] = report.killed

    rows = [*(comparison.cells for comparison in comparisons), speed, *noise_rows]
    print(figures.table(("CPU time of", "Isthmus", "Flower 1.41 / peer", "ratio"), rows))
    print(f"\n{report}")
    on = figures.machine("cryptography", "flwr", "numpy", "pycryptodome")
    figures.write(options.json, "secagg", on, results, TARGETS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
