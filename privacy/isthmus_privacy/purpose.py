"""What a sum is for: the canonical messages whose hash a round configuration contains.

The configuration names a run, a round and a model, and every device signs its hash. That alone
does not say what the devices do with the model: a server could open all devices but one with a job
of zero steps, or have all but one compare a model with itself, and the sum would be the vector of
that one. So server and device compute the *purpose* of a sum independently, the device from what
its run was opened with and what it was asked to do. A device refuses a configuration with another
purpose, so all devices of a sum do the same.

>>> run = RunPurpose.of(job='{"name": "demo"}', task=bytes(32), layout=b"header", frozen={})
>>> TrainingPurpose(run).hash == TrainingPurpose(run, gradient=bytes([1]) * 32).hash
False

What may differ between honest devices is not part of it: their data, and where their files are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Self

from isthmus_privacy.crypto import refusal
from isthmus_privacy.crypto.canonical import (
    FLAG,
    NUMBER,
    REAL,
    Message,
    exactly,
    items,
    nested,
    row,
    tagged_hash,
    text,
)
from isthmus_privacy.random_groups import RandomGroup

MAX_STARTS = 1 << 12
"""Maximum number of start models of one buffered sum."""

MAX_MODELS = 64
"""Maximum number of candidates of a comparison, and of models in one candidate."""

NO_GRADIENT = bytes(32)
"""In place of a gradient's name where none follows the model."""

_HASH = exactly(32)

Position = tuple[int, int, int]
"""Where a round is in the schedules of the learning rate: its start, its steps, and its cohort.

A device whose rate is 0 sends an update of zeros: a server that chose another position for all
devices but one would learn the update of that one.
"""

_POSITION = row(NUMBER, NUMBER, NUMBER)


@dataclasses.dataclass(frozen=True)
class RunPurpose(Message):
    """What a run was opened with, as far as it is the same on all devices."""

    TAG = "run-purpose"
    FIELDS = {"job": _HASH, "task": _HASH, "layout": _HASH, "frozen": _HASH}

    job: bytes
    """SHA-256 of the job as it was sent."""
    task: bytes
    """Digest of the task's code, see `isthmus.task.code_digest`."""
    layout: bytes
    """SHA-256 of the tensor layout's header: names, shapes and dtypes."""
    frozen: bytes
    """Hash of the fingerprint of the parameters that are not exchanged."""

    @classmethod
    def of(
        cls, *, job: str, task: bytes, layout: bytes, frozen: Mapping[str, Sequence[float]]
    ) -> Self:
        """The purpose of a run.

        Args:
            job: JSON, exactly as it is sent.
            task: digest of the task's code, 32 bytes.
            layout: the header of the tensor layout.
            frozen: float32 values by the name of the parameter.
        """
        fields = [
            field
            for name, values in sorted(frozen.items())
            for field in (name.encode(), struct.pack(f"<{len(values)}f", *values))
        ]
        return cls(
            hashlib.sha256(job.encode()).digest(),
            task,
            hashlib.sha256(layout).digest(),
            tagged_hash("frozen-parameters", *fields),
        )

    def of_vector(self, settings: str) -> Self:
        """What a device's vector depends on: the settings that count in place of the whole job.

        `settings`: see `isthmus.job.vector_settings`.
        """
        return dataclasses.replace(self, job=hashlib.sha256(settings.encode()).digest())


@dataclasses.dataclass(frozen=True)
class _Purpose(Message):
    @property
    def hash(self) -> bytes:
        """The hash that `RoundConfig.purpose` contains."""
        return tagged_hash("purpose", self.to_bytes())


@dataclasses.dataclass(frozen=True)
class TrainingPurpose(_Purpose):
    """Updates of devices that train from the model of the configuration."""

    TAG = "training-purpose"
    FIELDS = {
        "run": nested(RunPurpose),
        "gradient": _HASH,
        "gradient_scale": REAL,
        "group": text(64),
        "position": _POSITION,
    }

    run: RunPurpose
    gradient: bytes = NO_GRADIENT
    """SHA-256 of the blob in which a gradient follows the model, which is added to that of every
    step; `NO_GRADIENT` for the model alone, which the configuration names in both cases."""
    gradient_scale: float = 0.0
    """Factor of the device's mean gradient at the model, which is summed with the update; 0 for
    the update alone."""
    group: str = ""
    """The group whose devices alone are in the sum; empty for any devices."""
    position: Position = (0, 0, 0)
    """Position of the round in the schedules of the learning rate."""


