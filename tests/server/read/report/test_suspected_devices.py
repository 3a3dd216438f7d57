"""Devices whose random groups are left out round after round are named."""

import dataclasses
import random

import pytest
from tests.server.storage.records import round_record

from isthmus_server.read.report.left_out_groups import left_out_sums
from isthmus_server.read.report.notes import devices_to_look_at
from isthmus_server.read.report.report import told_incidents
from isthmus_server.read.report.suspected_devices import suspected_devices, suspicions
from isthmus_server.storage.records import Receipt
from isthmus_server.strategy.gradients import GroupSum

DEVICES = [f"phone-{number:03}" for number in range(120)]
GROUPS = 10


def rounds(count, liars, seed=0, left_out=lambda members, liars: bool(members & liars)):
    """Records of rounds in which the group of each liar is left out."""
    draw = random.Random(seed)
    records = []
    for number in range(1, count + 1):
        order = draw.sample(DEVICES, len(DEVICES))
        members = {f"random-{at + 1}-of-{GROUPS}": set(order[at::GROUPS]) for at in range(GROUPS)}
        groups = {
            name: GroupSum(
                devices=len(each),
                examples=len(each),
                loss=1.0,
                norm=1.0,
                left_out=left_out(each, set(liars)),
            )
            for name, each in members.items()
        }
        receipts = [
            Receipt(participant=device, regime="federated", status="accepted", group=name)
            for name, each in members.items()
            for device in sorted(each)
        ]
        records.append(round_record(number, groups=groups, receipts=receipts))
    return records


def test_liars_are_named_and_nobody_else():
    liars = DEVICES[:6]
    found = suspected_devices(rounds(40, liars))
    assert [each.device for each in found] == liars
    assert all(each.left_out == each.rounds == 40 for each in found)
    sentences = suspicions(rounds(40, liars))
    assert all("left out in 40 of 40 rounds" in sentence for sentence in sentences)
    job = {"federated": {"robust": None}}
    assert devices_to_look_at(job, rounds(40, liars)) == sentences


def test_a_group_that_was_left_out_is_told_as_one_and_accuses_no_device():
    (record,) = rounds(1, DEVICES[:1])
    (bad,) = [name for name, group in record.groups.items() if group.left_out]
    why = f"the sum of its group {bad} was left out: its mean is long"
    receipts = [
        dataclasses.replace(each, reason=why if each.group == bad else "")
        for each in record.receipts
    ]
    late = Receipt(participant="late", regime="federated", status="dropped", reason="it was slow")
    record = dataclasses.replace(record, receipts=[*receipts, late])
    assert told_incidents(record) == [
        (f"group {bad} (12 devices)", "its sum was left out: its mean is long"),
        ("late dropped", "it was slow"),
    ]
    assert len(left_out_sums(record)[1]) == len(DEVICES) - 12 + 1


def test_a_device_that_lies_later_is_named_too():
    later = rounds(100, []) + rounds(40, DEVICES[:1], seed=1)
    assert [each.device for each in suspected_devices(later)] == DEVICES[:1]


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_named_where_groups_are_left_out_by_chance(seed):
    draw = random.Random(seed)
    records = rounds(200, [], seed=seed, left_out=lambda members, liars: draw.random() < 0.3)
    assert suspected_devices(records) == []


def test_one_long_group_names_nobody():
    assert suspicions(rounds(3, DEVICES[:6])) == []


def test_one_that_others_lie_about_is_named_and_not_called_a_liar():
    """They lie only where it is; by the groups that are left out it is the one that lies."""
    framed = DEVICES[0]
    colluding = set(DEVICES[1:25])
    records = rounds(
        60, [], left_out=lambda members, liars: framed in members and bool(members & colluding)
    )
    (sentence,) = suspicions(records)
    assert sentence.startswith(framed)
    assert "or others do where it is; ask its owner before you" in sentence
