"""One device of a simulated run that lies, and what it has moved.

The run is `isthmus simulate` with its real coordinator and policies; its devices are enrolled as if
they were on machines of their own, so that a tenth of a cohort may lie. What a device adds to a
secure sum in the ring is as good added to the sum: the liar knows what all others have sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from isthmus.errors import IsthmusError
from isthmus.job import parse_job
from isthmus.transport.blobs import Buffer
from isthmus.wire import link_pb2
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.encoding import Aggregate, decode
from isthmus_privacy.secagg.ranges import SIZE, Ranges
from isthmus_privacy.secagg.server import RingSum
from isthmus_server.regimes.base import AttemptSpec, FederatedResult
from isthmus_server.regimes.federated import FederatedRegime
from isthmus_server.regimes.secure_sums import unmasked
from isthmus_server.regimes.secure_sums.unmasked import UnmaskedAttempt
from isthmus_server.transport.inprocess import SimulatedEnrolments
from isthmus_simulation.devices.device import VirtualDevice
from isthmus_simulation.run import Simulation
from isthmus_simulation.virtual_time import VirtualTimeLoop

LIAR = "client-0"

ChangeSum = Callable[[RoundConfig, RingSum], None]
"""Adds to a sum of so many devices in place, which is that of honest ones."""
ChangeUpdate = Callable[[torch.Tensor], int]
"""Changes a single update (N) in place; returns the weight that the liar claims."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lie:
    """What the liar does in each attempt."""

    ranges: ChangeSum | None = None
    """Change of the sum of ranges."""
    update: ChangeSum | None = None
    """Change of the sum of updates."""
    single: ChangeUpdate | None = None
    """Change of its update in a round without secure sums."""
    declares: int | None = None
    """Examples that it declares when it opens the run; None for its own."""


@dataclasses.dataclass
class Moved:
    """What a lie has done to a round that was committed."""

    mean: torch.Tensor
    """(N) of the committed round, without the noise that a server adds."""
    honest: torch.Tensor
    """(N) what it would be if the device had not lied."""
    bound: float
    """Bound of one update: of its elements, or in a private round of its norm."""


class Recorder:
    """What has been committed of a run with a liar."""

    def __init__(self, lie: Lie) -> None:
        self.lie = lie
        self.committed: list[Moved] = []
        self.refused: list[str] = []
        """Why attempts failed."""
        self.honest: Aggregate | None = None
        """The last sum of updates, without the lie."""
        self.lied: Aggregate | None = None
        """Sum `honest` with the lie, and the same noise; None if it is refused."""
        self.config: RoundConfig | None = None
        self.honest_ranges: Ranges | None = None
        self.singles: dict[str, tuple[int, torch.Tensor]] = {}
        """Weight and honest update of each device, in a round without secure sums."""

    def lie_in(self, config: RoundConfig, total: RingSum) -> None:
        """Add the lie to a sum of honest devices."""
        devices = len(total.clients)
        if config.whole and config.size == SIZE:
            ring = decode(config, total.vector, total.ring.figures, clients=devices)
            self.honest_ranges = Ranges.of(ring.vector.clone(), ring.weight)
            if self.lie.ranges is not None:
                self.lie.ranges(config, total)
            return
        self.config = config
        self.honest = decode(config, total.vector, total.ring.figures, clients=devices)
        if self.lie.update is not None:
            self.lie.update(config, total)
        self.lied = None
        with contextlib.suppress(IsthmusError):  # it is about to be refused
            self.lied = decode(config, total.vector, total.ring.figures, clients=devices)

    def take(self, result: FederatedResult, spec: AttemptSpec) -> None:
        """Take note of an attempt that was not refused."""
        if not spec.settings.secure_aggregation:
            total = sum(weight for weight, _ in self.singles.values())
            parts = [weight / total * update for weight, update in self.singles.values()]
            honest = torch.stack(parts).sum(0)
            norm = float(spec.settings.aggregation_settings["norm"])
            self.committed.append(Moved(result.pseudo_gradient.clone(), honest, norm))
            return
        config = self.config
        honest = self.honest
        lied = self.lied
        assert config is not None
        assert honest is not None
        assert lied is not None
        bound = config.clip if config.noise is None else config.noise.clip
        if config.codec is not None:
            # A device sends its update times its weight over the largest one.
            bound *= config.weight_max * honest.clients / honest.weight
        if self.honest_ranges is not None:
            # Not what the liar has made of it.
            bound = min(bound, self.honest_ranges.encoding(clients=config.clients_max).clip)
        self.committed.append(Moved(lied.vector, honest.vector, bound))


def run_with_liar(job: str, overrides: Sequence[str], lie: Lie, folder: Path) -> Recorder:
    """Simulate a job of the small task with one liar; a failed run ends silently."""
    recorder = Recorder(lie)
    parsed = parse_job(job, overrides)
    with _lying(recorder), asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        simulation = Simulation.new(parsed, Path(__file__).parent, folder)
        with contextlib.suppress(IsthmusError):
            runner.run(simulation.run())
    return recorder


@contextlib.contextmanager
def _lying(recorder: Recorder) -> Iterator[None]:
    """Let the liar lie, and record what is committed."""
    train = FederatedRegime.train
    work = VirtualDevice.work

    class LyingSum(UnmaskedAttempt):
        async def _sum(self, *args: Any) -> RingSum:
            total = await super()._sum(*args)
            if LIAR in total.clients:
                recorder.lie_in(self.config, total)
            return total

    async def trained(self: FederatedRegime, spec: AttemptSpec) -> FederatedResult:
        try:
            result = await train(self, spec)
        except IsthmusError as error:
            recorder.refused.append(str(error))
            raise
        recorder.take(result, spec)
        return result

    async def works(
        self: VirtualDevice, request: link_pb2.Request, *args: Any
    ) -> tuple[link_pb2.Reply, Buffer | None]:
        reply, payload = await work(self, request, *args)
        name = self.participant.name
        if name == LIAR and reply.HasField("opened") and recorder.lie.declares is not None:
            reply.opened.examples = recorder.lie.declares
        if reply.HasField("trained") and payload is not None and not _is_secure(request):
            run = self._host.run
            assert run is not None
            vector = run.layout.decode(payload)
            recorder.singles[name] = reply.trained.examples, vector.clone()
            if name == LIAR and recorder.lie.single is not None:
                lied = vector.clone()
                reply.trained.examples = recorder.lie.single(lied)
                payload = bytearray(run.layout.encode(lied))
                reply.trained.result.CopyFrom(
                    link_pb2.Blob(sha256=os.urandom(32), size=len(payload))
                )
        return reply, payload

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (unmasked, "UnmaskedAttempt", LyingSum),
            (FederatedRegime, "train", trained),
            (VirtualDevice, "work", works),
            (SimulatedEnrolments, "certified", True),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _is_secure(request: link_pb2.Request) -> bool:
    work = request.train_local
    return bool(work.secure or work.ranges or request.HasField("agree"))