def device_vector(purpose: bytes, trained: int, state: str = "") -> bytes:
    """Hash of what a device's vector depends on besides the model, its data and the encoding.

    Args:
        purpose: hash of a purpose whose run is that of `RunPurpose.of_vector`, and which has no
            group: with whom a vector is summed does not change it.
        trained: the round whose random numbers it has.
        state: names what the device keeps between rounds and the vector depends on.
    """
    return tagged_hash("device-vector", purpose, NUMBER.write(trained), state.encode())


def check_group(group: str, *, own: str, clients_min: int, minimum: int | None) -> None:
    """Refuse the sum of a group that the device is not in, or of too few devices.

    Args:
        group: that of the request; empty for a sum of any devices, which other checks bound.
        own: the group that the device's owner has declared; empty for none.
        clients_min: least number of devices in the sum, see `RoundConfig`.
        minimum: `federated.groups.minimum` of the job; None for a job without groups.

    Raises:
        PeerMisbehaved: the group is another one, or the number is below the minimum.
    """
    if not group:
        return
    if group != own:
        declared = f"is in {own!r}" if own else "has declared none"
        refusal.refuse(
            "group-differs",
            f"this request is for the sum of the group {group!r}, and this device {declared} (its "
            "owner sets [privacy] group in policy.toml)",
        )
    if minimum is None or clients_min < minimum:
        allowed = "has no groups" if minimum is None else f"requires {minimum} (groups.minimum)"
        refusal.refuse(
            "group-below-minimum",
            f"the sum of the group {group!r} may be of {clients_min} devices, and the job that "
            f"this device has opened {allowed}",
        )


def check_random_group(group: str, *, clients_min: int, minimum: int, most: int) -> None:
    """Refuse the sum of a group that is no random one, or of too few devices.

    Who is in it is checked with the roster, see `isthmus_privacy.random_groups`.

    Args:
        group: that of the request; empty for a sum of any devices, which this job has none of.
        clients_min: least number of devices in the sum, see `RoundConfig`.
        minimum: `federated.robust_minimum` of the job.
        most: `federated.robust_groups` of the job.

    Raises:
        PeerMisbehaved: the group is none of at most so many, or the number is below the minimum.
    """
    found = RandomGroup.parse(group)
    if found is None or found.count > most:
        shown = f"the group {group!r}" if group else "no group"
        refusal.refuse(
            "random-group-unknown",
            f"this request is for the sum of {shown}, and "
            f"the job that this device has opened has 3 to {most} random groups "
            "(federated.robust_groups)",
        )
    if clients_min < minimum:
        refusal.refuse(
            "random-group-below-minimum",
            f"the sum of the group {group!r} may be of {clients_min} devices, and the job that "
            f"this device has opened requires {minimum} (federated.robust_minimum)",
        )


def check_gradient_scale(scale: float, *, kept: bool) -> None:
    """Refuse a gradient that cannot be summed with the update.

    Args:
        scale: its factor, see `TrainingPurpose.gradient_scale`.
        kept: whether the update is kept for a buffer, whose updates begin from different models.

    Raises:
        PeerMisbehaved: the factor is not a finite number from 0, or the update is kept.
    """
    if scale and (kept or not (math.isfinite(scale) and scale > 0)):
        refusal.refuse(
            "gradient-scale-invalid",
            f"the gradient at the model was requested with the factor {scale} and an update that "
            f"is {'kept' if kept else 'sent'}; the factor must be finite and above 0, and a kept "
            "update has none",
        )


@dataclasses.dataclass(frozen=True)
class ComparisonPurpose(_Purpose):
    """Scores of models; the configuration's model hash is that of the blob with the models."""

    TAG = "comparison-purpose"
    FIELDS = {
        "run": nested(RunPurpose),
        "candidates": items(items(NUMBER, MAX_MODELS), MAX_MODELS),
    }

    run: RunPurpose
    candidates: tuple[tuple[int, ...], ...]
    """Models to score: each is the mean of the models of the blob with these numbers."""


@dataclasses.dataclass(frozen=True)
class EvaluationPurpose(_Purpose):
    """Counts of a model on devices' validation data, of which the task defines the form."""

    TAG = "evaluation-purpose"
    FIELDS = {"run": nested(RunPurpose), "group": text(64)}

    run: RunPurpose
    group: str = ""
    """The group whose devices alone are in the sum; empty for any devices."""


