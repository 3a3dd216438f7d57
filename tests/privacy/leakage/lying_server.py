"""A server that makes random requests, and opens what sums it can.

Most of its requests repeat an earlier one with something changed: the settings of the job, the
encoding, the position, the round, the run, the model, the devices, what it tells one of them. It
loses devices at every step, restarts them, shows them different sets of share owners and of
survivors, and goes on with several attempts at once.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
from tests.privacy.leakage.combinations import OpenedSum, Unknown
from tests.privacy.leakage.devices import (
    FIRST_VALUE,
    LAYOUT,
    NAMES,
    PERSONAL,
    Device,
    Given,
    World,
    enrolment,
    identity,
    set_world,
)
from tests.privacy.leakage.ideal_crypto import IdealOneTimeKey, forget_signatures, sealed_for

from isthmus.errors import IsthmusError
from isthmus.job.learning_rate import RoundPosition
from isthmus.job.measurements import evaluations_run_id
from isthmus.job.schema import Job, parse_job, write_job
from isthmus.task.paired_scores import comparisons_run_id, vector_size
from isthmus.transport.requests import position_message, position_of
from isthmus.wire import link_pb2
from isthmus_clients.device import secure_sessions
from isthmus_clients.device.active_run import ActiveRun
from isthmus_clients.device.agent import Agent
from isthmus_clients.training.secure import SecureParticipation
from isthmus_privacy.compression.sum_codecs import sum_codec
from isthmus_privacy.purpose import (
    NO_GRADIENT,
    BufferedPurpose,
    ComparisonPurpose,
    EvaluationPurpose,
    RangePurpose,
    TrainingPurpose,
    buffer_name,
    evaluated_model,
    ranged_model,
    ranges_run_id,
    statistics_of,
)
from isthmus_privacy.secagg.cohort import Cohort
from isthmus_privacy.secagg.config import BIN_LEVELS, RoundConfig, SetUpBefore, SetUpForTwo
from isthmus_privacy.secagg.messages import (
    AdvertiseKeys,
    ConsistencySignature,
    ConsistencySignatures,
    Inbox,
    Roster,
    Survivors,
)
from isthmus_privacy.secagg.ranges import SIZE as RANGE_COUNTS
from isthmus_privacy.slots import (
    COMPRESSED_SLOTS,
    MEASURING_SLOTS,
    SCORING_SLOTS,
)

_T = TypeVar("_T")

# -- models and jobs -------------------------------------------------------------------------------


def model(number: int, bit: bool = False) -> bytes:
    """A model's encoded vector; with `bit`, the same one with its last bit changed."""
    payload = LAYOUT.encode(torch.full((LAYOUT.size,), FIRST_VALUE + number))
    payload[-1] = bit
    return bytes(payload)


MODELS = tuple(model(number) for number in range(3))
RELATED = tuple(model(number, True) for number in range(3))
GRADIENTS = tuple(LAYOUT.encode(torch.full((LAYOUT.size,), value)) for value in (0.0, 0.5, 0.25))
"""That it may send with a model; the first changes nothing."""

BASE = """
name = "leakage"
[task]
source = "survey/task.py:Survey"
[federated]
batch_size = 71
cohort = 8
"""

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "ranges": (),
    "plain": ("federated.clip=4.0", "federated.max_examples=72", "federated.max_clipped=1.0"),
    "levels": ("federated.max_examples=72",),
    "buffered": (
        "federated.mode=buffered",
        "federated.buffer.staleness_exponent=1.0",
        "federated.clip=4.0",
        "federated.max_examples=72",
    ),
    "compressed": (
        "federated.compression={one_in=2,bits=4}",
        "federated.clip=4.0",
        "federated.max_examples=72",
    ),
    "low rank": (
        "exchange.low_rank={include=['weight'],rank=2}",
        "federated.clip=4.0",
        "federated.max_examples=72",
    ),
    "personal": ("exchange.personal=['head']", "federated.clip=4.0", "federated.max_examples=72"),
    "groups": (
        "federated.groups.minimum=3",
        "federated.clip=4.0",
        "federated.max_examples=72",
    ),
    "frozen": (
        "model.start=base",
        f"model.sha256='{'ab' * 32}'",
        "federated.frozen_dtype=bfloat16",
        "federated.clip=4.0",
        "federated.max_examples=72",
    ),
    "protected": (
        "federated.privacy.epsilon=50",
        "federated.privacy.delta=1e-3",
        "federated.privacy.participations=2",
        "federated.local_steps=3",
        "federated.batch_size=2",
        "federated.clip=4.0",
    ),
    "statistics": ("statistics.collect=true",),
}
"""Kinds of jobs, by the settings that make them one."""

