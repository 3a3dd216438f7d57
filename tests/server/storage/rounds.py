"""Write rounds into a store, and list what it has."""

import torch
from tests.server.storage.records import planned_attempt, round_record

from isthmus_server.storage.records import CommittedState, Receipt


def receipts_of(devices):
    return [
        Receipt(participant=f"phone-{number}", regime="federated", status="accepted", bytes_in=9)
        for number in range(devices)
    ]


def plan_round(store, round_, attempt=1):
    store.plan(planned_attempt(round_, attempt))


def commit_round(
    store, round_, attempt=1, price=1.0, model=None, optimizer=None, devices=0, **state
):
    plan_round(store, round_, attempt)
    model = model or store.checkpoints.write_model(round_, bytes([round_]) * 8)
    optimizer = optimizer or store.checkpoints.write_tensors(round_, {"0.momentum": torch.ones(2)})
    record = round_record(round_, receipts_of(devices), price, attempt=attempt)
    store.commit(record, CommittedState(models={"current": model}, optimizer=optimizer, **state))


def attempts_of(store, kind):
    """Round and attempt of all that were committed, have failed or were cut short."""
    if kind is None:
        unfinished = [one.planned for one in store.logged_attempts() if one.record is None]
        return [(planned.round, planned.attempt) for planned in unfinished]
    return [(one.round, one.attempt) for one in store.attempts() if isinstance(one, kind)]


def checkpoint_files(store):
    return sorted(path.name for path in (store.directory / "checkpoints").iterdir())
