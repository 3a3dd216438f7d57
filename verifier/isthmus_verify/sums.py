"""Sums that devices have signed: who is in them, of which model, and for which job."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection

from isthmus_verify.fields import Fields
from isthmus_verify.messages import (
    Config,
    Member,
    in_random_group,
    is_signed,
    read_purpose,
    read_roster,
    read_signatures,
    read_survivors,
    tagged_hash,
)
from isthmus_verify.violation import Violation, shown


@dataclasses.dataclass(frozen=True)
class SignedSum:
    """A sum of updates of the run that devices have signed."""

    model: str
    """SHA-256 of the model that they name, in hexadecimal."""
    devices: frozenset[str]
    roster: frozenset[str]
    """All devices that have signed their keys for the configuration, or that of its ranges."""
    draw: int
    clients_min: int
    noise_multiplier: float | None
    """Noise multiplier of the noise that the devices add; None if they add none."""
    starts: dict[int, str]
    """In buffered mode, the models that updates start from, by the round that asked for them; empty
    for one with a gradient, which nothing else names."""
    group: str
    """The group that is summed; empty for any devices."""
    in_group: bool
    """Whether it is a random one, in which the draw has put all devices of the roster."""


class SignedSums:
    """All signed sums of a transcript."""

    def __init__(self, run_id: str, jobs: Collection[bytes], authority: bytes | None) -> None:
        """Prepare.

        Args:
            run_id: of the transcript.
            jobs: SHA-256 of its job, as devices have opened it.
            authority: Ed25519 key that has to have signed all certificates; None for whichever a
                sum names.
        """
        self._run_id = run_id
        self._jobs = jobs
        self._authority = authority
        self._seen: set[bytes] = set()
        self._known: set[tuple[bytes, Member]] = set()
        """Certificates that were checked, by authority."""
        self.of_round: dict[tuple[int, int], list[SignedSum]] = {}
        """By round and attempt."""
        self._where: dict[tuple[int, int], str] = {}
        self.count = 0
        """Sums of the run; in each the devices' signatures cover its job."""
        self.of_others: Counter[str] = Counter()
        """Sums of other runs, by their ids: a branch has those of the run that it began with."""
        self.authorities: set[bytes] = set()

    def add(self, content: Fields) -> None:
        """Check one sum.

        Raises:
            Violation: a certificate or a signature is not valid, or the sum was there before.
        """
        own = ("authority", "config", "purpose", "roster", "signatures", "survivors")
        has_set_up = "set_up" in content.values
        content.only(*own, *(["set_up"] if has_set_up else []))
        where = content.where
        authority = bytes.fromhex(content.digest("authority"))
        if self._authority not in (None, authority):
            raise Violation(f"{where} names another authority than the given one")
        config_bytes, roster_bytes, survivor_bytes, signature_bytes, purpose = (
            _bytes(content, key)
            for key in ("config", "roster", "survivors", "signatures", "purpose")
        )
        config = Config.read(config_bytes, f"the configuration in {where}")
        if config.hash in self._seen:
            raise Violation(f"{where} is a sum that was there before")
        self._seen.add(config.hash)
        _check_set_up(config, _bytes(content, "set_up") if has_set_up else None, where)
        roster = read_roster(roster_bytes, f"the roster in {where}")
        for one, other in itertools.pairwise(member.name.encode() for member in roster):
            if one >= other:
                raise Violation(f"the roster in {where} has a name twice, or not in order")
        if len({member.identity for member in roster}) != len(roster):
            raise Violation(f"the roster in {where} has one key under two names")
        for member in roster:
            self._check_member(member, authority, config, where)
        devices = _survivors(config, roster, roster_bytes, survivor_bytes, signature_bytes, where)
        self.authorities.add(authority)
        if tagged_hash("purpose", purpose) != config.purpose:
            raise Violation(f"the purpose in {where} is not the one that the devices signed")
        job, starts, group = read_purpose(purpose, f"the purpose in {where}")
        if config.run_id != self._run_id:
            self.of_others[config.run_id] += 1
            return
        if job not in self._jobs:
            raise Violation(f"the devices of {where} had opened another job than this one")
        self.count += 1
        found = SignedSum(
            model=config.model_hash.hex(),
            devices=devices,
            roster=frozenset(member.name for member in roster),
            draw=config.draw,
            clients_min=config.clients_min,
            noise_multiplier=config.noise_multiplier,
            starts=starts,
            group=group,
            in_group=all(in_random_group(group, each.lottery, config.draw) for each in roster),
        )
        attempt = (config.round, config.attempt)
        self.of_round.setdefault(attempt, []).append(found)
        self._where.setdefault(attempt, where)

    def check_planned(self, planned: Collection[tuple[int, int]]) -> None:
        """Check that a transcript has the plans of all its sums.

        Args:
            planned: rounds and attempts of its plans.

        Raises:
            Violation: a plan is missing, as after its round was left out.
        """
        for attempt, where in self._where.items():
            if attempt not in planned:
                raise Violation(
                    f"devices have signed {where} for round {attempt[0]} attempt {attempt[1]}, of "
                    "which the transcript has no plan"
                )

    def _check_member(self, member: Member, authority: bytes, config: Config, where: str) -> None:
        # A device has the same certificate in many rounds.
        lasting = dataclasses.replace(member, sealing_key=b"", mask_key=b"", signature=b"")
        certificate = (authority, lasting)
        if certificate not in self._known:
            if not member.is_enrolled_by(authority):
                raise Violation(
                    f"{shown(member.name)} in {where} has no certificate of the authority that it "
                    "names"
                )
            self._known.add(certificate)
        if not member.has_signed(config):
            raise Violation(f"{shown(member.name)} has not signed the configuration in {where}")


