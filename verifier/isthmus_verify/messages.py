"""The messages of secure sums that a transcript has, read from their canonical bytes.

Little-endian; a text, a list and a tag have their length before them, in 32 bits. The layout is
that of `isthmus_privacy.secagg`, of which this file is an independent description.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import struct

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from isthmus_verify.violation import Violation

DOMAIN = "isthmus/secagg/3/"
MAX_CLIENTS = 1 << 16
ONE_TIME_KEY = 32 + 1184
MAX_SLOTS = 256
MAX_STARTS = 1 << 12
MAX_RANGES = 4096
MAX_GROUP = 64
"""Bytes of the name of a group."""
_RANDOM_GROUP = re.compile(r"random-([1-9][0-9]?)-of-([1-9][0-9]?)")


def tagged(tag: str, *fields: bytes) -> bytes:
    """What is hashed or signed: the tag and the fields, each after its length."""
    parts = [(DOMAIN + tag).encode(), *fields]
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def tagged_hash(tag: str, *fields: bytes) -> bytes:
    """The SHA-256 of it."""
    return hashlib.sha256(tagged(tag, *fields)).digest()


def is_signed(key: bytes, signature: bytes, tag: str, *fields: bytes) -> bool:
    """Whether the owner of an Ed25519 key has signed these fields."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, tagged(tag, *fields))
    except (InvalidSignature, ValueError):
        return False
    return True


