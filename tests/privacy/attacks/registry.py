"""Which attack must meet which refusal."""

import dataclasses

from parties import Parties

ATTACKS = {}
"""Refusal to the attacks that must meet it."""

ALICE, BOB = "c00001", "c00003"


def meets(code):
    def register(attack):
        ATTACKS.setdefault(code, []).append(attack)
        return attack

    return register


def until(stage, **changes):
    return Parties(6, **changes).until(stage)


def without(members, *gone):
    return dataclasses.replace(members, indices=members.indices - set(gone))
