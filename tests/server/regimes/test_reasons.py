"""Reasons of failed participants, in one sentence."""

from isthmus_server.regimes.reasons import UNREACHABLE, summarize_failures
from isthmus_server.storage.records import Receipt


def test_participants_stopped_because_of_others_are_named_last():
    stopped = dict.fromkeys("abc", UNREACHABLE)
    receipts = [
        Receipt(participant=name, regime="federated", status="dropped", reason=reason)
        for name, reason in {**stopped, "d": "its disk is full", "e": ""}.items()
    ]
    assert (
        summarize_failures(receipts) == f"d: its disk is full; a: {UNREACHABLE}; b: {UNREACHABLE}"
    )
