"""Secure aggregation: the server learns the sum over one agreed set of clients, and nothing else.

SecAgg+ (Bell et al. 2020) on Bonawitz et al. 2017 with signed survivor sets. Pure state machines:
messages in, messages out, and the masked vectors as bytes beside them. `client` and `server` hold
the two sides, `messages` what they say, `encoding` the way between updates and the ring.

A whole round of four clients, one of which is lost:

>>> import torch
>>> authority = Authority()
>>> directory = Directory(authority.public)
>>> config = RoundConfig(run_id="demo", round=0, attempt=0, model_hash=bytes(32), size=3,
...                      clients_max=4, weight_max=10)
>>> server, clients = ServerSession(config, directory), {}
>>> for name in "abcd":
...     identity = SigningKey()
...     clients[name] = ClientSession(
...         config, identity=identity, directory=directory, history=History(),
...         enrolment=authority.enrol(name, identity.public, not_after=2**40),
...         model_hash=bytes(32))
...     server.take_advert(clients[name].advertise())
>>> roster = server.roster()
>>> for client in clients.values():
...     server.take_shares(client.deal(roster))
>>> inboxes = server.inboxes()
>>> for name in "abc":
...     update = torch.tensor([0.5, -0.25, 0.125])
...     server.take_masked(*clients[name].mask(inboxes[name], encode(config, update, weight=10)))
>>> survivors = server.survivors()
>>> for name in "abc":
...     server.take_consistency_signature(clients[name].consent(survivors))
>>> consents = server.consents()
>>> for name in "abc":
...     server.take_unmasking_shares(clients[name].release(consents))
>>> total = server.unmask()
>>> mean = decode(config, total.vector, clients=len(total.clients))
>>> [round(x, 6) for x in mean.vector.tolist()], mean.weight, total.clients
([0.5, -0.25, 0.125], 30, ('a', 'b', 'c'))
"""

from isthmus_privacy.crypto.keys import SigningKey
from isthmus_privacy.crypto.refusal import REFUSALS
from isthmus_privacy.secagg.client import ClientSession, ClientStage
from isthmus_privacy.secagg.config import ClientRequirements, RoundConfig, Slot
from isthmus_privacy.secagg.encoding import Aggregate, Encoded, decode, encode
from isthmus_privacy.secagg.history import History
from isthmus_privacy.secagg.identity import Authority, Directory, Enrolment
from isthmus_privacy.secagg.messages import (
    AdvertiseKeys,
    ConsistencySignature,
    ConsistencySignatures,
    Inbox,
    MaskedInput,
    Roster,
    ShareKeys,
    Survivors,
    UnmaskingShares,
)
from isthmus_privacy.secagg.server import RingSum, ServerSession, ServerStage

__all__ = [
    "REFUSALS",
    "AdvertiseKeys",
    "Aggregate",
    "Authority",
    "ClientRequirements",
    "ClientSession",
    "ClientStage",
    "ConsistencySignature",
    "ConsistencySignatures",
    "Directory",
    "Encoded",
    "Enrolment",
    "History",
    "Inbox",
    "MaskedInput",
    "RingSum",
    "Roster",
    "RoundConfig",
    "ServerSession",
    "ServerStage",
    "ShareKeys",
    "SigningKey",
    "Slot",
    "Survivors",
    "UnmaskingShares",
    "decode",
    "encode",
]
