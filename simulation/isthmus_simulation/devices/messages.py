"""What a simulation and a process that trains its devices say to each other, as JSON.

Models and updates are not in these messages. Forks share the memory of devices, and ranks get a
model after the request `model`, and send the updates of a piece after their answer.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Sequence
from typing import Literal

from isthmus.task import Participant

Kind = Literal["open", "model", "train", "measure", "forget", "end"]
"""What a request is: `open` a run, receive a `model`, `train` a piece, `measure` both ways,
`forget` the schedules of the learning rate, or `end`, for ranks, once the simulation has ended.
Only `model` and `end` have no answer."""


@dataclasses.dataclass(frozen=True)
class PieceRequest:
    """What a process is asked to do, for some devices of a batch."""

    kind: Kind
    work: bytes = b""
    """An encoded `TrainLocal`, or `OpenRun`."""
    participants: Sequence[Participant] = ()
    received: int = 0
    """Bytes of what each device has received: a model, and with some jobs a gradient."""
    room: int = 0
    """Bytes in front of that in a device's memory, see `TaskHost.buffer`."""
    is_stacked: bool = False
    blocks: Sequence[int] = ()
    """For a fork, the memory of each device, see `SharedBlocks`."""

    def encode(self) -> bytes:
        """The request as JSON."""
        table = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        table["work"] = base64.b64encode(self.work).decode()
        table["participants"] = [(each.name, each.shard) for each in self.participants]
        return json.dumps(table).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> PieceRequest:
        """The request of its JSON."""
        table = json.loads(encoded)
        table["work"] = base64.b64decode(table["work"])
        table["participants"] = [
            Participant(name=name, regime="federated", shard=shard and tuple(shard))
            for name, shard in table["participants"]
        ]
        return cls(**table)


@dataclasses.dataclass(frozen=True)
class DeviceResult:
    """Figures and size of the update of one device, or its error."""

    trained: bytes
    """An encoded `Trained`."""
    size: int
    """Bytes of the update, 0 with an error."""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds that a piece took in both ways of training."""

    stacked: float
    """Infinite if stacked models cannot train it, for `reason`."""
    single: float
    reason: str = ""
    is_random: bool = False
    """Whether the model or the loss draws random numbers."""


@dataclasses.dataclass(frozen=True)
class PieceAnswer:
    """What a process answers to a request."""

    error: str = ""
    """A sentence, if the task's code failed."""
    results: Sequence[DeviceResult] = ()
    measured: Measured | None = None

    def encode(self) -> bytes:
        """The answer as JSON."""
        table = dataclasses.asdict(self)
        for result in table["results"]:
            result["trained"] = base64.b64encode(result["trained"]).decode()
        return json.dumps(table).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> PieceAnswer:
        """The answer of its JSON."""
        table = json.loads(encoded)
        results = [
            DeviceResult(base64.b64decode(each["trained"]), each["size"], each["error"])
            for each in table["results"]
        ]
        measured = table["measured"] and Measured(**table["measured"])
        return cls(table["error"], results, measured)
