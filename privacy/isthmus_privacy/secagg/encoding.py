"""Encode updates as ring vectors, and decode a sum to the weighted mean.

An element x of a client with weight w is clipped, weighted and stochastically rounded to

    u = floor((clip(x) * w / W + C) * s + dither),   0 <= u <= levels,   s = (levels - 1) / 2C

with W the largest weight and a uniform dither from the operating system's randomness, which makes
the rounding unbiased. `levels` is chosen so that no sum of n clients wraps, so the sum in the ring
is the sum of integers, and `sum(u) / s - mC` is the sum of x * w / W over the m survivors. An odd
`levels` has a level for 0, so that what no client changes is exactly 0 in the sum.

With `RoundConfig.whole` the elements are whole numbers of -L/2 .. L/2 for L = `levels`. Half of L
is added to each, and `decode` gives their exact sums. Bins of a histogram, which are 0 or 1, have
two levels and mostly a ring of 16 bits.

The N elements are followed by the weight (exact), the fraction of clipped elements, and the
configured slots. So no value of a single client is sent in clear, and the server learns from the
sum if its clipping bound is too tight. With a codec these have a ring of their own.

With `RoundConfig.noise` the vector is that of `isthmus_privacy.dp.noisy_vector` and nothing else.

One client can add anything to a sum in the ring, and is not seen. `decode` therefore refuses sums
that honest clients cannot have: with the weight w of the sum, an element is within C x w / W, so
that each element of the mean is within C, whatever one or many clients have added.

>>> config = RoundConfig(run_id="demo", round=0, attempt=0, model_hash=bytes(32),
...                      purpose=bytes(32), size=2, clients_max=3, weight_max=10, clip=2.0)
>>> first = encode(config, torch.tensor([1.0, -0.5]), weight=10)
>>> second = encode(config, torch.tensor([0.5, 9.0]), weight=5)
>>> mean = decode(config, first.vector + second.vector, clients=2)
>>> [round(x, 4) for x in mean.vector.tolist()], mean.weight, round(mean.clipped, 4)
([0.8333, 0.3333], 15, 0.25)
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from isthmus.errors import AggregationAborted, UpdateError
from isthmus_privacy.compression.round_vector import RoundVector
from isthmus_privacy.compression.update_codec import UpdateCodec, round_to_levels, value_of
from isthmus_privacy.crypto import refusal
from isthmus_privacy.crypto.canonical import tagged_hash
from isthmus_privacy.crypto.masking import TILE, cipher, ring_vector
from isthmus_privacy.dp import noisy_vector
from isthmus_privacy.dp.distributed import DistributedNoise
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.ranges import Ranges
from isthmus_privacy.secagg.spacing import Spacing
from isthmus_privacy.slots import MAGNITUDE, OVER_WEIGHT, UNUSABLE, WITHIN_CLIP, Slot

_NONE: Mapping[str, float] = MappingProxyType({})
_DITHER_BITS = 32
_ROUNDED_BY = 2
"""Steps by which the encoding of one element may differ from its value: one for the rounding, and
one for float64, which represents the wide ring's values to a small part of a step."""
_CANCELLED = 10.0
"""Binary digits by which the magnitude of what clients send may be below that of the mean."""


@dataclasses.dataclass
class Encoded:
    """One client's update as a ring vector: plaintext until it is masked in place."""

    config_hash: bytes
    ring: RoundVector
    masked: bool = False
    sent: torch.Tensor | None = None
    """The part of the update that this vector stands for, (N) float32; None without a codec."""

    @property
    def vector(self) -> torch.Tensor:
        """(length) the elements of `ring`."""
        return self.ring.elements


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """The weighted mean of the survivors' updates and figures."""

    vector: torch.Tensor
    """(N) float32: sum of weight x update over that of weights; with `whole` the sums, int64."""
    weight: int
    """Exact sum of weights."""
    clients: int
    """Number of clients in the sum."""
    figures: dict[str, float]
    """Values of the slots: exact sums of counts, weighted means of averages."""
    clipped: float | None
    """Mean over clients of the fraction of clipped elements; None with noise, as it is not sent."""
    rounding: float
    """Bound on the standard deviation of the error of an element that is due to rounding."""
    noise: float = 0.0
    """Standard deviation of the noise of an element."""


