"""The summary of a list of receipts in one line."""

from isthmus_server.storage.records import UNREACHABLE, Receipt, summarize_failures


def test_participants_stopped_because_of_others_are_named_last():
    stopped = dict.fromkeys("abc", UNREACHABLE)
    found = [
        Receipt(participant=name, regime="federated", status="dropped", reason=reason)
        for name, reason in {**stopped, "d": "its disk is full", "e": ""}.items()
    ]
    assert summarize_failures(found) == f"d: its disk is full; a: {UNREACHABLE}; b: {UNREACHABLE}"