CHANGES = (
    *("federated.max_examples=70", "federated.max_examples=71", "federated.max_examples=73"),
    *("federated.batch_size=72", "federated.batch_size=4", "federated.local_steps=1"),
    *("federated.local_steps=2", "federated.clip=1.0", "federated.clip=2.0"),
    *("federated.clip=8388608.0", "federated.proximal=0.1", "federated.clip_norm=1.0"),
    *("federated.precision=bf16", "federated.accumulate=2", "federated.normalized_steps=5"),
    *("task.settings={rate=0.1}", "task.settings={rate=0.2}", "exchange.buffers=frozen"),
    *("evaluation.batch_size=7", "federated.fine_tune_steps=1", "seed=5"),
    *("learning_rate.schedule=inverse_sqrt", "learning_rate.warmup_steps=9"),
    *("name=renamed", "rounds=77", "time.round_seconds=99.0", "federated.over_selection=1.5"),
    *("federated.quorum=7", "federated.groups.minimum=4", "federated.cohort=9"),
    *("task.source=other/task.py:Survey", "task.source=survey/task.py:Second"),
    *("task.source=survey/../survey/task.py:Survey", "task.source=./survey/task.py:Survey"),
)
"""What a server or an operator may change from one job to the next."""

_BASE = "/nowhere"


@dataclasses.dataclass(frozen=True)
class OpenedJob:
    """A job with what its runs are opened with."""

    job: Job
    text: str
    tasks: Path

    def opening(self, run_id: str) -> link_pb2.OpenRun:
        return _opening(run_id, self.text, self.job.exchange.has_personal)

    def active(self, run_id: str) -> ActiveRun:
        """The run as honest devices open it."""
        return ActiveRun.of(self.opening(run_id), self.tasks)


@functools.lru_cache(maxsize=4096)
def _opening(run_id: str, job: str, personal: bool) -> link_pb2.OpenRun:
    header = PERSONAL.header if personal else b""
    return link_pb2.OpenRun(
        run_id=run_id, job=job, base=_BASE, layout=LAYOUT.header, personal=header
    )


@functools.lru_cache(maxsize=4096)
def make_job(changes: tuple[str, ...], tasks: Path) -> OpenedJob | None:
    """A job with some settings; None if they do not go together, or no device opens it."""
    try:
        job = parse_job(BASE, changes)
        made = OpenedJob(job, write_job(job), tasks)
        made.active("run")
    except IsthmusError:
        return None
    return made


# -- plans -----------------------------------------------------------------------------------------

