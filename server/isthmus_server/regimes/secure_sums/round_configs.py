"""The round configurations of secure sums, and the entries about them in the log of unmaskings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol, TypedDict

from isthmus.job import Job
from isthmus.job.federated import FederatedSection
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_privacy.compression.round_vector import FIGURE_BITS
from isthmus_privacy.compression.sum_codecs import sum_codec
from isthmus_privacy.compression.update_codec import (
    MAX_BITS,
    MAX_MAGNITUDE,
    MAX_ONE_IN,
    MAX_RING_BITS,
    UpdateCodec,
)
from isthmus_privacy.dp.calibration import NoisePlan
from isthmus_privacy.dp.distributed import fit_ring
from isthmus_privacy.purpose import RangePurpose, ranged_model, ranges_run_id
from isthmus_privacy.secagg.config import BIN_LEVELS, RoundConfig, smallest_ring
from isthmus_privacy.secagg.graph import corrupt_clients
from isthmus_privacy.secagg.ranges import (
    SIZE as RANGE_COUNTS,
)
from isthmus_privacy.secagg.ranges import (
    USUAL_CLIP,
    USUAL_WEIGHT,
    Encoding,
    Ranges,
)
from isthmus_privacy.slots import (
    CLIPPING_SLOTS,
    COMPRESSED_SLOTS,
    MEASURING_SLOTS,
    PRIVATE_SLOTS,
    SCORING_SLOTS,
    TRAINING_SLOTS,
)
from isthmus_server.regimes.base import AttemptFailed, AttemptSpec
from isthmus_server.regimes.committed_sums import CommittedSums
from isthmus_server.storage.unmasking_log import Unmasking, UnmaskingLog

CORRUPT_PERMILLE = 100
"""Devices that may collude with a server that others can reach, in thousandths of a cohort."""

UNITS_PER_BIT = 0.5
"""Largest compressed element, in root mean squares of elements, for each bit and one more: about
where the error of a uniform quantiser of Gaussian values is least (Max 1960)."""


class NoiseOfRun(Protocol):
    """The noise of a job with `[privacy]`; a `PrivacyBudget` is one."""

    @property
    def plan(self) -> NoisePlan:
        """Plan of the noise of all rounds."""
        ...

    @property
    def clip(self) -> float:
        """The clipping bound of the next round."""
        ...


class SumsOfRun(Protocol):
    """What the configurations of a run's sums follow from; a `FederatedContext` is one."""

    @property
    def run_id(self) -> str:
        """ID of the run."""
        ...

    @property
    def job(self) -> Job:
        """Job of the run."""
        ...

    @property
    def layout(self) -> TensorLayout:
        """Layout of what is exchanged of the model."""
        ...

    @property
    def privacy(self) -> NoiseOfRun | None:
        """Noise of a job with `[privacy]`; None without."""
        ...

    @property
    def sums(self) -> CommittedSums:
        """The committed sums so far."""
        ...

    @property
    def certified(self) -> bool:
        """Whether devices have certificates, as those that others can reach do."""
        ...


class Margins(TypedDict):
    """Cohort fields of a round configuration; see `RoundConfig`."""

    clients_max: int
    clients_min: int
    corrupt_permille: int
    dropout_permille: int


def margins(context: SumsOfRun, settings: FederatedSection) -> Margins:
    """Bounds on the numbers of participating, dropped-out and corrupt devices.

    Devices without certificates are processes on this machine, none of which is assumed to lie.
    """
    missing = 1000 * (settings.cohort - settings.needed) / settings.cohort
    return {
        "clients_max": settings.cohort,
        "clients_min": settings.needed,
        "corrupt_permille": CORRUPT_PERMILLE if context.certified else 0,
        "dropout_permille": math.ceil(missing),
    }


def range_config(context: SumsOfRun, spec: AttemptSpec, name: bytes, purpose: bytes) -> RoundConfig:
    """The configuration of the sum of ranges before that of `training_config`, for which see."""
    cohort = margins(context, spec.settings)
    return RoundConfig(
        run_id=ranges_run_id(context.run_id),
        round=spec.round,
        attempt=spec.attempt,
        model_hash=ranged_model(name),
        purpose=RangePurpose(purpose).hash,
        size=RANGE_COUNTS,
        slots=SCORING_SLOTS if context.job.federated.privacy is None else PRIVATE_SLOTS,
        **cohort,
        whole=True,
        bits=smallest_ring(cohort["clients_max"], BIN_LEVELS),
        levels=BIN_LEVELS,
        draw=spec.draw,
        selected_ppm=spec.selected_ppm,
    )


