"""Run all parties of a protocol round in one process, step by step."""

import dataclasses
import functools
import hashlib

import torch

from isthmus_privacy.crypto.keys import OneTimeKey, SigningKey
from isthmus_privacy.secagg.client import ClientSession
from isthmus_privacy.secagg.config import ClientRequirements, RoundConfig
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

    def active(self, stage):
        """Clients that still send their message of a stage."""
        return [name for name in self.clients if self.dropouts.get(name, Stage.FINISHED) > stage]

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
