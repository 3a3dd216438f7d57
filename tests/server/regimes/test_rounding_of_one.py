"""The noise of a private sum covers what rounding adds to one update."""

import torch

from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.encoding import decode, encode
from isthmus_server.regimes.base import FederatedResult
from isthmus_server.regimes.federated import _rounding_of_one

SIZE = 200_000


def test_a_rounded_update_is_longer_than_its_bound_by_at_most_what_the_noise_covers():
    config = RoundConfig(
        run_id="run",
        round=1,
        attempt=1,
        model_hash=bytes(32),
        purpose=bytes(32),
        size=SIZE,
        clients_max=1 << 22,  # few levels
        weight_max=1,
        clip=1.0,
    )
    update = torch.full((SIZE,), 0.999 / SIZE**0.5)
    encoded = encode(config, update, weight=1, dither_key=bytes(32))
    aggregate = decode(config, encoded.vector, clients=1)
    result = FederatedResult(
        pseudo_gradient=aggregate.vector,
        training={"examples": aggregate.weight},
        receipts=[],
        rounding=aggregate.rounding,
    )
    norm = float(aggregate.vector.double().norm())
    assert 1.02 < norm < 1.0 + _rounding_of_one(result) < 2.0
