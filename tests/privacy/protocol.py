"""Run all parties of a protocol round in one process, step by step."""

import dataclasses
import functools
import hashlib

import torch

from isthmus_privacy.crypto.keys import OneTimeKey, SigningKey
from isthmus_privacy.secagg.client import ClientSession
from isthmus_privacy.secagg.config import (
    ClientRequirements,
    RoundConfig,
    SetUpBefore,
    SetUpForTwo,
)
from isthmus_privacy.secagg.encoding import encode
from isthmus_privacy.secagg.history import History
from isthmus_privacy.secagg.identity import Authority, Directory
from isthmus_privacy.secagg.messages import AdvertiseKeys, Stage
from isthmus_privacy.secagg.server import ServerSession

AUTHORITY = Authority()
FAR_FUTURE = 2**40
MODEL_HASH = hashlib.sha256(b"model").digest()


@functools.cache
def identity(name):
    return SigningKey()


@functools.cache
def enrolment(name):
    return AUTHORITY.enrol(name, identity(name).public, not_after=FAR_FUTURE)


@functools.cache
def directory():
    """One directory for all parties: it caches verified enrolments."""
    return Directory(AUTHORITY.public)


def names(count):
    return [f"c{i:05d}" for i in range(count)]


def make_config(**changes):
    defaults = {
        "run_id": "run",
        "round": 3,
        "attempt": 0,
        "model_hash": MODEL_HASH,
        "purpose": bytes(32),
        "size": 4,
        "clients_max": 6,
        "weight_max": 10,
        "corrupt_permille": 0,  # one of six would leave room for one dropout only
        "dropout_permille": 400,
    }
    return RoundConfig(**{**defaults, **changes})


def make_client(config, name, **changes):
    defaults = {
        "identity": identity(name),
        "enrolment": enrolment(name),
        "directory": directory(),
        "history": History(),
        "model_hash": config.model_hash,
        "purpose": config.purpose,
        "requirements": ClientRequirements(honest_min=0, corrupt_permille=0),
    }
    return ClientSession(config, **{**defaults, **changes})


def resign(message, name, *fields):
    """The same message with a valid signature of `name`: what a dishonest client can send."""
    fields = message.signed_fields(*fields)
    return dataclasses.replace(message, signature=identity(name).sign(message.TAG, *fields))


def signed_keys(config, name, **changes):
    """Validly signed keys without a client: an entry of a large roster, or a dishonest client's."""
    keys = {"sealing_key": OneTimeKey().public, "mask_key": OneTimeKey().public}
    draft = AdvertiseKeys(enrolment(name), **{**keys, **changes}, signature=bytes(64))
    return resign(draft, name, config.hash)


