"""Honest devices: the product's agent, whose task computes vectors that say what they depend on.

An agent, its secure sessions and its history are real. In the place of a model's training is
`TracedRun`, which names all that real training depends on and hashes it to a vector of four
numbers. So two vectors are equal exactly if devices have computed them in the same way.

**What a server knows.** It knows of each setting for which devices it changes anything: a batch of
72 examples in place of 71 changes nothing for a device with fewer, a clipping bound nothing for a
smaller gradient. So every setting that counts has a threshold. That of the batch size is the number
of examples; those of the range and of the largest weight are in the real encoding; all others
change the vectors of some devices, drawn for each sequence, and of no others.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Hashable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.privacy.leakage.ideal_crypto import IdealSigningKey
from tests.privacy.protocol import AUTHORITY, FAR_FUTURE

import isthmus_clients.training.local_run as local_run
import isthmus_clients.training.secure as secure
import isthmus_privacy.secagg.ranges as ranges
from isthmus.errors import UpdateError
from isthmus.job.schema import Job, read_job
from isthmus.task import Participant
from isthmus.task.scoring.frozen_form import LossDifference
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import Buffer
from isthmus.transport.requests import position_of
from isthmus.wire import link_pb2
from isthmus_clients.device.active_run import ActiveRun
from isthmus_clients.device.agent import Agent
from isthmus_clients.device.residuals import Residuals
from isthmus_clients.training.example_order import local_seed
from isthmus_clients.training.examples_account import ExamplesAccount
from isthmus_clients.training.history_log import _decode, _encode
from isthmus_clients.training.personal_state import PersonalStates
from isthmus_clients.training.secure import Credentials, encode_repeatably
from isthmus_privacy.secagg.config import ClientRequirements, RoundConfig
from isthmus_privacy.secagg.history import Entry, History, essential
from isthmus_privacy.secagg.identity import Directory, Enrolment

LAYOUT = TensorLayout.from_shapes({"weight": (4,)})
PERSONAL = TensorLayout.from_shapes({"head": (2,)})
FIRST_VALUE = 1.0
"""The elements of the first of a server's models."""
_UNIT = 2.0**-20
"""The third element of an update: what the update was multiplied by since it was trained."""

SMALL = 0.125
"""The server knows that the first two elements of updates are smaller."""

UNUSED = frozenset(
    {
        *("name", "budget", "seconds", "device_bytes", "attempts", "strategy", "datacenter"),
        *("time", "simulation", "prices", "rounds"),
        *(
            f"federated.{key}"
            for key in (
                *("clients", "over_selection", "quorum", "selection", "selection_settings"),
                *("utility", "participation", "hours", "max_clipped", "groups"),
                # These have their thresholds where vectors are encoded.
                *("clip", "max_examples"),
            )
        ),
        *(
            f"evaluation.{key}"
            for key in ("every", "devices", "quorum", "keep_best", "patience", "deliver")
        ),
        *(f"statistics.{key}" for key in ("devices", "quorum", "minimum")),
    }
)
"""Settings, and tables of them, that change nothing of what a device computes. Each other one does,
for some devices."""


VERSION = b"# another version\n"

BEYOND = {
    "related models": "a model whose last bit was changed gives most devices the same vectors",
    "counts": "a device has the same number of examples in sums of updates to all models",
    "comparisons": "a model has the same score on a device in all comparisons that it is in",
    "versions": "the statistics of a task may be the same in its next version",
}
"""What a server may know that no rule of the devices prevents it from using; see the threat model's
section on what is not protected."""


@dataclasses.dataclass
class World:
    """What is the same in one sequence: the devices' data, and for whom a setting matters."""

    seed: int
    examples: dict[str, int]
    big: dict[str, float]
    """The largest element of a device's updates."""
    stochastic: bool
    """Whether training has other random numbers than the order of examples, such as dropout."""
    known: frozenset[str] = frozenset()
    """What the server knows besides, of what ADR 77 does not cover; see `BEYOND`."""

    def matters(self, setting: str, device: str) -> bool:
        """Whether a setting changes the vector of a device."""
        chance = hashlib.sha256(f"{self.seed}/{setting}/{device}".encode()).digest()[0]
        return chance < 100

    def known_model(self, payload: bytes, device: str) -> bytes:
        """The model, as far as the device's vector depends on it."""
        if (
            "related models" in self.known
            and payload[-1:] == b"\1"
            and not self.matters("bit", device)
        ):
            return payload[:-1] + b"\0"
        return payload