POSITION = RoundPosition(10, 5, 5)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a server wants of one attempt."""

    kind: str
    """update, ranges, buffer, evaluation or comparison."""
    changes: tuple[str, ...]
    """Of the job."""
    run_id: str
    round: int
    model: int
    bit: bool
    """Whether the model is the related one."""
    second: int
    """The other model of a comparison."""
    invited: frozenset[str]
    position: RoundPosition = POSITION
    gradient: int | None = None
    scale: float = 0.0
    group: str = ""
    clip: float = 4.0
    weight_max: int = 1000
    levels: int = 0
    committed: tuple[int, int] = (0, 0)
    lie: str = ""
    """What one device is told instead."""

    def __str__(self) -> str:
        others = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("kind", "invited") and getattr(self, field.name) != field.default
        }
        return f"{self.kind} ({', '.join(f'{key}={value}' for key, value in others.items())})"


KINDS = ("update", "update", "update", "ranges", "evaluation", "comparison")
_OWN = ("position", "gradient", "scale", "group", "levels", "clip", "weight")
_CHANGED = (
    *("nothing", "nothing", "job", "job", "job", "job", "run", "round", "round", "model", "bit"),
    *("second", "kind", "devices", "devices", "devices", "alone", "lie", "committed", *_OWN),
)
_LIES = ("position", "gradient", "model", "committed", "group", "job")


@dataclasses.dataclass(frozen=True)
class Repertoire:
    """What a server chooses from; a small one shows soon what a single rule prevents."""

    families: tuple[str, ...] = tuple(FAMILIES)
    kinds: tuple[str, ...] = KINDS
    changes: tuple[str, ...] = CHANGES
    how: tuple[str, ...] = _CHANGED
    """What it changes from one attempt to the next."""
    first: tuple[str, ...] = _OWN
    """What it may change in its first request."""
    kills: float = 0.0
    """How often devices are killed after an attempt begins, where they record something."""


def first_plan(chance: random.Random, names: Sequence[str], choices: Repertoire) -> Plan:
    """A plan as an honest server might have it."""
    family = chance.choice(choices.families)
    kind = chance.choice(choices.kinds)
    if family == "statistics":  # whose devices do nothing else, whatever is asked
        kind = chance.choice(("evaluation", kind))
    if family == "buffered":
        kind = "buffer"
    elif kind == "ranges" and family != "ranges":
        kind = "update"
    changes = FAMILIES[family]
    if choices.changes and chance.random() < 0.3:
        changes += (chance.choice(choices.changes),)
    plan = Plan(
        kind=kind,
        changes=changes,
        run_id="one",
        round=1,
        model=0,
        bit=False,
        second=1,
        invited=frozenset(names),
    )
    if choices.first and chance.random() < 0.3:
        return changed(chance, plan, names, choices, chance.choice(choices.first))
    return plan


def changed(
    chance: random.Random, plan: Plan, names: Sequence[str], choices: Repertoire, what: str
) -> Plan:
    """The plan with something changed."""
    match what:
        case "nothing":
            return plan
        case "job":
            return dataclasses.replace(
                plan, changes=(*plan.changes, chance.choice(choices.changes))
            )
        case "run":
            return dataclasses.replace(plan, run_id=chance.choice(("one", "two")))
        case "round":
            return dataclasses.replace(plan, round=plan.round + chance.choice((1, 1, 2)))
        case "model":
            return dataclasses.replace(plan, model=chance.randrange(len(MODELS)))
        case "bit":
            return dataclasses.replace(plan, bit=not plan.bit)
        case "second":
            return dataclasses.replace(plan, second=chance.randrange(len(MODELS)))
        case "kind":
            if plan.kind == "buffer":
                return plan
            return dataclasses.replace(plan, kind=chance.choice(choices.kinds))
        case "position":
            start, steps = chance.choice((10, 20)), chance.choice((5, 8))
            return dataclasses.replace(plan, position=RoundPosition(start, steps, 5))
        case "gradient":
            return dataclasses.replace(plan, gradient=chance.choice((None, 0, 1, 2)))
        case "scale":
            return dataclasses.replace(plan, scale=chance.choice((0.0, 0.5, 1.0)))
        case "group":
            return dataclasses.replace(plan, group=chance.choice(("", "north", "south")))
        case "clip":
            clip = chance.choice((1.0, 2.0, 4.0, 16.0, float(1 << 23), 3.0))
            return dataclasses.replace(plan, clip=clip)
        case "weight":
            weight = chance.choice((63, 70, 71, 72, 73, 125, 1000))
            return dataclasses.replace(plan, weight_max=weight)
        case "levels":
            return dataclasses.replace(plan, levels=chance.choice((0, 2, 3, 1 << 20)))
        case "committed":
            return dataclasses.replace(plan, committed=chance.choice(((0, 0), (1, 1), (1, 2))))
        case "lie":
            return dataclasses.replace(plan, lie=chance.choice(("", *_LIES)))
        case "alone":  # it trains, though there is no sum of one device
            return dataclasses.replace(plan, invited=frozenset([chance.choice(names)]))
        case "devices":
            left_out = chance.sample(sorted(plan.invited), min(len(plan.invited), 1))
            fewer = plan.invited - set(left_out)
            return dataclasses.replace(plan, invited=fewer if len(fewer) > 2 else frozenset(names))
    raise AssertionError(what)


# -- attempts --------------------------------------------------------------------------------------


class Attempt:
    """An attempt of a lying server with some devices, one step at a time."""

    def __init__(
        self,
        chance: random.Random,
        plan: Plan,
        number: int,
        devices: Mapping[str, Device],
        corrupt: frozenset[str],
        job: OpenedJob,
    ) -> None:
        self.chance = chance
        self.plan = plan
        self.number = number
        self.devices = {name: devices[name] for name in sorted(plan.invited & devices.keys())}
        self.corrupt = corrupt
        self.job = job
        self.parts: dict[str, SecureParticipation] = {}
        self.processes: dict[str, Agent] = {}
        """By whom the devices take part; one that has restarted since takes part no more."""
        self.given: dict[str, Given] = {}
        self.opened: OpenedSum | None = None
        self.liked = chance.choice(sorted(self.devices))
        """The device that is told something else."""
        self.steps: list[Callable[[], bool | None]] = [
            *(self._join, self._share, self._mask, self._sign, self._reveal)
        ]

    def step(self) -> bool:
        """Take the next step; False after the last, or when devices have refused too much."""
        return bool(self.steps) and self.steps.pop(0)() is not False and bool(self.steps)

    def _ask(self, names: Iterable[str], question: Callable[[str], _T]) -> dict[str, _T]:
        """The replies of the devices that do not refuse."""
        replies = {}
        for name in names:
            if self.processes.get(name, self.devices[name].agent) is not self.devices[name].agent:
                self.parts.pop(name, None)
                continue
            try:
                replies[name] = question(name)
            except IsthmusError:
                self.parts.pop(name, None)
        return replies

    # -- joining -----------------------------------------------------------------------------------

    def _join(self) -> bool | None:
        try:
            asked = self._asked()
        except IsthmusError:  # an honest device would not open such a run, or be asked this
            return False
        count = len(self.devices) + len(self.corrupt)
        entries = self._ask(self.devices, lambda name: self._join_device(name, asked))
        entries |= {name: _keys_of(name, self.config) for name in self.corrupt}
        roster = Roster(tuple(entries[name] for name in sorted(entries)))
        self.cohort = Cohort(self.config, roster)
        self.graph = self.cohort.graph
        enough = len(entries) >= self.graph.survivors_min
        return enough and len(self.corrupt) <= self.graph.corrupt and count >= len(entries)

    def _asked(self) -> Callable[[str], link_pb2.Request]:
        """Make the configuration; returns what a device is asked, with what it is lied to."""
        raise NotImplementedError

    def _join_device(self, name: str, asked: Callable[[str], link_pb2.Request]) -> AdvertiseKeys:
        lie = self.plan.lie if name == self.liked else ""
        device = self.devices[name]
        job = self.job
        about = self.plan.changes
        if lie == "job":
            about = (*about, "federated.local_steps=3")
            job = make_job(about, job.tasks) or job
        device.open(job.opening(self.plan.run_id), about)
        agent = device.agent
        self._begin(device, asked(lie), lie)
        self.processes[name] = agent
        part = agent._secure._current
        assert part is not None
        assert isinstance(part._encoded, Given)
        self.parts[name] = part
        self.given[name] = part._encoded
        return part.session._entry

    def _begin(self, device: Device, request: link_pb2.Request, lie: str) -> None:
        """Have a device join."""
        raise NotImplementedError

    def _fields(self, run_id: str) -> dict[str, Any]:
        """Those of every configuration."""
        count = len(self.devices) + len(self.corrupt)
        permille = -(-1000 * len(self.corrupt) // count)
        return {
            "run_id": run_id,
            "round": self.plan.round,
            "attempt": self.number,
            "clients_max": max(count, 4),
            "corrupt_permille": permille,
            "dropout_permille": min(400, (999 - permille) // 2),
        }

    # -- the protocol ------------------------------------------------------------------------------

    def _share(self) -> None:
        self.losing(self.parts)
        roster = self.cohort.roster
        self._ask(list(self.parts), lambda name: self.parts[name].session.share_keys(roster))

    def _mask(self) -> None:
        """Show most devices one set of share owners, and some another."""
        self.losing(self.parts)
        chance = self.chance
        self.owners = self._without_some(set(self.cohort.positions))
        other = self._without_some(self.owners)
        lied_to = {name for name in self.parts if chance.random() < 0.03}

        def mask(name: str) -> object:
            owners = other if name in lied_to else self.owners
            own = self.cohort.positions[name]
            positions = {self.cohort.positions[owner] for owner in owners}
            sealed = tuple((owner, sealed_for(self.config)) for owner in sorted(positions - {own}))
            inbox = Inbox(self.cohort.hash, self.cohort.members(positions), sealed)
            part = self.parts[name]
            encoded: Any = part._encoded
            return part.session.mask_input(inbox, encoded)

        masked = self._ask([name for name in self.parts if name in self.owners], mask)
        self.masked = (masked.keys() - (lied_to if other != self.owners else set())) | self.corrupt

    def _sign(self) -> None:
        """Show most survivors one set of survivors, and some another."""
        self.losing(self.parts)
        self.survivors = self._without_some(self.masked & self.owners)
        shown = [self.survivors, self._without_some(self.survivors)]
        messages = [self._survivor_message(each) for each in shown]
        asked = [name for name in self.parts if name in self.survivors]
        told = {name: int(self.chance.random() < 0.03) for name in asked}
        signatures = self._ask(
            asked, lambda name: self.parts[name].session.sign_survivors(messages[told[name]])
        )
        fields = messages[0].signed_fields()
        signed = [(name, reply.signature) for name, reply in signatures.items()]
        signed += [
            (name, identity(name).sign(ConsistencySignature.TAG, *fields))
            for name in self.survivors & self.corrupt
        ]
        # Signatures of another set are of no use for this one, and are left out or passed off.
        if self.chance.random() < 0.8:
            signed = [(name, signature) for name, signature in signed if not told.get(name)]
        pairs = sorted((self.cohort.positions[name], signature) for name, signature in signed)
        self.signatures = ConsistencySignatures(tuple(pairs))

    def _survivor_message(self, survivors: Iterable[str]) -> Survivors:
        owners, left = (
            self.cohort.members({self.cohort.positions[name] for name in members})
            for members in (self.owners, survivors)
        )
        return Survivors(self.cohort.hash, owners, left)

    def _reveal(self) -> None:
        """Ask as few devices as possible, mostly: the others are free for later sums."""
        wanted = self.graph.threshold + 1 - len(self.corrupt & self.cohort.positions.keys())
        asked = [name for name in self.parts if name in self.survivors]
        self.chance.shuffle(asked)
        if self.chance.random() < 0.6:
            asked = asked[:wanted]
        revealed = self._ask(
            asked, lambda name: self.parts[name].session.reveal_unmasking_shares(self.signatures)
        )
        holders = revealed.keys() | self.corrupt
        owners = self.owners - self.corrupt
        if not all(len(holders - {owner}) >= self.graph.threshold for owner in owners):
            return
        honest = sorted(self.survivors - self.corrupt)
        rows: dict[str, dict[Unknown, Fraction]] = {}
        for name in honest:
            for element, value in self.given[name].values_by_element(name).items():
                row = rows.setdefault(element, {})
                if value is not None:
                    unknown, factor = value
                    row[name, unknown] = factor
        bound = self.graph.threshold + 1 - self.graph.corrupt
        self.opened = OpenedSum(str(self.plan), tuple(honest), tuple(rows.values()), bound)

    def losing(self, parts: dict[str, SecureParticipation]) -> None:
        """Lose a device now and then."""
        if parts and self.chance.random() < 0.06:
            parts.pop(self.chance.choice(sorted(parts)))

    def _without_some(self, members: Iterable[str]) -> frozenset[str]:
        """The members without none, one or two of them."""
        members = frozenset(members)
        count = self.chance.choice((0, 0, 0, 0, 0, 1, 1, 2))
        return members - set(self.chance.sample(sorted(members), min(count, len(members))))


def _keys_of(name: str, config: RoundConfig) -> AdvertiseKeys:
    """The keys of a device that cooperates with the server."""
    public = [IdealOneTimeKey().public for _ in range(2)]
    draft = AdvertiseKeys(enrolment(name), *public, bytes(64))
    signature = identity(name).sign(draft.TAG, *draft.signed_fields(config.hash))
    return dataclasses.replace(draft, signature=signature)


_names: dict[bytes, bytes] = {}


def sha256(payload: bytes) -> bytes:
    """The name of a blob."""
    if payload not in _names:
        _names[payload] = hashlib.sha256(payload).digest()
    return _names[payload]


class Training(Attempt):
    """A sum of updates, or of their ranges."""

    def _asked(self) -> Callable[[str], link_pb2.Request]:
        plan = self.plan
        payload = (RELATED if plan.bit else MODELS)[plan.model]
        self.payload = payload
        if plan.gradient is not None:
            self.payload += GRADIENTS[plan.gradient]
        # As the devices name it, whatever that is: they refuse another name.
        work = link_pb2.TrainLocal(
            model=link_pb2.Blob(sha256=sha256(self.payload)),
            with_gradient=plan.gradient is not None,
        )
        run = self.job.active(plan.run_id)
        self.config = self._config(secure_sessions.model_name(run, work, self.payload))
        encoded = self.config.to_bytes()

        def request(lie: str) -> link_pb2.Request:
            work = link_pb2.TrainLocal(
                run_id=plan.run_id,
                round=plan.round,
                attempt=self.number,
                model=link_pb2.Blob(sha256=sha256(self._sent(lie)), size=len(self._sent(lie))),
                with_gradient=plan.gradient is not None,
                gradient_scale=plan.scale,
                group="south" if lie == "group" else plan.group,
                position=position_message(plan.position),
                summed_round=plan.committed[0],
                summed_attempt=plan.committed[1],
            )
            if lie == "position":
                work.position.start += 10
            if lie == "committed":
                work.summed_round = 9
                work.summed_attempt = 9
            if plan.kind == "ranges":
                work.ranges = encoded
            else:
                work.secure = encoded
            return link_pb2.Request(id=str(self.number), train_local=work)

        return request

    def _sent(self, lie: str) -> bytes:
        if lie == "model":
            return RELATED[self.plan.model] + self.payload[LAYOUT.nbytes :]
        if lie == "gradient" and self.plan.gradient is not None:
            return self.payload[: LAYOUT.nbytes] + GRADIENTS[self.plan.gradient - 1]
        return self.payload

    @property
    def gradient(self) -> bytes:
        """The name of the gradient that follows the model."""
        return NO_GRADIENT if self.plan.gradient is None else sha256(self.payload)

    def _config(self, name: bytes) -> RoundConfig:
        plan = self.plan
        run = self.job.active(plan.run_id)
        position = position_of(position_message(plan.position))
        purpose = TrainingPurpose(
            run.secure_purpose, self.gradient, plan.scale, plan.group, position
        ).hash
        if plan.kind == "ranges":
            return RoundConfig(
                **self._fields(ranges_run_id(plan.run_id)),
                model_hash=ranged_model(name),
                purpose=RangePurpose(purpose).hash,
                size=RANGE_COUNTS,
                slots=SCORING_SLOTS,
                whole=True,
                bits=16,
                levels=BIN_LEVELS,
                set_up=None if self.chance.random() < 0.1 else SetUpForTwo(),
            )
        return self.updates(name, purpose)

    def updates(self, name: bytes, purpose: bytes) -> RoundConfig:
        """The configuration of a sum of updates."""
        plan = self.plan
        run = self.job.active(plan.run_id)
        federated = run.job.federated
        # Devices refuse what the job does not say, and other numbers than ranges give.
        clip = plan.clip if federated.clip is None else federated.clip
        config = RoundConfig(
            **self._fields(plan.run_id),
            model_hash=name,
            purpose=purpose,
            size=LAYOUT.size * (2 if plan.scale else 1),
            slots=MEASURING_SLOTS if plan.scale else run.training_slots,
            clip=clip,
            weight_max=federated.largest_weight or plan.weight_max,
            levels=plan.levels,
        )
        if federated.compression is None or plan.scale:
            return config
        codec = sum_codec(self.job.job, LAYOUT, federated.compression.bits)
        return dataclasses.replace(
            config,
            codec=codec,
            bits=codec.ring_bits(config.clients_max),
            levels=codec.highest,
            slots=COMPRESSED_SLOTS,
        )

    def _begin(self, device: Device, request: link_pb2.Request, lie: str) -> None:
        sent = self._sent(lie)
        agent = device.agent
        room = agent._run(self.plan.run_id).room_for(request)
        payload = agent.host.buffer(len(sent), room)
        memoryview(payload)[:] = sent
        agent._train(request, payload, lambda progress: None)


class Agreement(Training):
    """The sum of updates that devices have kept, after that of their ranges."""

    def _config(self, name: bytes) -> RoundConfig:
        plan = self.plan
        run = self.job.active(plan.run_id)
        purpose = TrainingPurpose(
            run.secure_purpose, self.gradient, plan.scale, plan.group, plan.position
        ).hash
        return self.updates(name, purpose)

    def _begin(self, device: Device, request: link_pb2.Request, lie: str) -> None:
        plan = self.plan
        work = link_pb2.Agree(
            run_id=plan.run_id,
            round=plan.round,
            attempt=self.number,
            secure=self.config.to_bytes(),
        )
        device.agent._agree(work)


class Following(Agreement):
    """The sum of updates that devices have kept, with the set-up of that of their ranges.

    The server goes on from whatever step the sum of ranges has come to.
    """

    def __init__(self, before: Attempt, plan: Plan, devices: Mapping[str, Device]) -> None:
        super().__init__(before.chance, plan, before.number, devices, before.corrupt, before.job)
        self.before = before
        self.cohort = before.cohort
        self.graph = before.graph
        self.owners = getattr(before, "survivors", frozenset())
        self.processes = dict(before.processes)
        self.steps = [self._join_next, self._sign, self._reveal]

    def updates(self, name: bytes, purpose: bytes) -> RoundConfig:
        """The configuration of the sum of updates, of the same cohort."""
        first = self.before.config
        config = super().updates(name, purpose)
        return dataclasses.replace(
            config,
            clients_max=first.clients_max,
            clients_min=first.clients_min,
            corrupt_permille=first.corrupt_permille,
            dropout_permille=first.dropout_permille,
            set_up=SetUpBefore(first.hash),
        )

    def _join_next(self) -> bool | None:
        """Have most devices mask their vectors for one configuration, and some for another."""
        try:
            asked = self._asked()
        except IsthmusError:
            return False
        self.cohort = self.before.cohort.followed_by(self.config)
        chance = self.chance
        other = dataclasses.replace(self.config, clip=2 * self.config.clip)
        lied_to = {name for name in self.devices if chance.random() < 0.03}

        def mask(name: str) -> object:
            device = self.devices[name]
            if name in lied_to:
                about = link_pb2.Agree(
                    run_id=self.plan.run_id,
                    round=self.plan.round,
                    attempt=self.number,
                    secure=other.to_bytes(),
                )
                return device.agent._agree(about)
            self._begin(device, asked(""), "")
            part = device.agent._secure._current
            assert part is not None
            assert Given.last is not None
            self.parts[name] = part
            self.given[name] = Given.last
            return part

        masked = self._ask([name for name in self.devices if name in self.processes], mask)
        self.masked = (masked.keys() - lied_to) | self.corrupt
        return len(self.masked) >= self.graph.survivors_min


class Buffer(Training):
    """A sum of updates to models of several rounds."""

    def _asked(self) -> Callable[[str], link_pb2.Request]:
        plan = self.plan
        payloads = (RELATED if plan.bit else MODELS)[:2]
        self.payload = payloads[plan.model % 2]
        position = plan.position
        starts = [(max(0, plan.round - 1), payloads[1]), (plan.round, payloads[0])]
        if plan.second == 1:  # all from one model
            starts = starts[1:]
        self.starts = tuple(
            (number, sha256(payload), False, position_of(position_message(position)))
            for number, payload in starts
        )
        self.payloads = {sha256(payload): payload for payload in payloads}
        purpose = BufferedPurpose(self.job.active(plan.run_id).secure_purpose, self.starts).hash
        self.config = self.updates(buffer_name(plan.run_id, plan.round), purpose)

        def request(lie: str) -> link_pb2.Request:
            number, name, _, _ = self.chance.choice(self.starts)
            payload = self.payloads[name]
            work = link_pb2.TrainLocal(
                run_id=plan.run_id,
                round=number,
                attempt=self.number,
                model=link_pb2.Blob(sha256=name, size=len(payload)),
                position=position_message(position),
                keep=True,
            )
            return link_pb2.Request(id=str(self.number), train_local=work)

        return request

    def _begin(self, device: Device, request: link_pb2.Request, lie: str) -> None:
        plan = self.plan
        agent = device.agent
        sent = self.payloads[request.train_local.model.sha256]
        payload = agent.host.buffer(len(sent))
        memoryview(payload)[:] = sent
        agent._train(request, payload, lambda progress: None)
        starts = [
            link_pb2.BufferedStart(round=number, model=name, position=position_message(position))
            for number, name, _, position in self.starts
        ]
        work = link_pb2.Agree(
            run_id=plan.run_id,
            round=plan.round,
            attempt=self.number,
            secure=self.config.to_bytes(),
            starts=starts,
        )
        agent._agree(work)


class Evaluation(Attempt):
    """A sum of counts of a model, or of the devices' data."""

    def _asked(self) -> Callable[[str], link_pb2.Request]:
        plan = self.plan
        run = self.job.active(plan.run_id)
        payload = (RELATED if plan.bit else MODELS)[plan.model]
        self.payload = payload
        collects = self.job.job.statistics.collect
        name = evaluated_model(sha256(payload))
        if collects:
            name = statistics_of(run.secure_purpose.task)
        self.config = RoundConfig(
            **self._fields(evaluations_run_id(plan.run_id)),
            model_hash=name,
            purpose=EvaluationPurpose(run.secure_purpose, plan.group).hash,
            size=1,
            slots=SCORING_SLOTS,
            whole=True,
            bits=64,
        )
        work = link_pb2.Evaluate(
            run_id=plan.run_id,
            round=plan.round,
            attempt=self.number,
            secure=self.config.to_bytes(),
            group=plan.group,
        )
        if not collects:
            work.model.sha256 = sha256(payload)
        request = link_pb2.Request(id=str(self.number), evaluate=work)
        return lambda lie: request

    def _begin(self, device: Device, request: link_pb2.Request, lie: str) -> None:
        payload = device.agent.host.buffer(len(self.payload))
        memoryview(payload)[:] = self.payload
        device.agent._evaluate(request, payload)


