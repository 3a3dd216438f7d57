"""Charges for tests of ledgers."""

from isthmus_privacy.dp.accounting import ZeroConcentrated
from isthmus_privacy.dp.ledger import Charge


def charge(devices=("a", "b"), rho=0.1, **changes):
    values = {
        "population": "devices",
        "unit": "device",
        "adjacency": "zero-out",
        "mechanism": "distributed",
        "event": ZeroConcentrated(rho),
        "run": "run",
        "round": 1,
        "attempt": 1,
        "what": "round",
        "devices": tuple(devices),
    }
    return Charge(**{**values, **changes})
