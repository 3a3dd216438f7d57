"""A cohort so large that its graph is not complete."""

import functools
import hashlib

import torch
from tests.privacy.attacks.registry import ALICE
from tests.privacy.protocol import (
    directory,
    make_client,
    make_config,
    names,
    resign,
    signed_keys,
)

from isthmus_privacy.crypto.canonical import PositionSet
from isthmus_privacy.secagg.config import ClientRequirements
from isthmus_privacy.secagg.encoding import encode
from isthmus_privacy.secagg.messages import SEALED_BYTES, Inbox, MaskedInput, Roster, ShareKeys
from isthmus_privacy.secagg.server import ServerSession


def config_of(count):
    return make_config(clients_max=count, corrupt_permille=50, dropout_permille=100, size=2)


@functools.cache
def entries_of(count):
    """Keys of as many clients, by name: made once, as no cohort changes them."""
    config = config_of(count)
    return {name: signed_keys(config, name) for name in names(count)}


class LargeCohort:
    """One real client; of the others there are only signed messages."""

    def __init__(self, count=150):
        self.config = config_of(count)
        self.names = names(count)
        self.client = make_client(
            self.config,
            ALICE,
            requirements=ClientRequirements(honest_min=2, corrupt_permille=50),
            directory=directory(),
        )
        entries = {**entries_of(count), ALICE: self.client.advertise_keys()}
        self.roster = Roster(tuple(entries[name] for name in self.names))
        self.roster_hash = self.roster.hash(self.config.hash)
        self.graph = self.config.graph(count)
        assert not self.graph.complete
        self.dropouts = self.graph.clients - self.graph.survivors_min
        assert self.graph.degree - self.dropouts < self.graph.threshold
        assert 3 * self.graph.degree < self.graph.survivors_min - 1

    def inbox(self, missing=frozenset(), senders=()):
        present = frozenset(range(len(self.names))) - missing
        return Inbox(
            self.roster_hash,
            PositionSet(len(self.names), present),
            tuple((sender, bytes(SEALED_BYTES)) for sender in senders),
        )

    def encoded(self):
        return encode(self.config, torch.zeros(2), weight=1)


def server_with_keys(cohort):
    """A server that has received the keys of all clients of the cohort."""
    server = ServerSession(cohort.config, directory())
    for keys in cohort.roster.entries:
        server.receive_keys(keys)
    server.finish_advertise_keys()
    return server


def signed_shares(cohort, position, neighbours):
    message = ShareKeys(
        cohort.names[position],
        cohort.roster_hash,
        PositionSet(len(cohort.names), frozenset(neighbours)),
        bytes(32),
        (bytes(100),) * len(neighbours),
        bytes(64),
    )
    return resign(message, message.name)


def ring_neighbours(cohort, position):
    return [(position + 1 + i) % len(cohort.names) for i in range(cohort.graph.degree)]


def signed_masked_input(cohort, position, partners, payload):
    message = MaskedInput(
        cohort.names[position],
        cohort.roster_hash,
        PositionSet(len(cohort.names), frozenset(partners)),
        len(payload),
        hashlib.sha256(payload).digest(),
        bytes(64),
    )
    return resign(message, message.name)