def _check_set_up(config: Config, set_up: bytes | None, where: str) -> None:
    """Check that devices have signed their keys for this sum, or for that of its ranges.

    `set_up`: the configuration of the sum before; None if the entry has none, not even an empty
    one, which would be another form of the same entry.
    """
    if not config.set_up:
        if set_up is not None:
            raise Violation(f"{where} names the sum before, whose keys it does not have")
        return
    before = Config.read(set_up or b"", f"the configuration before that in {where}")
    if not config.follows(before):
        raise Violation(f"the keys in {where} were signed for another sum than that of its ranges")


def _survivors(
    config: Config,
    roster: list[Member],
    roster_bytes: bytes,
    survivor_bytes: bytes,
    signature_bytes: bytes,
    where: str,
) -> frozenset[str]:
    """Who is in the sum, by the signatures of enough of them."""
    roster_hash, owners, survivors = read_survivors(survivor_bytes, f"the survivors in {where}")
    if roster_hash != config.roster_hash(roster_bytes):
        raise Violation(f"the survivors in {where} are not of its roster")
    if owners.size != len(roster) or survivors.size != len(roster):
        raise Violation(f"the survivors in {where} are of a roster of another size")
    if not survivors.positions <= owners.positions:
        raise Violation(f"{where} has a survivor that has shared no secrets")
    least = config.survivors_min(len(roster))
    if len(survivors.positions) < least or len(roster) > config.clients_max:
        raise Violation(
            f"{where} is a sum over {len(survivors.positions)} of {len(roster)} devices; its "
            f"configuration allows from {least}, of at most {config.clients_max}"
        )
    signatures = read_signatures(signature_bytes, f"the signatures in {where}")
    quorum = config.quorum(len(roster))
    if len(signatures) < quorum:
        raise Violation(
            f"{where} has {len(signatures)} signatures of its survivors, and {quorum} are needed"
        )
    for position, signature in signatures.items():
        signed = position in survivors.positions and is_signed(
            roster[position].identity,
            signature,
            "consistency-signature",
            roster_hash,
            owners.encoded,
            survivors.encoded,
        )
        if not signed:
            raise Violation(f"signature {position} of the survivors in {where} is not valid")
    return frozenset(roster[position].name for position in survivors.positions)


def _bytes(content: Fields, key: str) -> bytes:
    text = content.text(key)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if base64.b64encode(data).decode() != text:
        raise Violation(f"{key!r} of {content.where} is not base64")
    return data
