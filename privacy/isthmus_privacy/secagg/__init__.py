"""Secure aggregation: the server learns only the sum over one agreed set of clients.

SecAgg+ (Bell et al. 2020) on Bonawitz et al. 2017 with signed survivor sets. `client` and `server`
are pure state machines without I/O: they exchange the messages of `messages`, and the masked
vectors as bytes. `encoding` converts updates to ring vectors and sums back to means. This package
imports none of its modules: those without tensors are used where PyTorch is not loaded.

A whole round of four clients, one of which drops out:

>>> import torch
>>> from isthmus_privacy.crypto.keys import SigningKey
>>> from isthmus_privacy.secagg.client import ClientSession
>>> from isthmus_privacy.secagg.config import ClientRequirements, RoundConfig
>>> from isthmus_privacy.secagg.encoding import decode, encode
>>> from isthmus_privacy.secagg.history import History
>>> from isthmus_privacy.secagg.identity import Authority, Directory
>>> from isthmus_privacy.secagg.server import ServerSession
>>> authority = Authority()
>>> directory = Directory(authority.public)
>>> config = RoundConfig(run_id="demo", round=0, attempt=0, model_hash=bytes(32),
...                      purpose=bytes(32), size=3, clients_max=4, weight_max=10,
...                      corrupt_permille=0)
>>> server, clients = ServerSession(config, directory), {}
>>> for name in "abcd":
...     identity = SigningKey()
...     clients[name] = ClientSession(
...         config, identity=identity, directory=directory, history=History(),
...         enrolment=authority.enrol(name, identity.public, not_after=2**40),
...         model_hash=bytes(32), purpose=bytes(32),
...         requirements=ClientRequirements(honest_min=3, corrupt_permille=0))
...     server.receive_keys(clients[name].advertise_keys())
>>> roster = server.finish_advertise_keys()
>>> for client in clients.values():
...     server.receive_shares(client.share_keys(roster))
>>> owners = server.finish_share_keys()
>>> for name in "abc":
...     update = torch.tensor([0.5, -0.25, 0.125])
...     encoded = encode(config, update, weight=10)
...     server.receive_masked_input(*clients[name].mask_input(server.inbox(name), encoded))
>>> survivors = server.finish_masked_input()
>>> for name in "abc":
...     server.receive_consistency_signature(clients[name].sign_survivors(survivors))
>>> signatures_of_all = server.finish_consistency_check()
>>> quorum = server.quorum_signatures()
>>> for name in "abc":
...     server.receive_unmasking_shares(clients[name].reveal_unmasking_shares(quorum))
>>> total = server.unmask()
>>> mean = decode(config, total.vector, clients=len(total.clients))
>>> [round(x, 6) for x in mean.vector.tolist()], mean.weight, total.clients
([0.5, -0.25, 0.125], 30, ('a', 'b', 'c'))
"""