_world: World


def set_world(world: World) -> None:
    """Begin a sequence."""
    global _world
    _world = world


# -- what a device computes ------------------------------------------------------------------------


class TracedRun:
    """In the place of `DeviceRun`: computes vectors that are hashes of what they depend on.

    Its `secret` is not among that: the task's data are taken to be the same each time.
    """

    def __init__(
        self,
        work: link_pb2.OpenRun,
        participant: Participant,
        data: Path | None,
        tasks: Path | None = None,
        device: str = "cpu",
        *,
        start: None = None,
        secret: bytes | None = None,
    ) -> None:
        self.job, self.settings, self.code = _traced(work.job, tasks)
        if "versions" in _world.known:
            self.code = self.code.removeprefix(VERSION)
        self.name = participant.name
        self.layout = LAYOUT
        self.personal = TensorLayout.from_header(work.personal) if work.personal else NOTHING
        self.examples = _world.examples[self.name]
        frozen = self.job.federated.frozen_dtype != "float32"
        self._form: Any = object() if frozen else None
        self._withheld = tasks is not None
        self.difference: LossDifference | None = None
        self._loaded = 0.0

    _measure_form = local_run.DeviceRun._measure_form

    def _difference_of(self, form: object, round_: int) -> LossDifference:
        """The first model does not show what the type of a base changes; others do, on some."""
        shows = self._loaded != FIRST_VALUE and _world.matters("frozen base", self.name)
        return LossDifference(2.0 if shows else 1.0, 1.0)

    def _load(self, start: object, personal: object) -> None:
        """Nothing has changed it."""

    def _check_form(self, payload: Buffer) -> None:
        """What `DeviceRun` does before its first work, which it fails by."""
        model = LAYOUT.decode(memoryview(payload)[: LAYOUT.nbytes])
        self._loaded = float(model[0])
        error = self._measure_form(0, model, None)  # type: ignore[misc]
        if error is not None:
            raise error

    @property
    def kept(self) -> TensorLayout:
        return self.personal

    def _used(self, tables: Iterable[str] = ()) -> tuple[Hashable, ...]:
        """The settings that the vector depends on, of some tables only if they are given."""
        chosen = tuple(tables)
        return tuple(
            (path, value)
            for path, value in self.settings
            if (not chosen or path.startswith(chosen)) and _world.matters(path, self.name)
        )

    def _batch(self) -> int:
        return min(self.job.federated.batch_size, self.examples)

    def train(
        self,
        work: link_pb2.TrainLocal,
        payload: Buffer,
        progress: Callable[[link_pb2.Progress], None],
        stopped: Callable[[], bool],
        gradient: Buffer | None = None,
        result: Buffer | None = None,
        personal: Buffer | None = None,
    ) -> link_pb2.Trained:
        self._check_form(payload)
        federated = self.job.federated
        batch = self._batch()
        draws = _world.stochastic or batch < self.examples or self.job.exchange.low_rank is not None
        moved = _world.matters("position", self.name)
        model = _world.known_model(bytes(memoryview(payload)[len(LAYOUT.header) :]), self.name)
        state = b"" if personal is None else bytes(personal)
        used = (
            (model, self.code, self._used(), batch, federated.steps(self.examples), state),
            (self.job.seed, work.round) if draws else None,
            position_of(work.position) if moved else None,
            self._used_gradient(gradient),
        )
        values = LAYOUT.decode(memoryview(payload))
        if result is not None:
            view = memoryview(result)
            view[: len(LAYOUT.gradient_and_update.header)] = LAYOUT.gradient_and_update.header
            halves = LAYOUT.gradient_and_update.decode(view)
            # At the model: the same whether or not a datacenter's gradient was sent with it.
            measured: tuple[Hashable, ...] = (model, self.code, self._used(), batch, state)
            measured += (self.job.seed, work.round)
            halves[: LAYOUT.size] = self._vector("gradient", measured) * work.gradient_scale
            values = halves[LAYOUT.size :]
        values.copy_(self._vector("update", used))
        if personal is not None:
            kept = memoryview(personal)
            kept[: len(PERSONAL.header)] = PERSONAL.header
            kept[len(PERSONAL.header) :] = self._hash("state", used)[: 4 * PERSONAL.size]
        return link_pb2.Trained(examples=federated.weight(self.examples), training={"loss": 1.0})

    def _used_gradient(self, gradient: Buffer | None) -> bytes:
        """A datacenter's gradient, as far as the update depends on it; zeros change nothing."""
        if gradient is None or not _world.matters("gradient", self.name):
            return b""
        return bytes(gradient) if LAYOUT.decode(memoryview(gradient)).any() else b""

    def _vector(self, kind: str, used: Hashable) -> torch.Tensor:
        digest = self._hash(kind, used)
        two = [int.from_bytes(digest[at : at + 3], "big") * SMALL * 2.0**-24 for at in (0, 3)]
        return torch.tensor([*two, _UNIT, _world.big[self.name]])

    def _hash(self, kind: str, used: Hashable) -> bytes:
        return hashlib.sha256(repr((self.name, kind, used)).encode()).digest()

    def score(
        self, payload: Buffer, candidates: Iterable[Iterable[int]], personal: Buffer | None = None
    ) -> list[float]:
        self._check_form(payload)
        view = memoryview(payload)
        parts = [view[at : at + LAYOUT.nbytes] for at in range(0, len(view), LAYOUT.nbytes)]
        state = b"" if personal is None else bytes(personal)
        scores = []
        for candidate in candidates:
            models = [_world.known_model(bytes(parts[number]), self.name) for number in candidate]
            digest = self._hash("score", (models, self.code, self._used(), state))
            scores.append(int.from_bytes(digest[:6], "big") / 2**48)
        return scores

    def evaluate(
        self, round_: int, payload: Buffer, personal: Buffer | None = None
    ) -> link_pb2.Counted:
        if self.job.statistics.collect:
            used: Hashable = (self.code, self._used(["task."]))
        else:
            self._check_form(payload)
            tuned = self.job.federated.fine_tune_steps > 0
            state = b"" if personal is None else bytes(personal)
            model = _world.known_model(bytes(payload), self.name)
            used = (model, self.code, self._used(), state, (self.job.seed, round_) if tuned else 0)
        return link_pb2.Counted(counts=[int.from_bytes(self._hash("count", used)[:5], "big")])


