"""The server's checks of single client messages.

A check depends on the message, the cohort and what the server has received before, and changes
nothing. Each returns normally if the message is acceptable and raises PeerMisbehaved otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Set

from isthmus_privacy.crypto import keys, refusal
from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.cohort import Cohort, keys_are_signed
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.identity import Directory
from isthmus_privacy.secagg.lottery import is_selected
from isthmus_privacy.secagg.messages import (
    PART_BYTES,
    AdvertiseKeys,
    ConsistencySignature,
    MaskedInput,
    MaskedInputForTwo,
    ShareKeys,
    Survivors,
    UnmaskingShares,
)


def check_advertised_keys(
    message: AdvertiseKeys,
    config: RoundConfig,
    directory: Directory,
    *,
    invited: Collection[str] | None,
    received: Mapping[str, AdvertiseKeys],
    used_keys: Set[bytes],
    group: RandomGroup | None = None,
) -> None:
    """Check a client's advertised keys.

    Args:
        message: the client's message.
        config: the attempt's configuration.
        directory: verifies the enrolment.
        invited: names that may take part; None for all enrolled.
        received: accepted messages of the stage by name.
        used_keys: the public keys of these messages.
        group: the random group that is summed; None for any devices.

    Raises:
        PeerMisbehaved: the client may not take part, or its keys are not its own, fresh and valid.
    """
    name = message.name
    if invited is not None and name not in invited:
        refusal.refuse("keys-uninvited", f"{name!r} is not invited to this round", peer=name)
    if name in received:
        refusal.refuse("keys-duplicate", f"{name!r} has advertised keys before", peer=name)
    if len(received) >= config.clients_max:
        refusal.refuse(
            "keys-too-many-clients",
            f"{name!r} came after clients_max={config.clients_max} others",
            peer=name,
        )
    directory.check(message.enrolment)
    lottery = message.enrolment.lottery
    in_group = group is None or group.has(lottery, config.draw)
    if not (in_group and is_selected(lottery, config.draw, config.selected_ppm)):
        # In the roster, it would make every other client refuse.
        refusal.refuse("keys-not-selected", f"{name!r} has another ticket by now", peer=name)
    if not keys_are_signed(config, message):
        refusal.refuse("keys-forged", f"{name!r} did not sign these keys", peer=name)
    own_keys = set(message.public_keys)
    if len(own_keys) < len(message.public_keys) or own_keys & used_keys:
        refusal.refuse("keys-repeated", f"a key of {name!r} is in the roster already", peer=name)
    if not (keys.is_usable(message.sealing_key) and keys.is_usable(message.mask_key)):
        refusal.refuse(
            "keys-unusable",
            f"a key of {name!r} is a point of low order, or no key of ML-KEM-768",
            peer=name,
        )


def check_shares(message: ShareKeys, cohort: Cohort, *, received: Collection[int]) -> None:
    """Check a client's encrypted shares.

    Args:
        message: the client's message.
        cohort: the attempt's clients.
        received: positions of the clients whose shares were accepted.

    Raises:
        PeerMisbehaved: the shares are not those of an honest client of this roster.
    """
    name = message.name
    neighbours = message.neighbours
    position = cohort.positions.get(name, -1)
    if position < 0:
        refusal.refuse("shares-not-in-roster", f"{name!r} is not in the roster", peer=name)
    if position in received:
        refusal.refuse("shares-duplicate", f"{name!r} has sent shares before", peer=name)
    if message.roster_hash != cohort.hash or neighbours.size != cohort.size:
        refusal.refuse("shares-other-roster", f"{name!r} has another roster", peer=name)
    if position in neighbours:
        refusal.refuse("shares-to-self", f"{name!r} chose itself as neighbour", peer=name)
    if len(neighbours) != cohort.graph.degree:
        refusal.refuse(
            "shares-wrong-degree",
            f"{name!r} chose {len(neighbours)} neighbours; degree={cohort.graph.degree}",
            peer=name,
        )
    if len(message.sealed) != len(neighbours):
        refusal.refuse(
            "shares-wrong-count",
            f"{name!r} sealed {len(message.sealed)} for {len(neighbours)} neighbours",
            peer=name,
        )
    fields = message.signed_fields()
    if not keys.verify(cohort.identity(position), message.signature, message.TAG, *fields):
        refusal.refuse("shares-forged", f"{name!r} did not sign these shares", peer=name)


def check_masked_input(
    message: MaskedInput,
    payload: bytes | bytearray | memoryview | None,
    cohort: Cohort,
    *,
    share_owners: Collection[int],
    partners: Mapping[int, Set[int]],
    received: Collection[int],
    senders: Mapping[int, Set[int]],
) -> None:
    """Check a client's masked vector.

    Args:
        message: the client's message.
        payload: the masked vector; None if another process checks that it is the one signed.
        cohort: the attempt's clients.
        share_owners: positions of the clients whose shares were accepted.
        partners: position to the positions of its mask partners.
        received: positions of the clients whose vectors are in the sum.
        senders: position to the positions of those that have drawn it as neighbour.

    Raises:
        PeerMisbehaved: the vector is not one that can be added to the sum.
    """
    name = message.name
    position = cohort.positions.get(name, -1)
    if position not in share_owners:
        refusal.refuse("masked-without-shares", f"{name!r} has sent no shares", peer=name)
    if position in received:
        refusal.refuse("masked-duplicate", f"the vector of {name!r} is in the sum", peer=name)
    if message.roster_hash != cohort.hash:
        refusal.refuse("masked-other-roster", f"{name!r} has another roster", peer=name)
    fields = message.signed_fields()
    if not keys.verify(cohort.identity(position), message.signature, message.TAG, *fields):
        refusal.refuse("masked-forged", f"{name!r} did not sign this vector", peer=name)
    if message.partners.indices != partners.get(position):
        refusal.refuse(
            "masked-wrong-partners",
            f"{name!r} masked with other partners than it should have",
            peer=name,
        )
    if isinstance(message, MaskedInputForTwo):
        expected_bytes = keys.SEALING_BYTES + PART_BYTES * len(senders[position])
        if len(message.next_parts) != expected_bytes:
            refusal.refuse(
                "masked-wrong-parts",
                f"{name!r} left {len(message.next_parts)} bytes for the second sum; "
                f"{expected_bytes} are expected",
                peer=name,
            )
    expected_bytes = cohort.config.payload_bytes
    sent = message.length if payload is None else len(payload)
    if not message.length == sent == expected_bytes:
        refusal.refuse(
            "masked-wrong-length",
            f"{name!r} sent {sent} bytes; {expected_bytes} are expected",
            peer=name,
        )
    if payload is not None and hashlib.sha256(payload).digest() != message.sha256:
        refusal.refuse("masked-corrupt", f"the vector of {name!r} was changed", peer=name)


def check_consistency_signature(
    message: ConsistencySignature,
    cohort: Cohort,
    survivors: Survivors,
    *,
    received: Collection[int],
) -> None:
    """Check a survivor's signature of the survivor set.

    Args:
        message: the client's message.
        cohort: the attempt's clients.
        survivors: the message that survivors sign.
        received: positions of the survivors whose signatures were accepted.

    Raises:
        PeerMisbehaved: it is not the first valid signature of a survivor.
    """
    name = message.name
    position = cohort.positions.get(name, -1)
    if position not in survivors.survivors:
        refusal.refuse("consistency-not-survivor", f"{name!r} is no survivor", peer=name)
    if position in received:
        refusal.refuse("consistency-duplicate", f"{name!r} has signed before", peer=name)
    fields = survivors.signed_fields()
    if not keys.verify(cohort.identity(position), message.signature, message.TAG, *fields):
        refusal.refuse("consistency-forged", f"{name!r} signed another survivor set", peer=name)


def check_unmasking_shares(
    message: UnmaskingShares,
    cohort: Cohort,
    survivors: Survivors,
    *,
    owners_by_holder: Mapping[int, Set[int]],
    received: Collection[int],
) -> None:
    """Check the shares that a survivor reveals.

    Args:
        message: the client's message.
        cohort: the attempt's clients.
        survivors: the survivor set that a quorum has signed.
        owners_by_holder: position to the owners of the shares that it holds.
        received: positions of the survivors whose shares were accepted.

    Raises:
        PeerMisbehaved: it is not the first valid set of shares of a survivor, one for each owner.
    """
    name = message.name
    position = cohort.positions.get(name, -1)
    if position not in survivors.survivors:
        refusal.refuse("unmasking-not-survivor", f"{name!r} is no survivor", peer=name)
    if position in received:
        refusal.refuse("unmasking-duplicate", f"{name!r} has revealed shares before", peer=name)
    fields = message.signed_fields(cohort.hash)
    if not keys.verify(cohort.identity(position), message.signature, message.TAG, *fields):
        refusal.refuse("unmasking-forged", f"{name!r} did not sign these shares", peer=name)
    owners = [owner for owner, _ in message.shares]
    if owners != sorted(owners_by_holder[position]):
        refusal.refuse(
            "unmasking-wrong-owners",
            f"{name!r} revealed shares of other clients than those whose shares it holds",
            peer=name,
        )