class Comparison(Attempt):
    """A sum of scores of two models."""

    def _asked(self) -> Callable[[str], link_pb2.Request]:
        plan = self.plan
        run = self.job.active(plan.run_id)
        first = (RELATED if plan.bit else MODELS)[plan.model]
        self.payload = first + MODELS[plan.second]
        candidates = ((0,), (1,)) if plan.gradient is None else ((0,), (0, 1))
        self.config = RoundConfig(
            **self._fields(comparisons_run_id(plan.run_id)),
            model_hash=sha256(self.payload),
            purpose=ComparisonPurpose(run.secure_purpose, candidates).hash,
            size=vector_size(len(candidates)),
            slots=SCORING_SLOTS,
            clip=min(1.0, plan.clip),
            levels=plan.levels,
        )
        work = link_pb2.Score(
            run_id=plan.run_id,
            comparison=plan.round,
            attempt=self.number,
            models=link_pb2.Blob(sha256=sha256(self.payload), size=len(self.payload)),
            candidates=[link_pb2.Candidate(of=of) for of in candidates],
            secure=self.config.to_bytes(),
        )
        request = link_pb2.Request(id=str(self.number), score=work)
        return lambda lie: request

    def _begin(self, device: Device, request: link_pb2.Request, lie: str) -> None:
        payload = device.agent.host.buffer(len(self.payload))
        memoryview(payload)[:] = self.payload
        device.agent._score(request, payload)


