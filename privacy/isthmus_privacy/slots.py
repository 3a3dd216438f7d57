"""Figures that are sent inside a masked vector, and which of them each kind of vector has."""

from __future__ import annotations

import dataclasses
import math

from isthmus_privacy.crypto.canonical import FLAG, REAL, Message, text

MAX_COUNT = 1 << 53
"""Largest weight or count: float64 represents all integers up to it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot(Message):
    """A figure that is sent inside the masked vector, so that only its sum is revealed."""

    TAG = "slot"
    FIELDS = {"name": text(64), "maximum": REAL, "exact": FLAG}

    name: str
    maximum: float
    """Largest absolute value; a larger average is clipped, a larger count refused."""
    exact: bool = False
    """True: an integer of 0 .. maximum, summed exactly. False: an average over the client's
    examples, aggregated to the average over the examples of all clients."""

    @property
    def is_valid(self) -> bool:
        """Whether its values can be encoded."""
        if not (math.isfinite(self.maximum) and self.maximum > 0):
            return False
        return not self.exact or (self.maximum.is_integer() and self.maximum <= MAX_COUNT)


UNUSABLE = Slot(name="unusable", maximum=1.0, exact=True)
"""1 from a client that has no usable vector, which sends zeros of weight 0: their sum is the only
thing that the server learns about failures."""

LOSS = Slot(name="loss", maximum=1000.0)
"""Mean loss of a client's training."""

OVER_RANGE = Slot(name="over_range", maximum=1.0, exact=True)
"""1 from a client whose loss is beyond the largest value of its slot, as which it then counts."""

OVER_WEIGHT = Slot(name="over_weight", maximum=1.0, exact=True)
"""1 from a client with more examples than the largest weight of the sum, as which it then counts;
0 where the job itself sets that weight."""

OTHER_WEIGHT = Slot(name="other_weight", maximum=1.0, exact=True)
"""1 from a client whose owner gives another weight than the number of examples; 0 where the job
itself asks for that kind of weights."""

TRAINING_SLOTS = (LOSS, OTHER_WEIGHT, OVER_RANGE, OVER_WEIGHT, UNUSABLE)
"""Figures of a client that has trained."""

GRADIENT_LOST = Slot(name="gradient_lost", maximum=1.0)
"""Part of the 2-norm of a client's gradient that was lost when its elements were clipped."""

MEASURING_SLOTS = (GRADIENT_LOST, *TRAINING_SLOTS)
"""Figures of a client that has trained, and sends its gradient with the update."""

WITHIN_CLIP = Slot(name="within_clip", maximum=1.0, exact=True)
"""1 from a client whose update is not longer than the round's clipping bound."""

PRIVATE_SLOTS: tuple[Slot, ...] = ()
"""Figures of a client in a job with differential privacy: none, as their sums would be exact. A
client without a usable vector is in the sum as zeros that count as any other vector."""

CLIPPING_SLOTS = (WITHIN_CLIP,)
"""Figures of a client in such a job, for a server that moves the bound, and adds noise to their
sum before anybody sees it."""

SCORING_SLOTS = (UNUSABLE,)
"""Figures of a client that has scored models."""

MAGNITUDE = Slot(name="magnitude", maximum=64.0)
"""Binary logarithm of the root mean square of what a client with a codec sends, before it is
rounded."""

COMPRESSED_SLOTS = (LOSS, MAGNITUDE, OTHER_WEIGHT, OVER_RANGE, OVER_WEIGHT, UNUSABLE)
"""Figures of a client that has trained, in a job with `[federated.compression]`."""