class Reader:
    """A place in the bytes of a message."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data = data
        self.at = 0
        self.where = where

    def take(self, size: int) -> bytes:
        """The next bytes."""
        if size > len(self.data) - self.at:
            raise Violation(f"{self.where} ends too early")
        self.at += size
        return self.data[self.at - size : self.at]

    def length(self, most: int) -> int:
        """A length, or a number of items."""
        value = int.from_bytes(self.take(4), "little")
        if value > most:
            raise Violation(f"{self.where} has a field of {value}, and {most} is the most")
        return value

    def tag(self, tag: str) -> None:
        """The beginning of a message."""
        expected = tagged(tag)
        if self.take(len(expected)) != expected:
            raise Violation(f"{self.where} is not a message {tag!r}")

    def begins(self, tag: str) -> bool:
        """Whether what follows begins as a message of that tag."""
        return self.data.startswith(tagged(tag), self.at)

    @property
    def at_end(self) -> bool:
        """Whether nothing follows."""
        return self.at == len(self.data)

    def number(self) -> int:
        """An unsigned number of 64 bits."""
        return int.from_bytes(self.take(8), "little")

    def real(self) -> float:
        """A number in double precision."""
        (value,) = struct.unpack("<d", self.take(8))
        return float(value)

    def flag(self) -> bool:
        """A byte that is 0 or 1."""
        value = self.take(1)[0]
        if value > 1:
            raise Violation(f"{self.where} has a flag that is neither 0 nor 1")
        return value == 1

    def text(self, most: int) -> str:
        """UTF-8, not empty."""
        raw = self.take(self.length(most))
        try:
            value = raw.decode()
        except UnicodeDecodeError:
            value = ""
        if not value:
            raise Violation(f"{self.where} has a text that is empty or not UTF-8")
        return value

    def members(self) -> Members:
        """A set of positions in the roster."""
        start = self.at
        size = self.length(MAX_CLIENTS)
        bits = int.from_bytes(self.take(-(-size // 8)), "little")
        if bits >> size:
            raise Violation(f"{self.where} has a set with members beyond its size")
        positions = [position for position in range(size) if bits >> position & 1]
        return Members(size, frozenset(positions), self.data[start : self.at])

    def end(self) -> None:
        """Nothing follows."""
        if not self.at_end:
            raise Violation(f"{self.where} has {len(self.data) - self.at} bytes too many")


def _read_codec(reader: Reader) -> None:
    """Read past how devices compress updates; its hash is checked, and not what it says."""
    if not reader.begins("update-codec-3"):
        reader.tag("provided-codec-1")
        for most in (63, 128, 1 << 16):  # name, version and settings
            reader.text(most)
        reader.take(3 * 8)  # length, bits and seed
        return
    reader.tag("update-codec-3")
    reader.take(3 * 8)  # share of the elements, bits and seed
    for _ in range(reader.length(MAX_RANGES)):
        reader.take(3 * 8)


@dataclasses.dataclass(frozen=True)
class Members:
    """A set of positions, and its bytes, which are signed."""

    size: int
    positions: frozenset[int]
    encoded: bytes


@dataclasses.dataclass(frozen=True)
class Config:
    """What devices sign about a sum, as far as it is checked here."""

    run_id: str
    round: int
    attempt: int
    model_hash: bytes
    purpose: bytes
    clients_max: int
    clients_min: int
    corrupt_permille: int
    dropout_permille: int
    draw: int
    noise_multiplier: float | None
    """Noise multiplier of the noise that the devices add; None if they add none."""
    selected_ppm: int
    complete_up_to: int
    is_for_two: bool
    """Whether the keys that devices sign for this sum are those of the next one, too."""
    set_up: bytes
    """Hash of the configuration of the sum before, for which devices have signed the keys of this
    one; empty if they have signed them for this one."""
    hash: bytes

    @classmethod
    def read(cls, data: bytes, where: str) -> Config:
        """Read a configuration."""
        reader = Reader(data, where)
        reader.tag("round-config")
        run_id = reader.text(128)
        round_ = reader.number()
        attempt = reader.number()
        model_hash = reader.take(32)
        purpose = reader.take(32)
        reader.number()  # elements of an update
        for _ in range(reader.length(MAX_SLOTS)):
            reader.tag("slot")
            reader.text(64)
            reader.take(8 + 1)  # largest value, and whether it is exact
        clients_max = reader.number()
        clients_min = reader.number()
        corrupt = reader.number()
        dropout = reader.number()
        complete_up_to = reader.number()
        reader.take(2 * 8)  # bits of the ring, levels of an element
        reader.real()  # clipping bound of an element
        reader.flag()  # whether elements are whole numbers
        reader.number()  # largest weight
        draw = reader.number()
        selected = reader.number()  # millionths of the devices
        multiplier = None
        if reader.flag():
            reader.tag("distributed-noise")
            reader.real()  # clipping bound of an update
            multiplier = reader.real()
            reader.number()  # devices whose noise is counted on
            reader.real()  # integers per unit of the update
        if reader.flag():
            _read_codec(reader)
        is_for_two = False
        set_up = b""
        if not reader.at_end:
            is_for_two = reader.begins("set-up-for-two")
            reader.tag("set-up-for-two" if is_for_two else "set-up-before")
            set_up = b"" if is_for_two else reader.take(32)
        reader.end()
        return cls(
            run_id=run_id,
            round=round_,
            attempt=attempt,
            model_hash=model_hash,
            purpose=purpose,
            clients_max=clients_max,
            clients_min=clients_min,
            corrupt_permille=corrupt,
            dropout_permille=dropout,
            draw=draw,
            noise_multiplier=multiplier,
            selected_ppm=selected,
            complete_up_to=complete_up_to,
            is_for_two=is_for_two,
            set_up=set_up,
            hash=tagged_hash("config-hash", data),
        )

    @property
    def signed_hash(self) -> bytes:
        """The hash that devices sign with their keys."""
        return self.set_up or self.hash

    def follows(self, first: Config) -> bool:
        """Whether the keys of this sum may be those of a first one, which sums its ranges."""
        cohorts = [
            (
                config.round,
                config.attempt,
                config.clients_max,
                config.clients_min,
                config.corrupt_permille,
                config.dropout_permille,
                config.complete_up_to,
                config.draw,
                config.selected_ppm,
            )
            for config in (self, first)
        ]
        return (
            first.is_for_two
            and self.set_up == first.hash
            and cohorts[0] == cohorts[1]
            and first.run_id == f"{self.run_id}/ranges"
            and first.model_hash == tagged_hash("ranged-model", self.model_hash)
            and first.purpose == tagged_hash("purpose", tagged("range-purpose") + self.purpose)
        )

    def roster_hash(self, roster: bytes) -> bytes:
        """What devices sign in the place of a roster."""
        hash_ = tagged_hash("roster-hash", self.signed_hash, roster)
        return tagged_hash("next-roster-hash", self.hash, hash_) if self.set_up else hash_

    def quorum(self, clients: int) -> int:
        """Signatures that make a set of survivors final, in a roster of so many."""
        corrupt = -(-clients * self.corrupt_permille // 1000)
        return (clients + corrupt) // 2 + 1

    def survivors_min(self, clients: int) -> int:
        """Fewest devices in a sum, in a roster of so many."""
        dropped = clients * self.dropout_permille // 1000
        return max(self.clients_min, self.quorum(clients), clients - dropped)


@dataclasses.dataclass(frozen=True)
class Member:
    """A device of a roster, with its certificate: an enrolment that the authority has signed."""

    name: str
    identity: bytes
    not_after: int
    lottery: bytes
    population: int
    certificate: bytes
    """Signature of the authority."""
    sealing_key: bytes
    mask_key: bytes
    signature: bytes
    """Signature of the device, of its keys for this configuration."""

    @classmethod
    def read(cls, reader: Reader) -> Member:
        """Read one entry of a roster."""
        reader.tag("advertise-keys")
        reader.tag("enrolment")
        return cls(
            name=reader.text(128),
            identity=reader.take(32),
            not_after=reader.number(),
            lottery=reader.take(32),
            population=reader.number(),
            certificate=reader.take(64),
            sealing_key=reader.take(ONE_TIME_KEY),
            mask_key=reader.take(ONE_TIME_KEY),
            signature=reader.take(64),
        )

    def is_enrolled_by(self, authority: bytes) -> bool:
        """Whether the authority has signed that this key has this name."""
        return is_signed(
            authority,
            self.certificate,
            "enrolment",
            self.name.encode(),
            self.identity,
            struct.pack("<Q", self.not_after),
            self.lottery,
            struct.pack("<Q", self.population),
        )

    def has_signed(self, config: Config) -> bool:
        """Whether the device takes part in this attempt, by its signature."""
        return is_signed(
            self.identity,
            self.signature,
            "advertise-keys",
            config.signed_hash,
            self.name.encode(),
            self.identity,
            self.sealing_key,
            self.mask_key,
        )


def read_roster(data: bytes, where: str) -> list[Member]:
    """The devices of an attempt."""
    reader = Reader(data, where)
    reader.tag("roster")
    members = [Member.read(reader) for _ in range(reader.length(MAX_CLIENTS))]
    reader.end()
    return members


def read_survivors(data: bytes, where: str) -> tuple[bytes, Members, Members]:
    """The hash of the roster, who has shared secrets, and who is in the sum."""
    reader = Reader(data, where)
    reader.tag("survivors")
    found = (reader.take(32), reader.members(), reader.members())
    reader.end()
    return found


def read_signatures(data: bytes, where: str) -> dict[int, bytes]:
    """Signatures of the survivor set by the position of the device."""
    reader = Reader(data, where)
    reader.tag("consistency-signatures")
    found: dict[int, bytes] = {}
    last = -1
    for _ in range(reader.length(MAX_CLIENTS)):
        position = reader.number()
        if position <= last:
            raise Violation(f"{where} has a signature twice, or not in order")
        found[position] = reader.take(64)
        last = position
    reader.end()
    return found


def read_purpose(data: bytes, where: str) -> tuple[bytes, dict[int, str], str]:
    """The SHA-256 of the job that devices had opened, the start models of a full buffer, the group.

    The models by the round that asked for the updates; none for a sum of one round's updates. A
    model that a gradient follows is empty, as what is signed is the digest of both together. The
    group is the one that is summed, empty for any devices.
    """
    reader = Reader(data, where)
    buffered = data.startswith(tagged("buffered-purpose"))
    reader.tag("buffered-purpose" if buffered else "training-purpose")
    reader.tag("run-purpose")
    job = reader.take(32)
    reader.take(3 * 32)  # digests of the task's code, of the layout, and of frozen parameters
    starts: dict[int, str] = {}
    if buffered:
        for _ in range(reader.length(MAX_STARTS)):
            round_ = reader.number()
            model = reader.take(32).hex()
            starts[round_] = "" if reader.flag() else model
            reader.take(3 * 8)  # the position in schedules
        reader.end()
        return job, starts, ""
    reader.take(32 + 8)  # the gradient that follows the model, and the scale of the devices' own
    group = reader.take(reader.length(MAX_GROUP)).decode(errors="replace")
    reader.take(3 * 8)  # the position in schedules
    reader.end()
    return job, starts, group


def random_group(name: str) -> tuple[int, int] | None:
    """The number of a random group, from 1, and how many there are; None for any other name."""
    found = _RANDOM_GROUP.fullmatch(name)
    if found is None or int(found[1]) > int(found[2]):
        return None
    return int(found[1]), int(found[2])


def in_random_group(name: str, lottery: bytes, draw: int) -> bool:
    """Whether a lottery number is in the random group of a name, in a draw."""
    found = random_group(name)
    if found is None:
        return False
    index, count = found
    digest = tagged_hash("random-group", lottery, draw.to_bytes(8, "little"))
    return int.from_bytes(digest[:8], "little") % count + 1 == index
