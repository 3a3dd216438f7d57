"""Records of attempts, rounds and comparisons for tests; every field has a default."""

from tests.server.strategy.observations import observe

from isthmus_server.model.summed_evaluation import SummedEvaluation
from isthmus_server.storage.records import (
    ComparisonRecord,
    Cost,
    FailedAttempt,
    FinalModel,
    Participants,
    PlannedAttempt,
    RoundRecord,
)
from isthmus_server.strategy import Plan
from isthmus_server.strategy.decision import Decision

PLAN = Plan("federated", "x")
FINAL = FinalModel(metrics={"x": 1.0}, model_sha256="00", model_path="model.safetensors", round=1)


def planned_attempt(round_, attempt=1, plan=PLAN, observation=None, **decision):
    """An attempt that is about to begin; `decision` are further fields of its decision."""
    observation = observe(round_) if observation is None else observation
    return PlannedAttempt(
        round=round_,
        attempt=attempt,
        decision=Decision(answer=plan, observation=observation, **decision),
        invited=["a"],
        datacenters=[],
    )


def _attempt(round_, receipts, price, changes):
    return {
        "round": round_,
        "attempt": 1,
        "regime": "federated",
        "reason": "x",
        "started_at": 0.0,
        "seconds": 4.0,
        "elapsed": 4.0 * round_,
        "participants": Participants.of(receipts),
        "receipts": receipts,
        "cost": Cost.of(receipts, price),
        **changes,
    }


def round_record(round_, receipts=(), price=1.0, **changes):
    """A committed round."""
    return RoundRecord(**_attempt(round_, receipts, price, changes))


def failed_attempt(round_, receipts=(), price=1.0, **changes):
    """An attempt that failed."""
    changes = {"error": "too few answered", **changes}
    return FailedAttempt(**_attempt(round_, receipts, price, changes))


def failed_evaluation(error):
    """An evaluation on devices without a result."""
    return SummedEvaluation(
        asked=3, devices=0, sums={}, metrics={}, error=error, price=0.0, device_bytes=0, seconds=1.0
    )


def comparison_record(models, result=None, **changes):
    """An attempt at a comparison; one without a result failed."""
    fields = {
        "number": 1,
        "attempt": 1,
        "round": 1,
        "ended": result is not None,
        "reason": "to know",
        "models": models,
        "result": result,
        "error": None if result else "too few answered",
        "price": result.price if result else 0.0,
        "device_bytes": 0,
        "seconds": 1.0,
        "receipts": [],
        "policy_state": {},
    }
    return ComparisonRecord(**{**fields, **changes})