_ATTEMPTS: Mapping[str, type[Attempt]] = {
    "update": Training,
    "ranges": Training,
    "agree": Agreement,
    "buffer": Buffer,
    "evaluation": Evaluation,
    "comparison": Comparison,
}


# -- a sequence ------------------------------------------------------------------------------------

ATTEMPTS = 5
EVERYTHING = Repertoire(kills=0.15)


def play(seed: int, world: World, tasks: Path, choices: Repertoire = EVERYTHING) -> list[OpenedSum]:
    """The sums that a server opens in a sequence of attempts, some of them at the same time."""
    chance = random.Random(seed)
    set_world(world)
    forget_signatures()
    names = NAMES[: chance.choice((4, 4, 4, 5, 6))]
    # With four devices one that cooperates is a quarter, which leaves no room for a lost one.
    corrupt = frozenset(chance.sample(names, 1 if len(names) > 4 and chance.random() < 0.4 else 0))
    honest = [name for name in names if name not in corrupt]
    groups = chance.choice((("",), ("north",), ("north", "south", "")))
    devices = {name: Device(name, tasks, chance.choice(groups)) for name in honest}
    opened: list[OpenedSum] = []
    plans = [first_plan(chance, honest, choices)]
    running: list[Attempt] = []
    rounds: dict[str, int] = {}
    number = 0
    for _ in range(ATTEMPTS):
        plan = plans[-1] if len(plans) == 1 else chance.choice(plans)
        if number:
            for _ in range(chance.choice((1, 1, 1, 2, 3))):
                plan = changed(chance, plan, honest, choices, chance.choice(choices.how))
        # Rounds of a run go forward, or devices refuse them as replayed, which is soon seen.
        latest = rounds.get(plan.run_id, 0)
        if chance.random() < 0.9:
            plan = dataclasses.replace(plan, round=max(plan.round, latest))
        rounds[plan.run_id] = max(plan.round, latest)
        plans.append(plan)
        number += chance.choice((1, 1, 1, 1, 1, 1, 0))
        job = make_job(plan.changes, tasks)
        if job is None:
            plans.pop()
            continue
        running.append(_ATTEMPTS[plan.kind](chance, plan, number, devices, corrupt, job))
        at_once = chance.choice((0, 0, 1))
        while len(running) > at_once:
            _step(chance.choice(running), running, opened, devices)
        if chance.random() < 0.2:
            chance.choice(list(devices.values())).restart()
        if choices.kills and chance.random() < choices.kills:
            _kill(chance, list(devices.values()))
    while running:
        _step(chance.choice(running), running, opened, devices)
    return opened


