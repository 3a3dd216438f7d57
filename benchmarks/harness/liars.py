"""Many simulated devices of which some lie, with what they have learned at the end.

The run is `isthmus simulate`, with its real coordinator, encoding and sums; a liar changes the
update that its training has given before the device encodes it. Labels are flipped in its data.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from isthmus.job import parse_job
from isthmus.transport.blobs import Buffer
from isthmus.transport.worker import ReportProgress
from isthmus.wire import link_pb2
from isthmus_clients.device.task_host import TrainingResult
from isthmus_server.read.report.report import read_report
from isthmus_server.read.report.suspected_devices import suspected_devices
from isthmus_server.storage.records import RoundRecord
from isthmus_server.storage.store import Store
from isthmus_simulation.devices.device import VirtualHost
from isthmus_simulation.run import Simulation
from isthmus_simulation.virtual_time import VirtualTimeLoop

ATTACKS = ("sign", "scale", "label", "little")
"""Updates times -1, times -50, flipped labels, and "a little is enough" (Baruch et al. 2019)."""
SCALE = -50.0
DEVIATIONS = 1.5
"""z of "a little is enough", as in its experiments: the mean of the honest updates minus so many
standard deviations of each element."""
DEVICES_STEPS = (6, 16)
"""Steps of a device, and examples of each."""
BASE = f"""
name = "robust"
[task]
source = "harness.liars_task:ManyDevices"
[strategy]
policy = "federated"
[simulation]
processes = 1
[federated]
local_steps = {DEVICES_STEPS[0]}
batch_size = {DEVICES_STEPS[1]}
"""


@dataclasses.dataclass(frozen=True)
class Learned:
    """What a run has learned."""

    accuracy: float
    """Accuracy of the last model, in percent."""
    seconds: float
    rounds: Sequence[RoundRecord]

    @property
    def smallest_sum(self) -> int:
        """Fewest devices in a group that was opened; 0 without groups."""
        sizes = [group.devices for record in self.rounds for group in record.groups.values()]
        return min(sizes, default=0)

    @property
    def suspected(self) -> list[str]:
        """Devices that the report names."""
        return [found.device for found in suspected_devices(self.rounds)]


class _Statistics:
    """Sums over the honest updates of a round, and the mean and deviation of the one before."""

    def __init__(self) -> None:
        self.round = 0
        self.updates: list[torch.Tensor] = []
        self.crafted: torch.Tensor | None = None

    def add(self, round_: int, update: torch.Tensor) -> None:
        self.begin(round_)
        self.updates.append(update.clone())

    def begin(self, round_: int) -> None:
        if round_ == self.round:
            return
        if self.updates:
            both = torch.stack(self.updates)
            self.crafted = both.mean(0) - DEVIATIONS * both.std(0)
        self.updates = []
        self.round = round_


def liars_of(devices: int, share: float) -> list[int]:
    """The numbers of the devices that lie, spread over the data's parts by their order."""
    count = round(share * devices)
    order = torch.randperm(devices, generator=torch.Generator().manual_seed(7))
    return sorted(order[:count].tolist())


def run_with_liars(
    folder: Path,
    name: str,
    *,
    devices: int,
    rounds: int,
    attack: str,
    share: float,
    overrides: Sequence[str],
    seed: int = 0,
) -> Learned:
    """Simulate a job on a data set; `attack` of `ATTACKS`, or empty for none."""
    liars = liars_of(devices, share) if attack else []
    job = parse_job(
        BASE,
        [
            f"rounds={rounds}",
            f"seed={seed}",
            f"evaluation.every={rounds}",
            f'task.settings={{set="{name}", data="{folder}", devices={devices}, seed={seed}, '
            f"flipped={liars if attack == 'label' else []}}}",
            f"simulation.clients={devices}",
            f"federated.cohort={devices}",
            *overrides,
        ],
    )
    with tempfile.TemporaryDirectory(prefix="robust-") as place:
        run = Path(place) / "run"
        begun = time.perf_counter()
        with _lying(attack, frozenset(liars)), asyncio.Runner(loop_factory=VirtualTimeLoop) as each:
            each.run(Simulation.new(job, Path(__file__).parent, run).run())
        seconds = time.perf_counter() - begun
        with contextlib.closing(Store.open(run)) as store:
            records = read_report(store).rounds
    return Learned(100 * records[-1].metrics["accuracy"], seconds, records)


@contextlib.contextmanager
def _lying(attack: str, liars: frozenset[int]) -> Iterator[None]:
    """Let the devices of these numbers lie."""
    train = VirtualHost.train
    statistics = _Statistics()

    def trains(
        self: VirtualHost,
        request_id: str,
        work: link_pb2.TrainLocal,
        payload: Buffer,
        progress: ReportProgress,
    ) -> TrainingResult:
        trained, result = train(self, request_id, work, payload, progress)
        run = self.run
        shard = self._participant.shard
        assert run is not None
        assert shard is not None
        update = run.layout.decode(result)
        if shard[0] not in liars:
            if attack == "little":
                statistics.add(work.round, update)
            return trained, result
        changed = update.clone()
        if attack == "sign":
            changed.neg_()
        elif attack == "scale":
            changed.mul_(SCALE)
        elif attack == "little":
            statistics.begin(work.round)
            if statistics.crafted is not None:
                changed.copy_(statistics.crafted)
        memoryview(result).cast("B")[:] = memoryview(run.layout.encode(changed)).cast("B")
        return trained, result

    VirtualHost.train = trains  # type: ignore[method-assign]  # until the run ends
    try:
        yield
    finally:
        VirtualHost.train = train  # type: ignore[method-assign]  # its own again
