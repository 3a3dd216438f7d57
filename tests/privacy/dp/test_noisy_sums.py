"""Sums with noise through the whole protocol: the mean of clipped updates, whoever drops out."""

import pytest
import torch
from tests.privacy.protocol import ProtocolRound

from isthmus_privacy.dp.distributed import DistributedNoise
from isthmus_privacy.secagg import RoundConfig, Stage, decode, encode

SIZE = 5000


def noise_for(clients, honest, *, multiplier=1.0, size=SIZE, bits=32):
    return DistributedNoise.fit(
        clip=1.0, multiplier=multiplier, honest=honest, clients=clients, size=size, bits=bits
    )


class NoisyRound(ProtocolRound):
    """Updates of which some are clipped; keeps the exact clipped ones."""

    def __init__(self, *args, **changes):
        super().__init__(*args, weight_max=1, **changes)
        self.clipped = {}

    def encoded(self, name):
        update = torch.randn(self.config.size, generator=torch.manual_seed(int(name[1:])))
        update *= (0.3 + int(name[1:]) % 3) / update.norm()
        self.clipped[name] = update / max(1.0, float(update.norm()))
        encoded = encode(self.config, update, weight=1)
        self.plain[name] = encoded.vector.clone()
        return encoded


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("dropouts", [{}, {"c00001": Stage.SHARE_KEYS, "c00004": Stage.UNMASKING}])
def test_the_decoded_mean_is_that_of_the_clipped_updates(bits, dropouts):
    round_ = NoisyRound(
        6, dropouts, size=SIZE, bits=bits, clients_min=4, noise=noise_for(6, 4, bits=bits)
    )
    total = round_.run()
    mean = decode(round_.config, total.vector, clients=len(total.clients))
    expected = sum(round_.clipped[name] for name in total.clients) / len(total.clients)
    error = (mean.vector - expected).double()
    assert mean.noise == pytest.approx(1.0 / 4**0.5 / len(total.clients) ** 0.5, rel=0.02)
    # 5,000 elements: the standard deviation of a standard deviation is 1 %; five of them.
    assert float(error.std()) == pytest.approx(mean.noise, rel=0.05)
    assert abs(float(error.mean())) < 5 * mean.noise / SIZE**0.5
    assert (mean.weight, mean.clients, mean.figures) == (len(total.clients),) * 2 + ({},)
    assert mean.clipped is None
    assert RoundConfig.from_bytes(round_.config.to_bytes()) == round_.config
