"""A server that asks some devices for other things before a sum: they give what they else would.

Whether a device gives its vector or zeros follows from the model, the signed job, its data and what
is bound of its state, and not from what it was asked before. Otherwise a server could choose whose
vector a sum is, or subtract two sums of the same devices.
"""

import pytest
import torch
from safetensors.torch import save_file
from tests.privacy.mutation import disabled
from tests.server.regimes.lying_server import OTHERS, VICTIM, LyingServer
from tests.server.regimes.secure_run import LAYOUT, OwnedRun
from tests.server.regimes.test_lying_about_vectors import Attempts

from isthmus.job import load_job
from isthmus.task import load_task
from isthmus.tensors.fingerprint import fingerprint
from isthmus.transport.requests import fingerprint_messages
from isthmus.wire import link_pb2
from isthmus_clients.training.local_run import DeviceRun
from isthmus_server.regimes.base import AttemptFailed

FROZEN_BASE = """
def model(self):
    class Head(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.base = nn.Linear(4, 4, bias=False).requires_grad_(False)

        def forward(self, x):
            return super().forward(self.base(x.to(self.base.weight.dtype)).float())

    return Head()
"""
SECURE = (
    "task.source=learn/task.py:Learn",
    "federated.cohort=5",
    "federated.quorum=4",
    "federated.secure_aggregation=true",
    "federated.clip=4.0",
)
FROZEN = (
    *SECURE,
    "federated.max_examples=20",
    "federated.frozen_dtype=bfloat16",
    "federated.frozen_tolerance=0",
    "model.start=base.safetensors",
    "model.fresh=['weight','bias']",
)


BASE = torch.randn(4, 4, generator=torch.Generator().manual_seed(4))


class FrozenRun(OwnedRun):
    """Devices that hold a base in bfloat16."""

    def opening(self, job):
        opening = super().opening(job)
        task = load_task(job.task.source, job.task.settings, base=self.directory)
        model = task.model()
        model.base.weight.data.copy_(BASE)
        found = link_pb2.OpenRun(frozen=fingerprint_messages(fingerprint(model)))
        opening.MergeFrom(found)
        return opening


@pytest.fixture
async def frozen(network, write_task, tmp_path):
    write_task(FROZEN_BASE)
    await network.listen()
    run = FrozenRun(network, None, tmp_path)
    save_file({"base.weight": BASE}, run.directory / "base.safetensors")
    file = run.directory / "job.toml"
    file.write_text('name = "table"')
    run.job = load_job(file, FROZEN)
    await run.open()
    return LyingServer(run)


def updates_of_victim(server, patch):
    """The victim's updates in the order in which it trains: what the server is not to learn."""
    host = server.run.devices[VICTIM].agent.host
    train = host.train
    updates = []

    def noted(*args):
        trained, update = train(*args)
        updates.append(LAYOUT.decode(bytearray(update)).clone())
        return trained, update

    patch.setattr(host, "train", noted)
    return updates


def gives_by_history(patch):
    """Devices fail by a difference of the loss, where they have not passed with another model."""
    measure = DeviceRun._measure_form

    def measure_form(run, *args):
        withheld = run._withheld
        run._withheld = False
        try:
            return measure(run, *args)
        finally:
            run._withheld = withheld

    patch.setattr(DeviceRun, "_measure_form", measure_form)


@pytest.mark.parametrize("mended", [True, False])
async def test_a_server_does_not_choose_which_devices_fail_by_a_base_in_bfloat16(
    frozen, monkeypatch, mended
):
    """All are asked for a model of zeros, where no base differs; then one opens the run anew."""
    if not mended:
        gives_by_history(monkeypatch)
    updates = updates_of_victim(frozen, monkeypatch)
    attempts = Attempts(frozen)
    await attempts.sum(round_=1, model=0.0)
    whole = await attempts.sum(round_=2, model=1.0)
    await frozen.open(VICTIM, frozen.run.job)
    again = await attempts.sum(round_=3, model=1.0)
    if mended:
        assert whole.training["unusable"] == again.training["unusable"] == 0
        assert whole.pseudo_gradient.equal(again.pseudo_gradient)
        return
    difference = 5 * whole.pseudo_gradient.double() - 4 * again.pseudo_gradient.double()
    torch.testing.assert_close(difference, updates[1].double(), rtol=0, atol=1e-5)


DRAWN = """
def local_data(self, participant):
    import random
    data = rows(20, seed=sum(participant.name.encode()))
    return torch.utils.data.Subset(data, random.sample(range(20), 10))
"""


async def test_a_server_does_not_have_the_data_of_one_device_drawn_anew(
    network, make_job, write_task, tmp_path
):
    """A task may split its data without a seed, and any device can be asked to open a run again."""
    write_task(DRAWN)
    await network.listen()
    run = OwnedRun(network, make_job(*SECURE, "federated.max_examples=20"), tmp_path)
    await run.open()
    server = LyingServer(run)
    attempts = Attempts(server)
    whole = await attempts.sum(round_=1, model=1.0)
    await server.open(VICTIM, run.job)
    again = await attempts.sum(round_=2, model=1.0)
    assert whole.pseudo_gradient.equal(again.pseudo_gradient)


PROTECTED = (
    *SECURE,
    "federated.privacy.epsilon=50",
    "federated.privacy.delta=1e-3",
    "federated.privacy.participations=1",
    "federated.local_steps=3",
    "federated.batch_size=5",
)


@pytest.mark.parametrize("mended", [True, False])
async def test_a_server_does_not_choose_which_devices_have_spent_their_budget(
    network, make_job, write_task, tmp_path, monkeypatch, mended
):
    """All but one are asked first; in the sum of all these would give zeros."""
    write_task()
    await network.listen()
    run = OwnedRun(network, make_job(*PROTECTED), tmp_path)
    await run.open()
    server = LyingServer(run)
    updates = updates_of_victim(server, monkeypatch)
    attempts = Attempts(server)
    await attempts.sum(round_=1, model=0.5, cohort=OTHERS)
    if mended:
        with pytest.raises(AttemptFailed) as failed:
            await attempts.sum(round_=2, model=1.0)
        receipts = failed.value.receipts
        assert "accepted" not in {receipt.status for receipt in receipts}
        assert any("exceed the 1 participations" in receipt.reason for receipt in receipts)
        return
    with disabled("examples-asked-too-often"):
        whole = await attempts.sum(round_=2, model=1.0)
    (own,) = updates
    torch.testing.assert_close(5 * whole.pseudo_gradient.float(), own, rtol=0, atol=1e-5)
