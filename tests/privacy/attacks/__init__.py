"""For each refusal of the protocol, an attack or a mistake that runs into it.

Every function here does what a liar would do and must end in the refusal it is registered under.
`mutation.py` takes each refusal away and expects exactly these functions to notice.
"""

from attacks import (
    by_its_own_hand,
    by_the_configuration,
    by_the_roster,
    by_the_survivors,
    on_the_server,
    on_the_wire,
)
from attacks.registry import ATTACKS

__all__ = [
    "ATTACKS",
    "by_its_own_hand",
    "by_the_configuration",
    "by_the_roster",
    "by_the_survivors",
    "on_the_server",
    "on_the_wire",
]
