"""Devices learn which of their updates counted from the committed rounds alone."""

from tests.server.storage.records import failed_attempt, round_record

from isthmus.wire import link_pb2
from isthmus_server.regimes.committed_sums import MAGNITUDE_STEP, CommittedSums
from isthmus_server.storage.records import Receipt

COMPRESSED = {"federated": {"magnitude": -5.0}}


def receipts(**statuses):
    return [
        Receipt(participant=name, regime="federated", status=status)
        for name, status in statuses.items()
    ]


def test_the_last_committed_sum_of_each_device_is_told_to_it():
    both = receipts(a="accepted", b="accepted")
    sums = CommittedSums(
        [
            round_record(1, receipts=both, training=COMPRESSED),
            failed_attempt(2, receipts=both),
            round_record(2, receipts=receipts(a="accepted", b="dropped"), training=COMPRESSED),
            round_record(3, receipts=both, training={"federated": {"loss": 1.0}}),
        ]
    )
    assert sums.magnitude == -5.0
    assert [sums.last(name) for name in "abc"] == [(2, 1), (1, 1), (0, 0)]
    request = link_pb2.Request(train_local=link_pb2.TrainLocal(round=4))
    sums.tell("b", request)
    assert (request.train_local.summed_round, request.train_local.summed_attempt) == (1, 1)


def compressed(number, magnitude, **figures):
    training = {"federated": {"magnitude": magnitude, **figures}}
    return round_record(number, receipts=receipts(a="accepted"), training=training)


def test_the_magnitude_follows_in_steps():
    """One device can move it by any amount, in one round as well as in the next."""
    sums = CommittedSums([compressed(1, -9.0)])
    sums.add(compressed(2, 60.0))
    assert sums.magnitude_for(1000) == -9.0 + MAGNITUDE_STEP
    sums.add(compressed(3, -60.0))  # as if nothing had been sent, by which nothing follows
    assert sums.magnitude_for(1000) == -9.0 + MAGNITUDE_STEP
    sums.add(compressed(4, -50.0))
    sums.add(compressed(5, -9.5))
    assert sums.magnitude_for(1000) == -9.5


def test_steps_of_the_magnitude_do_not_depend_on_the_largest_weight():
    """Devices divide by it, so that a magnitude of one sum is another one in the next."""
    sums = CommittedSums([compressed(1, -9.0, weight_max=1000.0)])
    sums.add(compressed(2, -19.0, weight_max=1024_000.0))
    assert sums.magnitude_for(1024_000) == -19.0
    sums.add(compressed(3, 60.0, weight_max=1000.0))
    assert sums.magnitude_for(1000) == -9.0 + MAGNITUDE_STEP


def test_the_first_magnitude_is_not_that_of_a_sum_in_which_nothing_was_sent():
    sums = CommittedSums([compressed(1, -60.0)])
    assert sums.magnitude_for(1000) is None


def test_all_updates_of_devices_count_where_control_variates_follow_from_them():
    dc = Receipt(participant="dc", regime="datacenter", status="accepted")
    sums = CommittedSums(
        [
            round_record(1, attempt=2, receipts=receipts(a="accepted", b="accepted")),
            round_record(2, regime="hybrid", receipts=[*receipts(a="accepted", b="dropped"), dc]),
            failed_attempt(3, receipts=receipts(b="accepted")),
        ],
        of_all_updates=True,
    )
    assert [sums.last(name) for name in ("a", "b", "dc")] == [(2, 1), (1, 2), (0, 0)]
    assert [sums.participants_with(names) for names in ("", "ab", "cd")] == [2, 2, 4]


def test_rounds_of_several_datacenters_are_told_to_them():
    dc, east = (
        Receipt(participant=name, regime="datacenter", status="accepted") for name in ("dc", "east")
    )
    sums = CommittedSums(
        [
            round_record(1, attempt=2, regime="datacenter", receipts=[dc, east]),
            round_record(2, regime="datacenter", receipts=[dc]),
        ]
    )
    requests = [link_pb2.TrainSteps(round=3, compressed=compressed) for compressed in (True, False)]
    told = []
    for work in requests:
        request = link_pb2.Request(train_steps=work)
        sums.tell("dc", request)
        told.append((request.train_steps.summed_round, request.train_steps.summed_attempt))
    assert told == [(1, 2), (0, 0)]
