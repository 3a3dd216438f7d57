"""A cohort large enough that nobody neighbours everybody."""

import hashlib

import torch
from parties import (
    directory,
    make_client,
    make_config,
    names,
    paper_advert,
    resign,
)

from attacks.registry import ALICE
from isthmus_privacy.crypto.canonical import Members
from isthmus_privacy.secagg import (
    ClientRequirements,
    Inbox,
    MaskedInput,
    Roster,
    ServerSession,
    ShareKeys,
    encode,
)


class Crowd:
    """One real client among many on paper, on the graph that clients draw."""

    def __init__(self, count=150):
        self.config = make_config(
            clients_max=count, corrupt_permille=50, dropout_permille=100, size=2
        )
        self.names = names(count)
        self.client = make_client(
            self.config,
            ALICE,
            policy=ClientRequirements(corrupt_permille=50),
            directory=directory(),
        )
        adverts = {name: paper_advert(self.config, name) for name in self.names}
        adverts[ALICE] = self.client.advertise()
        self.roster = Roster(tuple(adverts[name] for name in self.names))
        self.hood = self.config.neighbourhood(count)
        assert not self.hood.complete
        self.gone = self.hood.clients - self.hood.fewest
        assert self.hood.degree - self.gone < self.hood.threshold
        assert 3 * self.hood.degree < self.hood.fewest - 1

    def inbox(self, missing=frozenset(), senders=()):
        present = frozenset(range(len(self.names))) - missing
        return Inbox(
            self.roster.hash(self.config.hash),
            Members(len(self.names), present),
            tuple((sender, bytes(100)) for sender in senders),
        )

    def encoded(self):
        return encode(self.config, torch.zeros(2), weight=1)


def crowded_server(crowd):
    """A server before which everybody in the crowd has dealt; Alice to the first neighbours."""
    server = ServerSession(crowd.config, directory())
    for advert in crowd.roster.adverts:
        server.take_advert(advert)
    server.roster()
    return server


def paper_shares(crowd, position, neighbours):
    message = ShareKeys(
        crowd.names[position],
        crowd.roster.hash(crowd.config.hash),
        Members(len(crowd.names), frozenset(neighbours)),
        bytes(32),
        (bytes(100),) * len(neighbours),
        bytes(64),
    )
    return resign(message, message.name)


def ring_neighbours(crowd, position):
    return [(position + 1 + i) % len(crowd.names) for i in range(crowd.hood.degree)]


def masked_on_paper(crowd, position, partners, payload):
    message = MaskedInput(
        crowd.names[position],
        crowd.roster.hash(crowd.config.hash),
        Members(len(crowd.names), frozenset(partners)),
        len(payload),
        hashlib.sha256(payload).digest(),
        bytes(64),
    )
    return resign(message, message.name)