NOTHING = TensorLayout(())


@functools.lru_cache(maxsize=1024)
def _traced(job_text: str, tasks: Path) -> tuple[Job, tuple[tuple[str, str], ...], bytes]:
    """A job, its settings that count by their path, and the contents of the task's code."""
    job = read_job(job_text)
    table = job.model_dump(mode="json", exclude_defaults=True)
    where, _, name = table["task"].pop("source").rpartition(":")
    code = (tasks / where).resolve().read_bytes() + name.encode()
    # Its thresholds are known numbers of examples.
    for key in ("batch_size", "local_steps", "local_epochs"):
        table.get("federated", {}).pop(key, None)
    return job, tuple(_flat(table)), code


def _flat(table: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in table.items():
        path = f"{prefix}{key}"
        if path in UNUSED:
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{path}.")
        else:
            yield path, json.dumps(value)


# -- what it gives ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Given:
    """A device's vector as it goes into a sum, which is masked in a moment."""

    config: RoundConfig
    values: list[float]
    origin: Hashable
    """What named the vector, where its numbers do not."""
    examples: int
    key: bytes
    """Of the rounding."""
    sent: torch.Tensor | None
    masked: bool = False

    last: ClassVar[Given | None] = None
    """What a device gave last."""

    @property
    def config_hash(self) -> bytes:
        return self.config.hash

    @property
    def ring(self) -> Given:
        return self

    def mask(self, plus: object, minus: object) -> None:
        """Masks cancel in the sum."""

    def payload(self) -> bytearray:
        return bytearray()

    def values_by_element(self, device: str) -> dict[str, tuple[Hashable, Fraction] | None]:
        """The device's unknown and its factor in each element of a sum; None for a known value.

        Elements that say the same of all devices are one.
        """
        config = self.config
        if not self.examples or self._is_zero():
            return {}
        if self.origin is not None:
            return {"counts": (self.origin, Fraction(1))}
        if config.whole:
            return {"counts": (("counts", *self.values), Fraction(1))}
        if config.codec is not None:
            name = ("sent", config.encoding_hash, *self.values)
            return {"sent": (name, Fraction(1))}
        if config.run_id.endswith("/comparisons"):  # each score is a number of its own
            cut = [max(-config.clip, min(value, config.clip)) for value in self.values]
            # The same model in another comparison has the same score.
            about = b"" if "comparisons" in _world.known else config.model_hash
            names = [("score", about, each) for each in cut]
            return {f"score {at}": (name, Fraction(1)) for at, name in enumerate(names)}
        if config.levels < _FINE and self.key in _public_keys(device):
            return self._comparisons(device)
        weight = min(self.examples, config.weight_max)
        elements: dict[str, tuple[Hashable, Fraction] | None] = {}
        for start in range(0, config.size, LAYOUT.size):
            part = self.values[start : start + LAYOUT.size]
            scale = Fraction(part[2] / _UNIT)
            # The server knows the factor, but not what is cut off.
            cut = tuple(max(-config.clip, min(x, config.clip)) / float(scale) for x in part)
            elements[f"part {start}"] = ("vector", *cut), weight * scale
        if "counts" in _world.known:  # more than the largest weight is as known as that
            few = self.examples <= config.weight_max
            elements["weight"] = (("examples",), Fraction(1)) if few else None
        return elements

    def _is_zero(self) -> bool:
        """Whether it is that of a device without a usable vector, where no figure says so."""
        values = self.values if self.origin is None else self.origin[1:]  # type: ignore[index]
        return not any(values)

    def _comparisons(self, device: str) -> dict[str, tuple[Hashable, Fraction] | None]:
        """With few levels and a rounding that the server knows: a comparison for each element.

        Where the result is the same for all that the server thinks possible, it is known.
        """
        weight = min(self.examples, self.config.weight_max)
        ends = [
            secure.encode(
                self.config,
                torch.tensor([value, value, *self.values[2:]]),
                weight=weight,
                figures={slot.name: 0.0 for slot in self.config.slots},
                dither_key=self.key,
            ).vector.tolist()
            for value in (0.0, SMALL)
        ]
        return {
            f"element {number}": None
            if ends[0][number] == ends[1][number]
            else (("comparison", self.config.encoding_hash, self.values[number]), Fraction(1))
            for number in range(2)
        }


_FINE = 1 << 16
"""Levels with which no element of two possible values is rounded to the same one."""


@functools.lru_cache(maxsize=64)
def _public_keys(device: str) -> frozenset[bytes]:
    """Keys of roundings that everybody can compute, of the jobs and rounds of the model."""
    seeds = (local_seed(seed, round_, device) for seed in range(9) for round_ in range(-9, 10))
    return frozenset(hashlib.sha256(b"isthmus/dither/" + seed).digest() for seed in seeds)


def _give(
    config: RoundConfig,
    update: torch.Tensor,
    examples: int,
    figures: dict[str, float],
    seed: bytes,
    spacing: object = None,
) -> Given:
    """In the place of `encode_repeatably`: notes what goes into the sum.

    As it is before its spacing is hidden, which says less of it.
    """
    key = hashlib.sha256(b"isthmus/dither/" + seed).digest()
    origin = getattr(update, "origin", None)
    values = [] if origin is not None else update.tolist()
    sent = None
    if config.codec is not None:
        sent = encode_repeatably(config, update, examples, figures, seed).sent
    Given.last = Given(config, values, origin, examples, key, sent)
    return Given.last


def _counts_of(
    update: torch.Tensor, tensors: object, weight: int, parameters: object = None
) -> torch.Tensor:
    """In the place of `ranges.counts_of`: which bins they are in follows from the update."""
    counts: Any = torch.zeros(1, dtype=torch.int64)
    counts.origin = ("ranges", *update.tolist())
    return counts


def trace(patch: Any) -> None:
    """Have devices compute vectors that say what they depend on, and give them as they are."""
    patch.setattr(local_run, "DeviceRun", TracedRun)
    patch.setattr(secure, "encode_repeatably", _give)
    patch.setattr(secure, "hide_repeatably", lambda *args: None)
    patch.setattr(ranges, "counts_of", _counts_of)
    opened = functools.lru_cache(maxsize=4096)(_opened)
    patch.setattr(
        ActiveRun, "of", staticmethod(lambda work, tasks: opened(work.SerializeToString(), tasks))
    )


def _opened(work: bytes, tasks: Path) -> ActiveRun:
    return _ORIGINAL_OF(link_pb2.OpenRun.FromString(work), tasks)


_ORIGINAL_OF = ActiveRun.of


# -- devices ---------------------------------------------------------------------------------------


@functools.cache
def _key(name: str) -> Ed25519PrivateKey:
    seed = hashlib.sha256(f"leakage/{name}".encode()).digest()
    return Ed25519PrivateKey.from_private_bytes(seed)


@functools.cache
def enrolment(name: str) -> Enrolment:
    """The enrolment of a device, which is verified here once."""
    public = _key(name).public_key().public_bytes_raw()
    enrolled = AUTHORITY.enrol(name, public, not_after=FAR_FUTURE)
    DIRECTORY.check(enrolled)
    return enrolled


@functools.cache
def identity(name: str) -> IdealSigningKey:
    """The identity of a device."""
    return IdealSigningKey(enrolment(name).identity_key)


DIRECTORY = Directory(AUTHORITY.public)
NAMES = tuple(f"device-{number}" for number in range(8))


def prepare() -> None:
    """Verify what is verified by real signatures, before these are replaced."""
    for name in NAMES:
        identity(name)


@functools.cache
def _template(name: str) -> Credentials:
    credentials = Credentials(_key(name).private_bytes_raw())
    credentials.identity = identity(name)  # type: ignore[assignment]
    credentials.requirements = ClientRequirements(honest_min=2, corrupt_permille=0)
    credentials.enrolment = enrolment(name)
    credentials.directory = DIRECTORY
    return credentials


_devices = itertools.count()


class Device:
    """An honest device with a certificate, which may restart or be killed: the rest is on disk."""

    def __init__(self, name: str, tasks: Path, group: str) -> None:
        self.name = name
        self._tasks = tasks
        self._group = group
        self._states = PersonalStates(tasks.parent / "states" / str(next(_devices)))
        self._residuals = Residuals(None)
        self._account = ExamplesAccount(None)
        self._disk: list[Entry] = []
        """Entries of the history's log."""
        self._killed_at: tuple[int, bool] | None = None
        """Entries from now, and whether the last of them is written, when it is killed."""
        self.opened: tuple[str, Hashable] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin anew, with what is on disk."""
        self.agent = Agent(
            Participant(name=self.name, regime="federated"),
            None,
            signing_key=_key(self.name),
            history_file=Path("history.log"),
            tasks=self._tasks,
            group=self._group,
            states=self._states,
            account=self._account,
        )
        credentials = copy.copy(_template(self.name))
        entries = [_decode(_encode(entry)) for entry in essential(self._disk)]
        credentials.history = History(entries, self._record)
        self.agent._secure._credentials = credentials
        self.agent._secure._residuals = self._residuals
        self.opened = None

    def kill(self, entries: int, *, written: bool) -> None:
        """Have it end when it records something, after so many entries; then it restarts."""
        self._killed_at = entries, written

    def _record(self, entry: Entry) -> None:
        """Write an entry, unless the device is killed before, or just after that.

        Raises:
            UpdateError: it is killed.
        """
        left, written = self._killed_at or (-1, False)
        if left > 0:
            self._killed_at = left - 1, written
        if left or written:
            self._disk.append(entry)
        if left == 0:
            self._killed_at = None
            self.restart()
            raise UpdateError("this device was killed")

    def open(self, work: link_pb2.OpenRun, about: Hashable) -> None:
        """Open a run, unless it is open."""
        if self.opened != (work.run_id, about):
            self.opened = None
            self.agent._open(work, None)
            self.opened = work.run_id, about


def make_world(chance: random.Random, known: Iterable[str] = ()) -> World:
    """The data of devices, near the thresholds that a server may choose."""
    return World(
        seed=chance.getrandbits(48),
        examples={name: chance.choice((3, 69, 70, 71, 71, 72, 72, 73)) for name in NAMES},
        big={name: chance.choice((0.5, 0.5, 1.5, 3.0, 9.0)) for name in NAMES},
        stochastic=chance.random() < 0.3,
        known=frozenset(known),
    )