def training_config(
    context: SumsOfRun,
    spec: AttemptSpec,
    name: bytes,
    purpose: bytes,
    ranges: Ranges | None = None,
    *,
    wider: bool = False,
) -> RoundConfig:
    """The round configuration that every device of a training attempt signs.

    Args:
        context: of the run.
        spec: of the attempt.
        name: of the model that the devices start from, or of what takes its place.
        purpose: hash of what the devices are asked to do, see `isthmus_privacy.purpose`.
        ranges: of the devices' updates, in a job that finds them.
        wider: devices may be in the sum that are not in `ranges`.

    Raises:
        AttemptFailed: the weights, or the noise, do not fit the ring.
    """
    settings = spec.settings
    encoding = _encoding(context, settings, ranges, wider=wider, scaled=bool(spec.gradient_scale))
    size = spec.result_layout(context.layout).size
    config = RoundConfig(
        run_id=context.run_id,
        round=spec.round,
        attempt=spec.attempt,
        model_hash=name,
        purpose=purpose,
        size=size,
        slots=MEASURING_SLOTS if spec.gradient_scale else TRAINING_SLOTS,
        **margins(context, settings),
        clip=encoding.clip,
        weight_max=encoding.weight_max,
        bits=encoding.bits,
        levels=encoding.levels,
        draw=spec.draw,
        selected_ppm=spec.selected_ppm,
    )
    if settings.compression is not None and not spec.gradient_scale:
        magnitude = context.sums.magnitude_for(config.weight_max)
        known = None if wider else ranges
        return _compressed(config, context.job, context.layout, magnitude, known)
    if context.job.federated.privacy is not None:  # devices send no loss and count the same
        config = dataclasses.replace(config, slots=PRIVATE_SLOTS, weight_max=1)
    privacy = context.privacy
    return config if privacy is None else _with_privacy(config, privacy.plan, privacy.clip)


def _encoding(
    context: SumsOfRun,
    settings: FederatedSection,
    ranges: Ranges | None,
    *,
    wider: bool,
    scaled: bool,
) -> Encoding:
    """The range, the largest weight and the ring of a sum of updates.

    Raises:
        AttemptFailed: compressed updates have a ring of 32 bits for their weights, and these do not
            fit it.
    """
    clients = settings.cohort
    clip = settings.clip
    # Devices count the same where a number of examples would have no noise.
    weight_max = 1 if context.job.privacy is not None else settings.largest_weight
    levels = None
    if settings.compression is not None and not scaled:
        levels = UpdateCodec(one_in=1, bits=_most_bits(clients), seed=0).highest
    if ranges is None:  # all of it is in the job, or follows from its privacy
        weight = weight_max or USUAL_WEIGHT
        # In a ring of 32 bits, updates of which nothing is known could be lost in rounding: small
        # ones, or those of few examples. With privacy, the noise is more than that.
        narrow = levels is not None or context.job.privacy is not None
        usual = (clip or USUAL_CLIP) <= USUAL_CLIP or levels is not None
        bits = 32 if narrow and usual and clients * weight < 1 << 32 else 64
        encoding = Encoding(clip or USUAL_CLIP, weight, bits)
    else:
        encoding = ranges.encoding(
            clients=clients,
            needed=settings.needed,
            clip=clip,
            weight_max=weight_max,
            levels=levels,
            wider=wider,
            liars=corrupt_clients(clients, margins(context, settings)["corrupt_permille"]),
        )
    if levels is not None and encoding.bits > FIGURE_BITS:
        raise AttemptFailed(
            f"{clients} devices that count as up to {encoding.weight_max} examples do not fit the "
            f"{FIGURE_BITS} bits of the figures of compressed updates; set federated.max_examples "
            f"to at most {((1 << FIGURE_BITS) - 1) // clients}, or remove federated.compression",
            [],
        )
    return encoding


def _most_bits(clients: int) -> int:
    """Most bits of a compressed element with which the sum of the levels fits the ring."""
    return min(MAX_BITS, MAX_RING_BITS - clients.bit_length())


def _compressed(
    config: RoundConfig,
    job: Job,
    layout: TensorLayout,
    magnitude: float | None,
    ranges: Ranges | None = None,
) -> RoundConfig:
    """The configuration of a sum of compressed updates.

    Before the magnitude of updates is known, each element has as many bits as the ring allows.
    `ranges` are of the devices' updates, if they are known: one device can move the magnitude.
    """
    compression = job.federated.compression
    assert compression is not None
    clients = config.clients_max
    bits = _most_bits(clients) if magnitude is None else compression.bits
    codec = sum_codec(job, layout, bits)
    bound = config.clip
    if magnitude is not None:
        # A mean of few examples is mostly rounding, by which one device can move it.
        low = -MAX_MAGNITUDE
        high = MAX_MAGNITUDE
        if ranges is not None:
            # A provided codec may send an element as rarely as the shipped one at most.
            rounds = MAX_ONE_IN
            if isinstance(codec, UpdateCodec):
                rounds = max(codec.one_in, *(one_in for _, _, one_in in codec.rates), 1)
            liars = corrupt_clients(clients, config.corrupt_permille)
            least, most = ranges.magnitude_bounds(config.weight_max, rounds, liars)
            low, high = max(low, min(least, high)), min(high, max(most, low))
        magnitude = max(low, min(high, magnitude))
        bound = UNITS_PER_BIT * (bits + 1) * 2.0**magnitude
    return dataclasses.replace(
        config,
        codec=codec,
        bits=codec.ring_bits(clients),
        levels=codec.highest,
        clip=bound,
        slots=COMPRESSED_SLOTS,
    )


