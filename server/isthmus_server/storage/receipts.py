"""What became of each participant in a round, and why; and of the round."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from isthmus_server.strategy.policy import Plan

Status = Literal["accepted", "rejected", "dropped"]

UNREACHABLE = "the quorum could not be reached any more"
"""Why everybody else was stopped when too many had failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt:
    """One participant in one attempt at a round."""

    participant: str
    regime: Literal["datacenter", "federated"]
    status: Status
    """`accepted`: in the model. `rejected`: it answered, and the answer was not used. `dropped`:
    it did not answer, or not in time."""
    reason: str = ""
    """Empty for an accepted one without incident."""
    started: bool = True
    """It was here when it was asked, and had its model in time; else it costs nothing."""
    sent: bool = False
    """It sent a result."""
    examples: int = 0
    """Weight of its update."""
    steps: int = 0
    """Optimizer steps it made."""
    seconds: float = 0.0
    """Its own time for the work."""
    loss: float | None = None
    """Its mean loss while it trained, where its update is plain: what selection by utility sees."""
    staleness: int = 0
    """How many rounds before this one it was asked, with federated.mode = "buffered"."""
    bytes_in: int = 0
    """Bytes it sent as contents."""
    bytes_out: int = 0
    """Bytes it was sent as contents."""

    def to_json(self) -> dict[str, Any]:
        """For the log and the report."""
        return dataclasses.asdict(self)


def reasons(receipts: Iterable[Receipt]) -> str:
    """What went wrong, of three at most; who was only stopped because of others comes last."""
    last = {f"{r.participant}: {r.reason}": r.reason == UNREACHABLE for r in receipts if r.reason}
    return "; ".join(sorted(last, key=lambda said: (last[said], said))[:3])


def count(receipts: Iterable[Receipt]) -> dict[str, int]:
    """How many were invited, started, sent, accepted, rejected and dropped."""
    listed = list(receipts)
    return {
        "invited": len(listed),
        "started": sum(receipt.started for receipt in listed),
        "sent": sum(receipt.sent for receipt in listed),
        **{
            status: sum(receipt.status == status for receipt in listed)
            for status in ("accepted", "rejected", "dropped")
        },
    }


def attempt_row(
    plan: Plan, round_: int, attempt: int, receipts: Sequence[Receipt], started: float, now: float
) -> dict[str, Any]:
    """What the log and the report say of one attempt; both times are the clock's."""
    return {
        "round": round_,
        "attempt": attempt,
        "regime": plan.regime,
        "reason": plan.reason,
        "started_at": started,
        "seconds": now - started,
        "participants": count(receipts),
        "receipts": [receipt.to_json() for receipt in receipts],
        "metrics": {},
        "cost": {
            "price": 0.0,
            "bytes_up": sum(receipt.bytes_in for receipt in receipts),
            "bytes_down": sum(receipt.bytes_out for receipt in receipts),
            "device_bytes": sum(
                r.bytes_in + r.bytes_out for r in receipts if r.regime == "federated"
            ),
            "device_seconds": sum(r.seconds for r in receipts if r.regime == "federated"),
            "datacenter_seconds": sum(r.seconds for r in receipts if r.regime == "datacenter"),
        },
        "epsilon": None,
        "model_sha256": None,
    }
