"""Run directories with many rounds, written as a coordinator writes them."""

import random

from tests.server.storage.records import failed_attempt, planned_attempt, round_record

from isthmus_server.storage.events import ParticipantDeclined, ParticipantReady
from isthmus_server.storage.records import CommittedState, Receipt
from isthmus_server.storage.store import Store
from isthmus_server.strategy import Plan


def receipts_of(round_, count, draw):
    """Receipts of devices: accepted ones, and a rejected, a dropped and a late one now and then."""
    receipts = []
    for number in range(count):
        name, kind = f"phone-{number}", draw.random()
        common = {"participant": name, "regime": "federated", "seconds": 1 + kind}
        if kind < 0.03:
            receipts.append(Receipt(**common, status="dropped", late=True, reason="too late"))
        elif kind < 0.06:
            receipts.append(Receipt(**common, status="dropped", reason="it lost its power"))
        elif kind < 0.08:
            receipts.append(Receipt(**common, status="rejected", reason="its update is not finite"))
        else:
            moved = {"bytes_in": 41000, "bytes_out": 82000, "sent": True, "loss": kind}
            receipts.append(Receipt(**common, status="accepted", examples=64, **moved))
    return receipts


def regime_of(round_, rounds):
    share = round_ / rounds
    return "datacenter" if share <= 0.3 else "hybrid" if share <= 0.55 else "federated"


REASONS = {
    "datacenter": "the datacenter improves the model faster for its price",
    "hybrid": "both sides still improve the model",
    "federated": "the datacenter's data say nothing new any more",
}


def add_round(store, round_, *, rounds, devices=4, draw=None, attempt=1):
    draw = draw or random.Random(round_)
    regime = regime_of(round_, rounds)
    plan = Plan(regime, REASONS[regime])
    store.plan(planned_attempt(round_, attempt, plan=plan))
    accuracy = 0.96 - 0.8 * 0.9 ** (60 * round_ / rounds)
    receipts = [] if regime == "datacenter" else receipts_of(round_, devices, draw)
    profile = {}
    if regime != "federated":
        profile["dc-0"] = {
            "units_per_second": 41000 + 900 * draw.random(),
            "peak_memory_gib": 31.5,
            "mfu": 0.41 + 0.02 * draw.random(),
        }
    record = round_record(
        round_,
        receipts,
        attempt=attempt,
        price={"datacenter": 4.0, "hybrid": 5.0, "federated": 1.0}[regime],
        regime=regime,
        reason=REASONS[regime],
        metrics={"accuracy": accuracy + 0.01 * draw.random(), "loss": 2.2 * (1.02 - accuracy)},
        profile=profile,
        epsilon=None if store.job.privacy is None else 6.5 * (round_ / rounds) ** 0.5,
        seconds=2.0 + draw.random(),
    )
    store.commit(record, CommittedState())


def filled_run(directory, job, base, rounds, *, devices=4):
    """A store with committed rounds, of which the third was tried twice."""
    store = Store.create(directory, job, base)
    draw = random.Random(7)
    for number in range(4):
        store.log_event(ParticipantReady(participant=f"phone-{number}", examples=64))
    store.log_event(ParticipantDeclined(participant="phone-9", reason="its owner allows no tasks"))
    for round_ in range(1, rounds + 1):
        if round_ == 3:
            store.plan(planned_attempt(3))
            store.fail(failed_attempt(3, error="too few devices answered"))
        attempt = 2 if round_ == 3 else 1
        add_round(store, round_, rounds=job.rounds, devices=devices, draw=draw, attempt=attempt)
    return store
