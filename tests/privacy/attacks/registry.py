"""Register attacks under the refusal that must stop them."""

import dataclasses

from tests.privacy.protocol import ProtocolRound

ATTACKS = {}
"""Refusal code to the attacks that it must stop."""

ALICE, BOB = "c00001", "c00003"


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