def _kill(chance: random.Random, devices: Sequence[Device]) -> None:
    """Have one device killed when it records something, or all of them at the same step."""
    entries = chance.randrange(4)
    written = chance.random() < 0.5
    for device in chance.choice(([chance.choice(devices)], devices)):
        device.kill(entries, written=written)


def follow(
    plans: Sequence[Plan],
    world: World,
    tasks: Path,
    *,
    killed_at: tuple[int, bool] | None = None,
) -> list[OpenedSum]:
    """The sums of a server that follows its plans, one after the other, and loses no device.

    Args:
        plans: of its attempts.
        world: of the devices.
        tasks: directory of their tasks.
        killed_at: where all devices are killed, see `Device.kill`; None for nowhere.
    """
    set_world(world)
    forget_signatures()
    names = sorted(frozenset().union(*(plan.invited for plan in plans)))
    devices = {name: Device(name, tasks, "") for name in names}
    if killed_at is not None:
        entries, written = killed_at
        for device in devices.values():
            device.kill(entries, written=written)
    opened: list[OpenedSum] = []
    running: list[Attempt] = []
    for number, plan in enumerate(plans, start=1):
        job = make_job(plan.changes, tasks)
        assert job is not None
        running.append(_ATTEMPTS[plan.kind](_Calm(), plan, number, devices, frozenset(), job))
        while running:
            _step(running[-1], running, opened, devices)
    return opened


class _Calm(random.Random):
    """Chance that chooses the first of several, and lets nothing rare happen."""

    def random(self) -> float:
        return 0.99

    def choice(self, seq: Sequence[_T]) -> _T:
        return seq[0]


def _step(
    attempt: Attempt,
    running: list[Attempt],
    opened: list[OpenedSum],
    devices: Mapping[str, Device],
) -> None:
    if attempt.step():
        return
    running.remove(attempt)
    if attempt.opened is not None:
        opened.append(attempt.opened)
    plan = attempt.plan
    # Whatever became of the ranges: devices keep the updates.
    if plan.kind == "ranges" and len(attempt.given) > 1:
        agreed = dataclasses.replace(plan, kind="agree")
        if attempt.config.is_for_two and attempt.chance.random() < 0.8:
            following = dataclasses.replace(plan, kind="follow")
            running.append(Following(attempt, following, devices))
            return
        running.append(
            Agreement(attempt.chance, agreed, attempt.number, devices, attempt.corrupt, attempt.job)
        )
