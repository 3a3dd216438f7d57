"""Compressed updates of real devices: over rounds, all that was trained arrives."""

import pytest
import torch
from tests.privacy.protocol import make_config
from tests.server.regimes.secure_run import LAYOUT, NAMES, SecureRun

from isthmus_clients.device.residuals import Residuals
from isthmus_privacy.secagg.ranges import USUAL_WEIGHT
from isthmus_server.regimes.base import AttemptFailed
from isthmus_server.regimes.committed_sums import CommittedSums
from isthmus_server.regimes.secure_sums.round_configs import UNITS_PER_BIT, _compressed

ONE_IN = 4


@pytest.fixture(params=["", ",one_in_of={bias=1}"])
async def run(request, network, make_job, write_task, tmp_path):
    write_task()
    await network.listen()
    job = make_job(
        "federated.cohort=5",
        "federated.quorum=4",
        "federated.secure_aggregation=true",
        f"federated.compression={{bits=3, one_in={ONE_IN}{request.param}}}",
        "time.round_seconds=6000",
        "time.lease_seconds=2000",
    )
    run = SecureRun(network, job, tmp_path)
    await run.open()
    for name, device in run.devices.items():
        device.agent._secure._residuals_directory = tmp_path / name
    return run


class Sums(CommittedSums):
    """What a server would know of the committed sums."""

    def __init__(self):
        super().__init__()
        self.committed = (0, 0)

    def last(self, name):
        return self.committed

    def commit(self, about, result):
        self.magnitude, self.committed = result.training["magnitude"], about


def record_updates(run):
    """The last update that each device has trained, by name."""
    made = {}

    def recording(name, train):
        def train_and_record(*args):
            trained, update = train(*args)
            made[name] = LAYOUT.decode(update).double()
            return trained, update

        return train_and_record

    for name, device in run.devices.items():
        device.agent.host.train = recording(name, device.agent.host.train)
    return made


async def test_what_is_not_sent_in_a_round_is_sent_in_later_ones(run, tmp_path):
    """Nothing is lost by a failed attempt either, nor by a device that starts again."""
    sums, arrived, trained = Sums(), torch.zeros(LAYOUT.size), torch.zeros(LAYOUT.size)
    made = record_updates(run)
    always = 3 if run.job.federated.compression.one_in_of else 0
    most_sent = always + -(-(LAYOUT.size - always) // ONE_IN)
    for round_ in range(1, 7):
        attempt = 1
        if round_ == 3:
            for name in NAMES[:2]:  # all have stored what this attempt would leave
                run.devices[name].fails_at = "survivors"
            with pytest.raises(AttemptFailed):
                await run.train(attempt=1, round_=round_, sums=sums)
            for device in run.devices.values():
                device.fails_at = None
                device.agent._secure._residuals = None  # as after a kill
            attempt = 2
        result = await run.train(attempt=attempt, round_=round_, sums=sums)
        assert int((result.pseudo_gradient != 0).sum()) <= most_sent
        sums.commit((round_, attempt), result)
        arrived += result.pseudo_gradient
        trained += torch.stack([made[name] for name in NAMES]).mean(0).float()
    left = torch.zeros(LAYOUT.size)
    for name in NAMES:
        left += Residuals(tmp_path / name).open("run", name, sums.committed, LAYOUT.size).vector
    share = 20 / USUAL_WEIGHT
    torch.testing.assert_close(arrived + left / len(NAMES) / share, trained, rtol=0, atol=1e-4)
    assert float(arrived.norm()) > 0.3 * float(trained.norm())


@pytest.mark.parametrize("magnitude", [-1e4, -137.1, 64.0, 1e4])
def test_a_magnitude_that_no_device_has_does_not_end_the_run(make_job, magnitude):
    """Of few examples it is mostly rounding, by which one device can move it."""
    job = make_job("federated.compression={}", "federated.secure_aggregation=true")
    config = _compressed(make_config(size=LAYOUT.size), job, LAYOUT, magnitude)
    config.check()
    assert config.clip == UNITS_PER_BIT * 4 * 2.0 ** (60 if magnitude > 0 else -60)
