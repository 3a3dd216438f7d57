"""Register attacks under the refusal that must stop them."""

import dataclasses
import itertools

from tests.privacy.protocol import ProtocolRound, enrolment, names

from isthmus_privacy.secagg.lottery import ticket

ATTACKS = {}
"""Refusal code to the attacks that it must stop."""

ALICE, BOB = "c00001", "c00003"
DRAW = 1_800_000_000


def expect_refusal(code):
    def register(attack):
        ATTACKS.setdefault(code, []).append(attack)
        return attack

    return register


def round_until(stage, **changes):
    """A round of six clients, run up to but not including a stage."""
    return ProtocolRound(6, **changes).until(stage)


def without_members(members, *removed):
    return dataclasses.replace(members, indices=members.indices - set(removed))


def clients_below(share, count):
    """Names of clients whose tickets in the usual draw are below a share, sorted."""
    tickets = ((name, ticket(enrolment(name).lottery, DRAW)) for name in names(1000))
    return list(itertools.islice((name for name, drawn in tickets if drawn < share), count))


def client_above(share):
    """Name of a client whose ticket in the usual draw is not below a share."""
    return next(n for n in names(1000) if ticket(enrolment(n).lottery, DRAW) >= share)
