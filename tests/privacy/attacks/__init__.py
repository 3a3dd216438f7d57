"""For each refusal of the protocol, attacks or mistakes that it must stop.

Every function here does what a dishonest party would do and must end in the refusal it is
registered for. `mutation.py` disables each refusal and expects these functions to detect it.
"""

from tests.privacy.attacks import (
    advertised_keys,
    differencing,
    dishonest_clients,
    false_rosters,
    false_survivors,
    forged_messages,
    invalid_updates,
    next_sums,
    other_purposes,
    unsafe_configurations,
)
from tests.privacy.attacks.registry import ATTACKS

__all__ = [
    "ATTACKS",
    "advertised_keys",
    "differencing",
    "dishonest_clients",
    "false_rosters",
    "false_survivors",
    "forged_messages",
    "invalid_updates",
    "next_sums",
    "other_purposes",
    "unsafe_configurations",
]
