"""All parties of a round in one process, each step in the tests' hands."""

import dataclasses
import functools
import hashlib

import torch

from isthmus_privacy.crypto.keys import OneTimeKey
from isthmus_privacy.secagg import (
    AdvertiseKeys,
    Authority,
    ClientSession,
    Directory,
    History,
    RoundConfig,
    ServerSession,
    ServerStage,
    SigningKey,
    encode,
)

AUTHORITY = Authority()
FAR = 2**40
MODEL = hashlib.sha256(b"model").digest()


@functools.cache
def identity(name):
    return SigningKey()


@functools.cache
def enrolment(name):
    return AUTHORITY.enrol(name, identity(name).public, not_after=FAR)


@functools.cache
def directory():
    """One for all: it remembers enrolments it has verified."""
    return Directory(AUTHORITY.public)


def names(count):
    return [f"c{i:05d}" for i in range(count)]


def make_config(**changes):
    usual = {
        "run_id": "run",
        "round": 3,
        "attempt": 0,
        "model_hash": MODEL,
        "size": 4,
        "clients_max": 6,
        "weight_max": 10,
        "dropout_permille": 400,
    }
    return RoundConfig(**{**usual, **changes})


def make_client(config, name, **changes):
    usual = {
        "identity": identity(name),
        "enrolment": enrolment(name),
        "directory": directory(),
        "history": History(),
        "model_hash": config.model_hash,
    }
    return ClientSession(config, **{**usual, **changes})


def resign(message, name, *fields):
    """The same message under a valid signature of `name`: what a lying client can send."""
    fields = message.signed_fields(*fields)
    return dataclasses.replace(message, signature=identity(name).sign(message.TAG, *fields))


def paper_advert(config, name, **changes):
    """Properly signed keys of nobody: a cheap entry of a large roster, or a lying client's."""
    keys = {"sealing_key": OneTimeKey().public, "mask_key": OneTimeKey().public}
    draft = AdvertiseKeys(enrolment(name), **{**keys, **changes}, signature=bytes(64))
    return resign(draft, name, config.hash)


class Parties:
    """A server and its clients; `lost` says before which of its messages a client vanishes."""

    def __init__(self, count=6, lost=None, clients=None, **changes):
        self.config = make_config(**{"clients_max": count, **changes})
        self.lost = lost or {}
        self.server = ServerSession(self.config, directory())
        self.clients = {name: make_client(self.config, name) for name in names(count)}
        self.clients.update(clients or {})
        self.roster = self.inboxes = self.survivors = self.consistency_signatures = None
        self.plain = {}
        """Each client's ring vector before masking."""
        self.released = {}
        self.masked = {}

    def left(self, stage):
        """Clients that still send their message of that stage."""
        return [name for name in self.clients if self.lost.get(name, ServerStage.FINISHED) > stage]

    def advertise(self):
        for name in self.left(ServerStage.ADVERTS):
            self.server.take_advert(self.clients[name].advertise())
        self.roster = self.server.roster()
        return self

    def deal(self):
        for name in self.left(ServerStage.SHARES):
            self.server.take_shares(self.clients[name].deal(self.roster))
        self.inboxes = self.server.inboxes()
        return self

    def encoded(self, name):
        """A vector that depends on the name, and is never the same twice."""
        update = torch.empty(self.config.size).uniform_(-1, 1)
        encoded = encode(self.config, update, weight=self.weight(name))
        self.plain[name] = encoded.vector.clone()
        return encoded

    def weight(self, name):
        return 1 + int(name[1:]) % self.config.weight_max

    def mask(self):
        for name in self.left(ServerStage.MASKED):
            message, payload = self.clients[name].mask(self.inboxes[name], self.encoded(name))
            self.masked[name] = message, bytes(payload)
            self.server.take_masked(message, payload)
        self.survivors = self.server.survivors()
        return self

    def sign_survivors(self):
        for name in self.left(ServerStage.CONSENTS):
            self.server.take_consistency_signature(
                self.clients[name].sign_survivors(self.survivors)
            )
        self.consistency_signatures = self.server.consistency_signatures()
        return self

    def release(self):
        for name in self.left(ServerStage.RELEASES):
            self.released[name] = self.clients[name].release(self.consistency_signatures)
            self.server.take_unmasking_shares(self.released[name])
        return self

    def until(self, stage):
        """Run the stages before `stage`."""
        steps = [self.advertise, self.deal, self.mask, self.sign_survivors, self.release]
        for step in steps[:stage]:
            step()
        return self

    def run(self):
        """A whole round: the sum, after checking it against the plain one, bit for bit."""
        total = self.until(ServerStage.FINISHED).server.unmask()
        expected = torch.zeros_like(total.vector)
        for name in self.left(ServerStage.MASKED):
            expected += self.plain[name]
        assert torch.equal(total.vector, expected)
        assert list(total.clients) == self.left(ServerStage.MASKED)
        return total
