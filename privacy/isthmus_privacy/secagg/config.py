"""What one attempt at one round is: everything a client agrees to by signing its hash.

>>> config = RoundConfig(
...     run_id="demo", round=3, attempt=0, model_hash=bytes(32), size=1000, clients_max=20
... )
>>> config.check()
>>> config.levels * config.clients_max < 2**config.bits
True
>>> ClientRequirements(clients_min=5).check(config)
Traceback (most recent call last):
    ...
isthmus.errors.PeerMisbehaved: clients_min=3 is below this device's own floor of 5
"""

from __future__ import annotations

import dataclasses
import functools
import math

from isthmus_privacy.crypto import refusal
from isthmus_privacy.crypto.canonical import (
    FLAG,
    MAX_CLIENTS,
    NUMBER,
    REAL,
    Message,
    blob,
    exactly,
    items,
    nested,
    tagged_hash,
    text,
)
from isthmus_privacy.secagg.graph import COMPLETE_UP_TO, Neighbourhood, neighbourhood

MAX_LEVELS = 1 << 28
"""Finest quantisation: well below float32's own step at the clipping bound."""

MAX_COUNT = 1 << 53
"""Largest weight or count: float64 still tells neighbours apart."""

MAX_SIZE = 1 << 40
MAX_SLOTS = 256
RING_BITS = (16, 32, 64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot(Message):
    """A figure that travels inside the masked vector, so that nobody sees one client's own."""

    TAG = "slot"
    FIELDS = {"name": text(64), "maximum": REAL, "exact": FLAG}

    name: str
    maximum: float
    """Largest absolute value; an average beyond it is clipped, a count beyond it refused."""
    exact: bool = False
    """A whole number of 0 .. maximum whose exact sum is wanted; else an average over the client's
    examples, of which the average over everybody's examples is wanted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundConfig(Message):
    """The agreement on one attempt at one round."""

    TAG = "round-config"
    FIELDS = {
        "run_id": text(128),
        "round": NUMBER,
        "attempt": NUMBER,
        "model_hash": exactly(32),
        "size": NUMBER,
        "slots": items(nested(Slot), MAX_SLOTS),
        "clients_max": NUMBER,
        "clients_min": NUMBER,
        "corrupt_permille": NUMBER,
        "dropout_permille": NUMBER,
        "complete_up_to": NUMBER,
        "bits": NUMBER,
        "levels": NUMBER,
        "clip": REAL,
        "weight_max": NUMBER,
        "noise": blob(4096),
    }

    run_id: str
    round: int
    attempt: int
    """Grows with every new attempt of a round, also after the server was restarted."""
    model_hash: bytes
    """SHA-256 of the model that everybody starts from: no client can be given its own."""
    size: int
    """N: elements of the update."""
    slots: tuple[Slot, ...] = ()
    clients_max: int
    """Most clients in the roster; the bit budget is for so many."""
    clients_min: int = 3
    """Fewest clients in a sum, whatever the margins below would allow."""
    corrupt_permille: int = 100
    """gamma, in thousandths: share of the clients that may collude with the server."""
    dropout_permille: int = 300
    """delta, in thousandths: share of the clients that may drop out."""
    complete_up_to: int = COMPLETE_UP_TO
    """Clients up to which everybody is everybody's neighbour."""
    bits: int = 32
    """The ring is Z/2^bits; it is also what one element costs on the wire."""
    levels: int = 0
    """Highest value of one client's quantised element; 0 takes the most that cannot wrap."""
    clip: float = 1.0
    """Elements of the update are clipped to [-clip, clip]."""
    weight_max: int = 1
    """Largest weight (number of examples) of one client; must be 1 with noise."""
    noise: bytes = b""
    """What distributed noise the clients add, in the mechanism's own words; empty is none."""

    def __post_init__(self) -> None:
        """Fill in `levels`."""
        if self.levels == 0 and self.clients_max > 0 and self.bits in RING_BITS:
            finest = min(MAX_LEVELS, ((1 << self.bits) - 1) // self.clients_max)
            object.__setattr__(self, "levels", finest)

    @functools.cached_property
    def hash(self) -> bytes:
        """What clients sign."""
        return tagged_hash("config-hash", self.to_bytes())

    @property
    def length(self) -> int:
        """Ring elements in a masked vector: the update, weight, clipped share, and the slots."""
        return self.size + 2 + len(self.slots)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a masked vector."""
        return self.length * self.bits // 8

    def neighbourhood(self, clients: int) -> Neighbourhood:
        """The graph's parameters for a roster of `clients`."""
        return neighbourhood(
            clients,
            corrupt_permille=self.corrupt_permille,
            dropout_permille=self.dropout_permille,
            fewest=self.clients_min,
            complete_up_to=self.complete_up_to,
        )

    def check(self) -> None:
        """Refuse a configuration that cannot be safe, on either side.

        Raises:
            PeerMisbehaved: it makes no sense, a sum could wrap, or two groups of clients could be
                led to agree to different survivors.
        """
        if (wrong := self._malformed()) is not None:
            refusal.refuse("config-malformed", f"{wrong} is not a possible configuration")
        if 2 * self.dropout_permille >= 1000 - self.corrupt_permille:
            refusal.refuse(
                "config-margins",
                f"dropout_permille={self.dropout_permille} is not below half of what "
                f"corrupt_permille={self.corrupt_permille} leaves, so two survivor sets could both "
                "find a quorum",
            )
        ring = 1 << self.bits
        if self.clients_max * self.levels >= ring:
            refusal.refuse(
                "config-values-wrap",
                f"clients_max={self.clients_max} x levels={self.levels} does not fit "
                f"{self.bits} bits",
            )
        largest = max([self.weight_max, *(s.maximum for s in self.slots if s.exact)])
        if self.clients_max * largest >= ring:
            refusal.refuse(
                "config-slots-wrap",
                f"clients_max={self.clients_max} x a weight or count of {largest:.0f} does not fit "
                f"{self.bits} bits",
            )
        if self.noise and self.weight_max != 1:
            refusal.refuse(
                "config-weighted-noise",
                f"weight_max={self.weight_max} with noise: the noise is scaled for a weight of 1",
            )

    def _malformed(self) -> str | None:
        """The first field that makes no sense, as `name=value`."""
        names = [slot.name for slot in self.slots]
        possible = {
            "bits": self.bits in RING_BITS,
            "size": self.size <= MAX_SIZE,
            "clients_min": 2 <= self.clients_min <= self.clients_max,
            "clients_max": self.clients_max <= MAX_CLIENTS,
            "complete_up_to": self.complete_up_to <= 4096,
            "levels": 2 <= self.levels <= MAX_LEVELS,
            "clip": math.isfinite(self.clip) and self.clip > 0,
            "weight_max": 1 <= self.weight_max <= MAX_COUNT,
            "corrupt_permille": self.corrupt_permille < 1000,
            "slots": names == sorted(set(names)) and all(_possible(slot) for slot in self.slots),
        }
        for name, holds in possible.items():
            if not holds:
                return f"{name}={getattr(self, name)!r}"
        return None


def _possible(slot: Slot) -> bool:
    if not (math.isfinite(slot.maximum) and slot.maximum > 0):
        return False
    return not slot.exact or (slot.maximum.is_integer() and slot.maximum <= MAX_COUNT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientRequirements:
    """What a device accepts, whatever the server proposes."""

    clients_min: int = 3
    """Never take part in a sum that could be of fewer clients."""
    corrupt_permille: int = 100
    """Never rely on fewer than so many (in thousandths) colluding with the server."""
    dropout_permille: int = 450
    """Never accept that more than so many (in thousandths) may be missing."""
    noise: bool = False
    """Never take part without distributed noise."""
    participations: int | None = None
    """Most rounds of one run that this device takes part in; None is no limit."""

    def check(self, config: RoundConfig) -> None:
        """Refuse a configuration below this device's floor.

        Raises:
            PeerMisbehaved: it is; the message says which field.
        """
        if config.clients_min < self.clients_min:
            refusal.refuse(
                "config-below-floor",
                f"clients_min={config.clients_min} is below this device's own floor of "
                f"{self.clients_min}",
            )
        if config.corrupt_permille < self.corrupt_permille:
            refusal.refuse(
                "config-too-trusting",
                f"corrupt_permille={config.corrupt_permille} is below this device's own floor of "
                f"{self.corrupt_permille}",
            )
        if config.dropout_permille > self.dropout_permille:
            refusal.refuse(
                "config-too-lossy",
                f"dropout_permille={config.dropout_permille} is above this device's own ceiling "
                f"of {self.dropout_permille}",
            )
        if self.noise and not config.noise:
            refusal.refuse("config-noise-missing", "this device takes part with noise only")