class ProtocolRound:
    """A server and its clients; `dropouts` maps a client to the stage before which it drops out."""

    def __init__(self, count=6, dropouts=None, clients=None, **changes):
        self.config = make_config(**{"clients_max": count, **changes})
        self.dropouts = dropouts or {}
        self.server = ServerSession(self.config, directory())
        self.clients = {name: make_client(self.config, name) for name in names(count)}
        self.clients.update(clients or {})
        self.roster = self.inboxes = self.survivors = self.consistency_signatures = None
        self.quorum = None
        """Of the signatures, those that clients are sent."""
        self.plain = {}
        """Each client's ring vector before masking."""
        self.masked = {}
        self.revealed = {}
        self.first = None
        """The round whose set-up this one has."""

    def active(self, stage, clients=None):
        """Clients that still send their message of a stage."""
        return [
            name
            for name in clients or self.clients
            if self.dropouts.get(name, Stage.FINISHED) > stage
        ]

    def advertise_keys(self):
        for name in self.active(Stage.ADVERTISE_KEYS):
            self.server.receive_keys(self.clients[name].advertise_keys())
        self.roster = self.server.finish_advertise_keys()
        return self

    def share_keys(self):
        for name in self.active(Stage.SHARE_KEYS):
            self.server.receive_shares(self.clients[name].share_keys(self.roster))
        self.inboxes = {name: self.server.inbox(name) for name in self.server.finish_share_keys()}
        return self

    def encoded(self, name):
        """A random vector of a client; its weight depends on the name."""
        update = torch.empty(self.config.size).uniform_(-1, 1)
        encoded = encode(self.config, update, weight=self.weight(name))
        self.plain[name] = encoded.vector.clone()
        return encoded

    def weight(self, name):
        return 1 + int(name[1:]) % self.config.weight_max

    def mask(self, name, encoded=None):
        """Have one client mask its vector: the message and the payload."""
        encoded = self.encoded(name) if encoded is None else encoded
        return self.clients[name].mask_input(self.inboxes[name], encoded)

    def mask_inputs(self):
        for name in self.active(Stage.MASKED_INPUT):
            message, payload = self.mask(name)
            self.masked[name] = message, bytes(payload)
            self.server.receive_masked_input(message, payload)
        self.survivors = self.server.finish_masked_input()
        return self

    def check_consistency(self):
        for name in self.active(Stage.CONSISTENCY_CHECK):
            signature = self.clients[name].sign_survivors(self.survivors)
            self.server.receive_consistency_signature(signature)
        self.consistency_signatures = self.server.finish_consistency_check()
        self.quorum = self.server.quorum_signatures()
        return self

    def reveal(self, name):
        """Have one client reveal its unmasking shares."""
        return self.clients[name].reveal_unmasking_shares(self.quorum)

    def reveal_shares(self):
        for name in self.active(Stage.UNMASKING):
            self.revealed[name] = self.reveal(name)
            self.server.receive_unmasking_shares(self.revealed[name])
        return self

    def until(self, stage):
        """Run the stages before `stage`."""
        steps = [
            self.advertise_keys,
            self.share_keys,
            self.mask_inputs,
            self.check_consistency,
            self.reveal_shares,
        ]
        for step in steps[:stage]:
            step()
        return self

    def run(self):
        """A whole round: the sum, after comparing it with the plain sum bit for bit."""
        total = self.until(Stage.FINISHED).server.unmask()
        expected = torch.zeros_like(total.vector)
        for name in self.active(Stage.MASKED_INPUT):
            expected += self.plain[name]
        assert torch.equal(total.vector, expected)
        assert list(total.clients) == self.active(Stage.MASKED_INPUT)
        return total


class NextRound(ProtocolRound):
    """The next sum of a round that was set up for two, and has ended."""

    def __init__(self, first, dropouts=None, histories=None, **changes):
        self.first = first
        self.histories = histories or {}
        self.dropouts = first.dropouts | (dropouts or {})
        cohort = {name: getattr(first.config, name) for name in _COHORT}
        own = {"run_id": "next", "model_hash": hashlib.sha256(b"next").digest(), "size": 5}
        set_up = SetUpBefore(first.config.hash)
        self.config = make_config(**{**cohort, **own, "set_up": set_up, **changes})
        self.server = first.server.followed_by(self.config)
        self.clients = {}
        for name in self.server.missing:
            if name in self.active(Stage.UNMASKING, first.clients):
                self.clients[name] = self.client(name)
        self.clients = dict(sorted(self.clients.items()))
        self.roster = first.roster
        self.plain = {}
        self.masked = {}
        self.revealed = {}

    def client(self, name):
        """The session of a client after that of the first sum."""
        history = self.histories.get(name, History())
        before = self.first.clients[name]
        return make_client(self.config, name, before=before, history=history)

    def mask(self, name, encoded=None):
        encoded = self.encoded(name) if encoded is None else encoded
        return self.clients[name].mask_next(encoded)

    def until(self, stage):
        """Run the stages before `stage`, of which the first is that of the vectors."""
        steps = [self.mask_inputs, self.check_consistency, self.reveal_shares]
        for step in steps[: stage - Stage.MASKED_INPUT]:
            step()
        return self


_COHORT = (
    "round",
    "attempt",
    "clients_max",
    "clients_min",
    "corrupt_permille",
    "dropout_permille",
    "complete_up_to",
    "draw",
    "selected_ppm",
)


def first_of_two(count=6, dropouts=None, **changes):
    """A round that is set up for two, after its sum was unmasked."""
    first = ProtocolRound(count, dropouts, set_up=SetUpForTwo(), **changes)
    first.run()
    return first