def evaluated_model(sha256: bytes) -> bytes:
    """What a configuration names in place of the model that devices evaluate, 32 bytes.

    Distinct from the model's own SHA-256: which devices may be in a sum of counts of a model does
    not depend on who has trained from it. Sums of counts of one model, in any runs, are bound to
    one survivor set as sums of updates are.
    """
    return tagged_hash("evaluated-model", sha256)


def evaluated_data(task: bytes) -> bytes:
    """Names what all evaluations of a task's code count, 32 bytes; `task` is the code's digest.

    Predictions differ from model to model, and labels do not: of two sums over other devices the
    difference is about few of them. A device whose owner wants it is in sums of these counts, of
    whatever models, only with one survivor set.
    """
    return tagged_hash("evaluated-data", task)


@dataclasses.dataclass(frozen=True)
class RangePurpose(_Purpose):
    """How large updates are, see `isthmus_privacy.secagg.ranges`, before these are summed."""

    TAG = "range-purpose"
    FIELDS = {"updates": _HASH}

    updates: bytes
    """The hash of the purpose of the sum of the updates."""


def ranges_run_id(run_id: str) -> str:
    """The run id of secure sums of ranges, distinct from that of the run's other sums."""
    return f"{run_id}/ranges"


def ranged_model(name: bytes) -> bytes:
    """What a configuration of ranges names in place of the model, 32 bytes.

    `name` is what that of the updates names. Distinct, as for evaluations: a device that is lost
    after a sum of ranges must not bind the others to it in the sum of the updates.
    """
    return tagged_hash("ranged-model", name)


def check_ranges_before(
    sum_before: tuple[str, bytes, bytes], *, run_id: str, name: bytes, purpose: bytes
) -> None:
    """Refuse the set-up of another sum than that of the ranges of the same updates.

    Args:
        sum_before: run, model and purpose of the sum whose set-up would be used.
        run_id: of the sum of the updates.
        name: of the model, or of what takes its place.
        purpose: hash of what the updates are for.

    Raises:
        PeerMisbehaved: it is another one.
    """
    if sum_before != (ranges_run_id(run_id), ranged_model(name), RangePurpose(purpose).hash):
        refusal.refuse(
            "set-up-of-other-updates",
            "the keys of this sum would be those of a sum before that was not of the ranges of the "
            "same updates",
        )


Start = tuple[int, bytes, bool, Position]
"""Start of a kept update: its round, the SHA-256 of its model, whether a gradient followed it, and
the round's position."""


@dataclasses.dataclass(frozen=True)
class BufferedPurpose(_Purpose):
    """Kept updates of devices that trained from models of several rounds.

    A server that gave one device a model of its own could tell its update apart (Pasquini et al.
    2022), so the start models are listed, one for each round, and all devices see the same list.
    """

    TAG = "buffered-purpose"
    FIELDS = {
        "run": nested(RunPurpose),
        "starts": items(row(NUMBER, _HASH, FLAG, _POSITION), MAX_STARTS),
    }

    run: RunPurpose
    starts: tuple[Start, ...]
    """The starts that updates in this sum may have, by ascending round."""

    def check_start(self, own: Start, round_: int, max_staleness: int) -> int:
        """Check the list for a device, and return the age of its update in rounds.

        Args:
            own: start of the device's kept update.
            round_: of the sum.
            max_staleness: largest age of an update that the job allows.

        Raises:
            PeerMisbehaved: a round of the list is repeated or too old, or the device's own start
                is not in the list.
        """
        rounds = [start[0] for start in self.starts]
        ascending = all(a < b for a, b in itertools.pairwise(rounds))
        if not ascending or any(not 0 <= round_ - r <= max_staleness for r in rounds):
            refusal.refuse(
                "buffered-starts-invalid",
                f"the updates of this sum would begin in the rounds {rounds}; each must be listed "
                f"once, with one model, and be at most {max_staleness} rounds before {round_}",
            )
        if own not in self.starts:
            refusal.refuse(
                "buffered-start-differs",
                f"this device trained from another model of round {own[0]} than the devices of "
                "this sum, or before all of them",
            )
        return round_ - own[0]


def statistics_of(task: bytes) -> bytes:
    """What a configuration of statistics names in place of a model, 32 bytes.

    `task` is the digest of the task's code. The values that are summed do not change from one run
    to the next, so a device is in sums of them only with one survivor set, in all runs of that
    code.
    """
    return tagged_hash("statistics", task)


def buffer_name(run_id: str, round_: int) -> bytes:
    """The name of a buffer, 32 bytes, which its devices agree on in place of a model's SHA-256."""
    return hashlib.sha256(f"isthmus/buffer/{run_id}/{round_}".encode()).digest()