def encode(
    config: RoundConfig,
    update: torch.Tensor,
    *,
    weight: int,
    figures: Mapping[str, float] = _NONE,
    dither_key: bytes | None = None,
    spacing: Spacing | None = None,
) -> Encoded:
    """Encode a client's update and figures as a new ring vector.

    Args:
        config: the round's configuration, checked.
        update: (N) any real floating type, on the CPU; not modified. With `config.whole`: int64.
        weight: number of examples, 0 .. config.weight_max; 0 for a vector that does not count, of
            which the figure `unusable` says so.
        figures: slot name to value, one for each slot.
        dither_key: 32-byte seed of the stochastic rounding, for reproducible vectors, which need
            not be secret; None draws one. With noise all randomness is the operating system's.
        spacing: of the numbers that the update is a difference of, which is then hidden, see
            `isthmus_privacy.secagg.spacing`; `dither_key` has to be secret for that. Without
            effect with a codec, noise or whole numbers: see `hide_spacing`.

    Raises:
        UpdateError: wrong length, an element that is not finite, or a weight or figure out of
            range.
    """
    _check(config, update, weight, figures)
    ring = config.new_vector()
    vector = ring.elements
    if config.codec is not None:
        others = encode(
            config.figures, torch.empty(0), weight=weight, figures=figures, dither_key=dither_key
        )
        ring.figures.copy_(others.vector)
        codec = config.codec.in_round(config.round, config.size)
        numbers, values = round_to_levels(codec.project(update), config.clip, config.codec.levels)
        vector.copy_(numbers)
        return Encoded(config.hash, ring, sent=codec.restore(values))
    if config.noise is not None:
        counted = update if weight else torch.zeros(1).expand(config.size)
        noisy_vector.encode(config.noise, counted, seed=_rotation_seed(config), out=vector)
        return Encoded(config.hash, ring)
    keys = _dither_keys(dither_key)
    share = weight / config.weight_max
    clipped = 0
    if config.whole:
        torch.add(update, config.levels // 2, out=vector[: config.size])
    else:
        own = vector[: config.size]
        hidden = None
        if spacing is not None:
            hidden = _Hidden(spacing, _dither_keys(_derived(dither_key)), config.size)
        clipped = _quantise(update, config.clip, config.levels, share, own, keys, hidden)
    vector[config.size] = weight
    vector[config.size + 1] = math.ceil(clipped / max(1, config.size) * config.levels)
    for i, slot in enumerate(config.slots, start=config.size + 2):
        if slot.exact:
            vector[i] = int(figures[slot.name])
        else:
            value = torch.tensor([figures[slot.name]], dtype=torch.float64)
            _quantise(value, slot.maximum, config.levels, share, vector[i : i + 1], keys)
    return Encoded(config.hash, ring)


def hide_spacing(update: torch.Tensor, spacing: Spacing, dither_key: bytes) -> None:
    """Hide the spacing of an update (N), float32, in place, as `encode` does.

    For one whose norm is then bounded, or of which a part is kept for later: what is added belongs
    to it. Of elements of millions of spacings float32 leaves it only a few digits, so `encode` adds
    it in float64.

    Args:
        update: changed in place.
        spacing: of its elements.
        dither_key: as for `encode`, and secret.
    """
    hidden = _Hidden(spacing, _dither_keys(_derived(dither_key)), len(update))
    for part in _parts(update):
        exact = part.double()
        hidden.add_to(exact)
        part.copy_(exact)


def lost_in_clipping(values: torch.Tensor, clip: float) -> float:
    """The part of the 2-norm of a vector that its clipping to [-clip, clip] removes, 0 to 1.

    >>> lost_in_clipping(torch.tensor([3.0, 4.0]), 4.0), lost_in_clipping(torch.tensor([8.0]), 4.0)
    (0.0, 0.5)
    """
    before = after = 0.0
    for part in _parts(values):
        before += float(part.double().square().sum())
        after += float(part.double().clamp(-clip, clip).square().sum())
    return 1 - math.sqrt(after / before) if before else 0.0


def decode(
    config: RoundConfig,
    total: torch.Tensor,
    figures: torch.Tensor | None = None,
    *,
    clients: int,
    ranges: Ranges | None = None,
    awaits_noise: bool = False,
) -> Aggregate:
    """Compute the weighted mean from the unmasked sum.

    Args:
        config: the round's configuration.
        total: (length) sum of the elements of the survivors' encoded vectors.
        figures: with a codec, the sum of their figures.
        clients: m, the number of clients in the sum.
        ranges: of these clients, and perhaps of others that were lost since; None if unknown.
        awaits_noise: the server adds noise to the mean, and compares it then. A client that has
            added a number of its choice would learn from a refusal of the exact sum on which side
            of a bound the others' sum is.

    Raises:
        AggregationAborted: vectors of honest clients cannot have this sum, or the total weight
            is 0.
    """
    if config.noise is not None:
        return _decode_noisy(config, config.noise, total, clients)
    if config.codec is not None:
        return _decode_compressed(config, total, figures, clients, ranges)
    slots = total[config.size :].to(torch.int64)
    if config.bits < 64:
        slots &= (1 << config.bits) - 1
    weight, clipped, *rest = slots.tolist()
    usable = _usable(config, rest, clients)
    shares = 0 <= clipped <= usable * config.levels  # each says what share of its elements was
    noisy = WITHIN_CLIP.name if awaits_noise else ""
    if not (shares and _fit(config, rest, weight, clients, usable, without=noisy)):
        _refuse_range(clients)
    if not awaits_noise and not _in_range(config, total, weight, clients):
        _refuse_range(clients)
    if ranges is not None:
        _check_weight(ranges, weight, usable, config.weight_max)
    if weight == 0:
        refusal.refuse("zero-total-weight", f"the {clients} vectors in the sum have no weight")
    scale = config.weight_max / weight
    vector = torch.empty(config.size, dtype=torch.int64 if config.whole else torch.float32)
    for values, out in zip(_tiles(config, total), _parts(vector), strict=True):
        if config.whole:
            torch.sub(values, clients * (config.levels // 2), out=out)
        else:
            out.copy_(_dequantise(config, values, clients).mul_(scale))
    by_name: dict[str, float] = {}
    for slot, value in zip(config.slots, rest, strict=True):
        by_name[slot.name] = float(value) if slot.exact else _average(config, slot, value, clients)
        if not slot.exact:
            by_name[slot.name] *= scale
    # The error of floor(x + dither) has a variance of at most 1/4.
    step = 0.0 if config.whole else 2 * config.clip / (config.levels - 1)
    rounding = math.sqrt(clients) / 2 * scale * step
    return Aggregate(vector, weight, clients, by_name, clipped / config.levels / clients, rounding)


def _decode_compressed(
    config: RoundConfig,
    total: torch.Tensor,
    figures: torch.Tensor | None,
    clients: int,
    ranges: Ranges | None,
) -> Aggregate:
    """The mean of what was sent; elements that were not sent are zero."""
    codec = config.codec
    assert codec is not None
    assert figures is not None
    mean = decode(config.figures, figures, clients=clients, ranges=ranges)
    numbers = total.to(torch.int64) & ((1 << config.bits) - 1)
    unusable = int(mean.figures.get(UNUSABLE.name, 0))
    # A client without a usable update sends zeros, here the middle of the levels.
    low = unusable * codec.highest // 2 if isinstance(codec, UpdateCodec) else 0
    if len(numbers) and not low <= int(numbers.min()) <= int(numbers.max()) <= (
        clients * codec.highest - low
    ):
        _refuse_range(clients)
    scale = config.weight_max / mean.weight
    values = value_of(numbers, clients, config.clip, codec.levels)
    if MAGNITUDE.name in mean.figures:
        least = _least_magnitude(values, clients - unusable)
        mean.figures[MAGNITUDE.name] = max(mean.figures[MAGNITUDE.name], least)
    values.mul_(scale)
    try:
        vector = codec.in_round(config.round, config.size).restore(values.float())
    except UpdateError as error:  # of a codec of another package
        raise AggregationAborted(str(error)) from error
    rounding = math.sqrt(clients / 3) * scale * config.clip / codec.highest
    return dataclasses.replace(mean, vector=vector, clipped=None, rounding=rounding)


def _least_magnitude(sums: torch.Tensor, clients: int) -> float:
    """About the least magnitude of what so many clients have sent that have these sums (kept).

    The root mean square of a sum is at most the sum of the clients'. They report the mean of
    logarithms, which is less where clients differ, hence the room.
    """
    mean_square = float(sums.square().mean()) if len(sums) else 0.0
    if not mean_square:
        return -math.inf
    return math.log2(mean_square) / 2 - math.log2(max(1, clients)) - _CANCELLED


def _usable(config: RoundConfig, rest: Sequence[int], clients: int) -> int:
    """Clients with a usable vector, of a sum with these slots; all if none says so."""
    for slot, value in zip(config.slots, rest, strict=True):
        if slot.name == UNUSABLE.name and slot.exact:
            return clients - min(value, clients)
    return clients


def _check_weight(ranges: Ranges, weight: int, usable: int, weight_max: int) -> None:
    """Refuse a weight that devices with these numbers of examples cannot have."""
    least, most = ranges.weight_bounds(usable, weight_max)
    if not least <= weight <= most:
        refusal.refuse(
            "weight-not-of-ranges",
            f"the unmasked sum of {usable} updates has a weight of {weight} examples, and by what "
            f"these devices have said before, they have {least} to {most}: one sent a vector that "
            "does not have the agreed form",
        )


def _refuse_range(clients: int) -> None:
    refusal.refuse(
        "sum-out-of-range",
        f"the unmasked sum of {clients} clients is out of range: a client sent a vector that "
        "does not have the agreed form",
    )


def _rotation_seed(config: RoundConfig) -> bytes:
    return tagged_hash("rotation-signs", config.hash)


def _decode_noisy(
    config: RoundConfig, noise: DistributedNoise, total: torch.Tensor, clients: int
) -> Aggregate:
    """The mean of the clipped updates with noise.

    Honest clients can have any sum whose 2-norm is not above all clipping bounds and the noise.
    """
    if noisy_vector.norm_of_sum(total) > noise.largest_sum(config.size, clients):
        _refuse_range(clients)
    vector = noisy_vector.decode(noise, total, seed=_rotation_seed(config), clients=clients)
    rounding = 1 / (2 * noise.scale * math.sqrt(clients))
    of_mean = noise.noise_of_mean(config.size, clients)
    return Aggregate(vector, clients, clients, {}, None, rounding, of_mean)


def _check(
    config: RoundConfig, update: torch.Tensor, weight: int, figures: Mapping[str, float]
) -> None:
    """Refuse an update or figures that cannot be encoded."""
    of_kind = update.dtype == torch.int64 if config.whole else update.is_floating_point()
    if update.shape != (config.size,) or not of_kind:
        kind = "int64" if config.whole else "floating-point"
        refusal.refuse(
            "update-wrong-length",
            f"the update is {tuple(update.shape)} {update.dtype}; {config.size} {kind} elements "
            "are expected",
        )
    half = config.levels // 2
    if config.whole and not bool(((update >= -half) & (update <= half)).all()):
        refusal.refuse(
            "update-element-too-large", f"a whole number of the update is not in -{half} .. {half}"
        )
    for i, part in enumerate(_parts(update) if not config.whole else ()):
        # The extremes of a tile with a NaN are NaN; this is ten times as fast as isfinite().
        if not all(math.isfinite(end) for end in torch.aminmax(part)):
            index = i * TILE + int((~torch.isfinite(part)).nonzero()[0])
            refusal.refuse(
                "update-not-finite",
                f"element {index} of the update is {float(update[index])}: training diverged on "
                "this device, so it does not take part",
            )
    if isinstance(weight, bool) or not 0 <= weight <= config.weight_max or weight != int(weight):
        wanted = f"a whole number of 0 .. weight_max={config.weight_max}"
        refusal.refuse("weight-out-of-range", f"weight={weight} is not {wanted}")
    if sorted(figures) != [slot.name for slot in config.slots]:
        refusal.refuse(
            "slot-names-differ",
            f"figures {sorted(figures)} were given for the slots {[s.name for s in config.slots]}",
        )
    for slot in config.slots:
        value = figures[slot.name]
        if not math.isfinite(value):
            refusal.refuse("slot-not-finite", f"figure {slot.name}={value} is not finite")
        if slot.exact and not (0 <= value <= slot.maximum and value == int(value)):
            refusal.refuse(
                "count-out-of-range",
                f"figure {slot.name}={value} is not a whole number of 0 .. {slot.maximum:.0f}",
            )


def _quantise(
    values: torch.Tensor,
    clip: float,
    levels: int,
    relative_weight: float,
    out: torch.Tensor,
    keys: Iterator[bytes],
    hidden: _Hidden | None = None,
) -> int:
    """Write the quantised values to `out` and return the number of clipped elements.

    Scratch memory is one tile for any length.

    Args:
        values: (N) finite.
        clip: of the configuration, or the maximum of a slot.
        levels: of the configuration.
        relative_weight: w / W.
        out: (N) ring elements.
        keys: provides one dither key for each tile.
        hidden: hides the spacing of the values; None for values as they are.
    """
    scale = (levels - 1) / (2 * clip)
    scratch = torch.empty(3, min(TILE, len(values)), dtype=torch.float64)
    middle, rest = divmod(levels - 1, 2)
    # Dither words are read as signed, so half of the dither's range is added here.
    scratch[2].fill_(rest / 2 + 0.5)
    clipped = 0
    tiles = zip(_parts(values), _parts(out), _dither(len(values), keys), strict=True)
    for part, target, dither in tiles:
        x, y, zero = scratch[:, : len(part)]
        low, high = torch.aminmax(part)
        x.copy_(part)
        is_clipped = bool(low < -clip or high > clip)
        if is_clipped:
            clipped += int((x.abs() > clip).sum())
        if hidden is not None:
            hidden.add_to(x)
        if is_clipped or hidden is not None:
            x.clamp_(-clip, clip)
        torch.add(zero, x, alpha=relative_weight * scale, out=y)
        # The middle is added last: next to it, float64 would round a dither just below 1 up.
        y.add_(x.copy_(dither), alpha=2.0**-_DITHER_BITS).floor_().add_(middle)
        # With the most levels the lower end of the range can be half a level off in float64, and a
        # sum of clients that are all there would be one that honest clients cannot have.
        y.clamp_(min=0)
        target.copy_(y.to(torch.int64) if target.dtype == torch.int16 else y)
    return clipped


class _Hidden:
    """Secret numbers that hide the spacing of values, for one tile of these after another."""

    def __init__(self, spacing: Spacing, keys: Iterator[bytes], count: int) -> None:
        """`keys` provides one key for each tile of `count` values."""
        self._spacing = spacing
        self._words = _dither(count, keys)
        self._start = 0

    def add_to(self, values: torch.Tensor) -> None:
        """Add to the next tile (float64), in place, numbers that are uniform over one spacing."""
        numbers = self._spacing.around(values, self._start).mul_(next(self._words))
        values.add_(numbers.mul_(2.0**-_DITHER_BITS))
        self._start += len(values)


def _derived(key: bytes | None) -> bytes | None:
    """A key of its own for what hides the spacing: the rounding has the other."""
    return None if key is None else hashlib.sha256(b"isthmus/spacing/" + key).digest()


def _dither_keys(key: bytes | None) -> Iterator[bytes]:
    """Endless stream of keys: derived from `key` and a counter, or random if it is None."""
    for counter in itertools.count():
        if key is None:
            yield os.urandom(32)
        else:
            yield hashlib.sha256(key + counter.to_bytes(8, "little")).digest()


def _dither(count: int, keys: Iterator[bytes]) -> Iterator[torch.Tensor]:
    """Yield tiles of uniform signed 32-bit words, each from its own key."""
    size = 4 * min(count, TILE)
    blank = memoryview(bytes(size))
    stream = bytearray(size)
    words = ring_vector(stream, 32)
    for start in range(0, count, TILE):
        part = words[: min(TILE, count - start)]
        cipher(next(keys)).update_into(blank[: 4 * len(part)], stream)
        yield part


def _tiles(config: RoundConfig, total: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the update's part of a sum in tiles of int64, non-negative for rings below 64 bits."""
    mask = (1 << config.bits) - 1 if config.bits < 64 else -1
    for part in _parts(total[: config.size]):
        yield part.to(torch.int64) & mask


def _parts(vector: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the vector's tiles as views."""
    for start in range(0, len(vector), TILE):
        yield vector[start : start + TILE]


def _in_range(config: RoundConfig, total: torch.Tensor, weight: int, clients: int) -> bool:
    """Whether vectors of honest clients with this weight together can have these elements."""
    if config.whole:
        low = 0
        high = clients * config.levels
    else:
        # A client's element is a number around (levels - 1) / 2, as far from it as its weight
        # allows; one of weight 0 is in the middle. All of them are rounded.
        middle = clients * (config.levels - 1) / 2
        reach = (config.levels - 1) / 2 * (weight / config.weight_max) + _ROUNDED_BY * clients
        low = max(0, math.ceil(middle - reach))
        high = min(clients * config.levels, math.floor(middle + reach))
    for tile in _tiles(config, total):
        smallest, largest = (int(end) for end in torch.aminmax(tile))
        if not low <= smallest <= largest <= high:
            return False
    return True


def _fit(
    config: RoundConfig,
    sums: Sequence[int],
    weight: int,
    clients: int,
    usable: int,
    *,
    without: str = "",
) -> bool:
    """Whether the weight and the sums of the slots can come from honest clients.

    One without a usable vector has the weight 0, and of the counts only that it has none. Each
    other one weighs 1 at least. The slot of the name `without` is not looked at.
    """
    share = weight / config.weight_max
    rounding = 2 * clients / (config.levels - 1)
    least = usable
    for slot, value in zip(config.slots, sums, strict=True):
        if slot.name == without:
            continue
        if not slot.exact:
            if abs(_average(config, slot, value, clients)) > slot.maximum * (share + rounding):
                return False
            continue
        of = clients if slot.name == UNUSABLE.name else usable
        if not 0 <= value <= of * slot.maximum:
            return False
        if slot.name == OVER_WEIGHT.name:  # each counts as the largest weight
            least = max(least, value * config.weight_max)
    return least <= weight <= usable * config.weight_max


def _dequantise(config: RoundConfig, values: torch.Tensor, clients: int) -> torch.Tensor:
    """Convert sums of quantised values, int64, to sums of x * w / W, float64; overwrites them."""
    # The subtraction is one of whole numbers, so that 0 stays 0.
    centred = values.mul_(2).sub_(clients * (config.levels - 1))
    return centred.to(torch.float64).mul_(config.clip / (config.levels - 1))


def _average(config: RoundConfig, slot: Slot, value: int, clients: int) -> float:
    values = torch.tensor([value])
    return float(_dequantise(dataclasses.replace(config, clip=slot.maximum), values, clients))