def _with_privacy(config: RoundConfig, plan: NoisePlan, clip: float) -> RoundConfig:
    """The configuration of a sum in which each device counts the same and sends no loss.

    Raises:
        AttemptFailed: the noise does not fit the ring.
    """
    slots = PRIVATE_SLOTS if plan.privacy.clip_quantile is None else CLIPPING_SLOTS
    config = dataclasses.replace(config, slots=slots)
    return _with_noise(config, plan, plan.multiplier, clip)


def measuring_config(config: RoundConfig, plan: NoisePlan, norm: float) -> RoundConfig:
    """The configuration of the sum of what devices measure, with the noise that devices add.

    Args:
        config: without it.
        plan: of the job's noise.
        norm: bound on the 2-norm of what one device sends.

    Raises:
        AttemptFailed: the noise does not fit the ring.
    """
    return _with_noise(config, plan, plan.measuring_multiplier, norm)


def _with_noise(
    config: RoundConfig, plan: NoisePlan, multiplier: float, clip: float
) -> RoundConfig:
    config = dataclasses.replace(config, clip=clip, weight_max=1)
    if plan.privacy.mechanism != "distributed":
        return config
    try:
        noise, bits = fit_ring(
            clip=clip,
            multiplier=multiplier,
            honest=config.honest_survivors,
            clients=config.clients_max,
            size=config.size,
        )
    except ValueError as error:
        raise AttemptFailed(f"privacy: {error}", []) from None
    # Without figures, which would be exact sums of what the noise is to hide.
    return dataclasses.replace(config, slots=(), noise=noise, bits=bits, levels=0)


OTHER_VECTOR = "another-vector-for-model"
"""Code with which a device refuses, because it has given another vector for the same model."""


def as_before(log: UnmaskingLog, config: RoundConfig, cohort: Collection[str]) -> RoundConfig:
    """The configuration of a sum that devices repeat: encoded as they have given it before.

    Those that have unmasked a sum of a model give the same vector again and no other one. Devices
    that are not bound in this way are in no sum with them, so a new encoding has no effect on them.
    """
    request = log.request_of(config.model_hash, cohort)
    if request is None:
        return config
    work = getattr(request, str(request.WhichOneof("work")))
    kept = RoundConfig.from_bytes(getattr(work, "ranges", b"") or work.secure)
    # What the plan asks for may have changed; then devices refuse it, and others are asked.
    return config.encoded_as(kept) if kept.size == config.size else config


BeforeUnmasking = Callable[[Unmasking], Awaitable[None]]
"""Stores an entry for the log of unmaskings."""


class AttemptUnmaskings:
    """What one attempt adds to the log of unmaskings."""

    def __init__(self, log: UnmaskingLog, config: RoundConfig, request: link_pb2.Request) -> None:
        """`request`: in which a device joins this sum, or would if it had trained for no other."""
        self._log = log
        self._config = config
        self._request = request.SerializeToString()

    def note(self, survivors: Collection[str]) -> None:
        """Store that these devices may unmask the sum; called before they are asked to."""
        self._log.add(self.entry(survivors))

    async def note_before(self, survivors: Collection[str], store: BeforeUnmasking | None) -> None:
        """Have `store` store what `note` does; None stores it here."""
        if store is None:
            self.note(survivors)
        else:
            await store(self.entry(survivors))

    def note_refusal(self, name: str, code: str) -> None:
        """Store that a device has unmasked a sum of this model, unless the log has that sum.

        Also if it has, and the device gave another vector than it would now.
        """
        config = self._config
        # An entry of a sum says more than a refusal: with which others the device would take part.
        known = self._log.about(config.run_id, config.round, config.model_hash)
        if code == OTHER_VECTOR or not any(name in entry.devices for entry in known):
            self._log.add(dataclasses.replace(self.entry([name]), refused=True))

    def entry(self, devices: Collection[str]) -> Unmasking:
        """The entry for a sum that these devices may unmask."""
        return Unmasking(
            run_id=self._config.run_id,
            round=self._config.round,
            attempt=self._config.attempt,
            model_hash=self._config.model_hash,
            draw=self._config.draw,
            devices=frozenset(devices),
            request=self._request,
        )
