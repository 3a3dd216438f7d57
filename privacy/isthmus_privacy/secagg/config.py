"""Configuration of one attempt at one round; clients agree to it by signing its hash.

>>> config = RoundConfig(
...     run_id="demo", round=3, attempt=0, model_hash=bytes(32), purpose=bytes(32), size=1000,
...     clients_max=20)
>>> config.check()
>>> config.levels * config.clients_max < 2**config.bits
True
>>> ClientRequirements(honest_min=13).check(config)
Traceback (most recent call last):
    ...
isthmus.errors.PeerMisbehaved: a sum over 14 of 20 devices, of which 2 may collude ...
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from isthmus.system.clocks import utc
from isthmus_privacy.compression.round_vector import FIGURE_BITS, RoundVector
from isthmus_privacy.compression.sum_codecs import ProvidedSumCodec
from isthmus_privacy.compression.update_codec import UpdateCodec
from isthmus_privacy.crypto import refusal
from isthmus_privacy.crypto.canonical import (
    FLAG,
    NUMBER,
    REAL,
    Message,
    exactly,
    items,
    nested,
    one_of,
    optional,
    tagged_hash,
    text,
    trailing,
)
from isthmus_privacy.dp.distributed import DistributedNoise
from isthmus_privacy.random_groups import RandomGroup
from isthmus_privacy.secagg.graph import (
    COMPLETE_UP_TO,
    GraphParameters,
    corrupt_clients,
    graph_parameters,
)
from isthmus_privacy.secagg.lottery import DRAW_SECONDS, MILLION, largest_share
from isthmus_privacy.slots import COMPRESSED_SLOTS, MAX_COUNT, TRAINING_SLOTS, Slot

# Both are odd, so that 0 is the middle level: an element that no device changes stays as it is, and
# is not rounded to either side.
MAX_LEVELS = (1 << 28) - 1
"""Finest quantisation: its step is well below the spacing of float32 at the clipping bound."""

WIDE_LEVELS = (1 << 52) - 1
"""Finest quantisation in a ring of 64 bits, for elements of very different sizes. The sum of
`MAX_COHORT` clients does not wrap, and float64 represents each level."""

COUNT_LEVELS = 1 << 51
"""Levels of an element that is a whole number, from -2**50 to 2**50, in a ring of 64 bits."""

BIN_LEVELS = 2
"""Levels of an element that is 1 or 0, as in a histogram that has each client once: their sum is at
most the number of clients, for which a small ring is enough, see `smallest_ring`."""

MAX_COHORT = 2048
"""Largest cohort: a roster has to fit a message, and the search for the graph grows with it."""

MAX_SIZE = 1 << 40
MAX_SLOTS = 256
RING_BITS = (16, 32, 64)
"""Rings of vectors without a codec; with one, any whole number of bits up to 32."""


def finest_levels(clients: int, bits: int) -> int:
    """The most levels, and an odd number, with which a sum of so many clients cannot wrap.

    >>> finest_levels(20, 32)
    214748363
    """
    finest = min(MAX_LEVELS, ((1 << bits) - 1) // clients)
    return finest - (finest + 1) % 2


def smallest_ring(clients: int, levels: int) -> int:
    """Bits of the smallest ring in which a sum of so many clients cannot wrap.

    Args:
        clients: most clients in the sum.
        levels: of an element, see `RoundConfig.levels`.

    Raises:
        ValueError: it can in every ring.

    >>> smallest_ring(1000, BIN_LEVELS), smallest_ring(40_000, BIN_LEVELS)
    (16, 32)
    """
    for bits in RING_BITS:
        if clients * levels < 1 << bits:
            return bits
    raise ValueError(f"{clients} clients x {levels} levels do not fit {RING_BITS[-1]} bits")


@dataclasses.dataclass(frozen=True)
class SetUpForTwo(Message):
    """Keys and shares of a sum are also for a next one, of the clients that are in this one."""

    TAG = "set-up-for-two"
    FIELDS = {}


@dataclasses.dataclass(frozen=True)
class SetUpBefore(Message):
    """Keys and shares of a sum are those of a sum before it, which was set up for two."""

    TAG = "set-up-before"
    FIELDS = {"config": exactly(32)}

    config: bytes
    """Hash of the configuration of the sum before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundConfig(Message):
    """Parameters of one attempt at one round that all parties agree on."""

    TAG = "round-config"
    FIELDS = {
        "run_id": text(128),
        "round": NUMBER,
        "attempt": NUMBER,
        "model_hash": exactly(32),
        "purpose": exactly(32),
        "size": NUMBER,
        "slots": items(nested(Slot), MAX_SLOTS),
        "clients_max": NUMBER,
        "clients_min": NUMBER,
        "corrupt_permille": NUMBER,
        "dropout_permille": NUMBER,
        "complete_up_to": NUMBER,
        "bits": NUMBER,
        "levels": NUMBER,
        "clip": REAL,
        "whole": FLAG,
        "weight_max": NUMBER,
        "draw": NUMBER,
        "selected_ppm": NUMBER,
        "noise": optional(nested(DistributedNoise)),
        "codec": optional(one_of(ProvidedSumCodec, UpdateCodec)),
        "set_up": trailing(one_of(SetUpForTwo, SetUpBefore)),
    }

    run_id: str
    round: int
    attempt: int
    """Increases with every attempt at a round, also across restarts of the server."""
    model_hash: bytes
    """SHA-256 of the model that all clients start from: none can be sent a different one."""
    purpose: bytes
    """Hash of what the sum is for, see `isthmus_privacy.purpose`: none can do other work."""
    size: int
    """N: number of elements of the update."""
    slots: tuple[Slot, ...] = ()
    clients_max: int
    """Maximum number of clients in the roster; the bit budget is for this number."""
    clients_min: int = 3
    """Minimum number of clients in a sum, even if the margins below allow fewer."""
    corrupt_permille: int = 100
    """gamma, in thousandths: fraction of the clients that may collude with the server."""
    dropout_permille: int = 300
    """delta, in thousandths: fraction of the clients that may drop out."""
    complete_up_to: int = COMPLETE_UP_TO
    """Rosters of up to this number of clients use the complete graph."""
    bits: int = 32
    """The ring is Z/2^bits; also the size of one element on the wire."""
    levels: int = 0
    """Values of a client's quantised element; 0 selects the most, and an odd number, that cannot
    wrap."""
    clip: float = 1.0
    """Elements of the update are clipped to [-clip, clip]."""
    whole: bool = False
    """Elements are whole numbers, which are summed exactly: not clipped, weighted or rounded. They
    have `COUNT_LEVELS`, or in a histogram of clients `BIN_LEVELS`."""
    weight_max: int = 1
    """Largest weight (number of examples) of one client."""
    draw: int = 0
    """Unix seconds at which the server selected the clients; decides their tickets."""
    selected_ppm: int = MILLION
    """Millionths of all enrolled clients whose tickets may be in the roster; see `lottery`."""
    noise: DistributedNoise | None = None
    """Noise that the clients add, for differential privacy. The masked vector then has the clipped
    update and nothing else; `levels` and `clip` are not used, and every weight is 1."""
    codec: UpdateCodec | ProvidedSumCodec | None = None
    """How clients compress their update, which they have multiplied by their weight / `weight_max`
    before; then `clip` bounds what they send, and `bits` and `levels` go with the codec."""
    set_up: SetUpForTwo | SetUpBefore | None = None
    """Whether this sum shares its keys and shares with the one after it, or before it; None for a
    sum with a set-up of its own."""

    def __post_init__(self) -> None:
        """Compute `levels` if it is 0."""
        if self.levels == 0 and self.whole:
            object.__setattr__(self, "levels", COUNT_LEVELS)
        if self.levels == 0 and self.clients_max > 0 and self.bits in RING_BITS:
            object.__setattr__(self, "levels", finest_levels(self.clients_max, self.bits))

    @functools.cached_property
    def hash(self) -> bytes:
        """SHA-256 of this configuration, which clients sign."""
        return tagged_hash("config-hash", self.to_bytes())

    @functools.cached_property
    def encoding_hash(self) -> bytes:
        """SHA-256 of what a client's masked vector depends on, besides what is encoded.

        With a codec, the round selects the elements.
        """
        encoding = dataclasses.replace(
            self,
            run_id="",
            round=0 if self.codec is None else self.round,
            attempt=0,
            model_hash=bytes(32),
            purpose=bytes(32),
            clients_max=0,
            clients_min=0,
            corrupt_permille=0,
            dropout_permille=0,
            complete_up_to=0,
            draw=0,
            selected_ppm=0,
            set_up=None,
        )
        return tagged_hash("encoding-hash", encoding.to_bytes())

    def encoded_as(self, other: RoundConfig) -> RoundConfig:
        """The attempt of this configuration with the cohort and the encoding of another one."""
        return dataclasses.replace(
            other,
            run_id=self.run_id,
            round=self.round,
            attempt=self.attempt,
            model_hash=self.model_hash,
            purpose=self.purpose,
            draw=self.draw,
            selected_ppm=self.selected_ppm,
            set_up=self.set_up,
        )

    @property
    def is_for_two(self) -> bool:
        """Whether the set-up of this sum is also that of the next one."""
        return isinstance(self.set_up, SetUpForTwo)

    @property
    def advertised_hash(self) -> bytes:
        """Hash of the configuration for which the clients of this sum have advertised keys."""
        return self.set_up.config if isinstance(self.set_up, SetUpBefore) else self.hash

    def follows(self, first: RoundConfig) -> bool:
        """Whether this sum may use the set-up of a first one: the cohorts are bounded alike."""
        return (
            first.is_for_two
            and self.set_up == SetUpBefore(first.hash)
            and _cohort_of(self) == _cohort_of(first)
        )

    @property
    def length(self) -> int:
        """Elements of a masked vector.

        The update, weight, clipped fraction, and the slots. With noise, the update alone; with a
        codec, what is sent of the update, as the others are figures of a ring of their own.
        """
        if self.noise is not None:
            return self.size
        if self.codec is not None:
            return self.codec.kept(self.size)
        return self.size + 2 + len(self.slots)

    @property
    def payload_bytes(self) -> int:
        """Size of a masked vector in bytes."""
        figures = 0 if self.codec is None else self.figures.length
        return RoundVector.payload_bytes(length=self.length, bits=self.bits, figures=figures)

    def new_vector(self) -> RoundVector:
        """Zeros of the form of a masked vector."""
        figures = 0 if self.codec is None else self.figures.length
        return RoundVector(length=self.length, bits=self.bits, figures=figures)

    @property
    def figures(self) -> RoundConfig:
        """The configuration of the weight and figures alone, which a codec leaves as they are."""
        return dataclasses.replace(self, codec=None, size=0, bits=FIGURE_BITS, levels=0)

    def graph(self, clients: int) -> GraphParameters:
        """Parameters of the communication graph for a roster of `clients`."""
        return graph_parameters(
            clients,
            corrupt_permille=self.corrupt_permille,
            dropout_permille=self.dropout_permille,
            clients_min=self.clients_min,
            complete_up_to=self.complete_up_to,
        )

    @property
    def honest_survivors(self) -> int:
        """Fewest clients of any sum that do not collude with the server, for every roster."""
        return self.clients_min - corrupt_clients(self.clients_max, self.corrupt_permille)

    def check(self) -> None:
        """Refuse an unsafe configuration; both the server and the clients call this.

        Raises:
            PeerMisbehaved: a field is invalid, a sum could wrap, or two groups of clients could
                agree to different survivor sets.
        """
        if (invalid := self._malformed()) is not None:
            refusal.refuse("config-malformed", f"{invalid} is not a valid configuration")
        if 2 * self.dropout_permille >= 1000 - self.corrupt_permille:
            refusal.refuse(
                "config-margins",
                f"dropout_permille={self.dropout_permille} is not below half of the clients that "
                f"corrupt_permille={self.corrupt_permille} leaves, so two survivor sets could both "
                "reach a quorum",
            )
        ring = 1 << self.bits
        if self.clients_max * self.levels >= ring:
            refusal.refuse(
                "config-values-wrap",
                f"clients_max={self.clients_max} x levels={self.levels} does not fit "
                f"{self.bits} bits",
            )
        if self.codec is not None:
            self.figures.check()
            return
        largest = max([self.weight_max, *(s.maximum for s in self.slots if s.exact)])
        if self.clients_max * largest >= ring:
            refusal.refuse(
                "config-slots-wrap",
                f"clients_max={self.clients_max} x a weight or count of {largest:.0f} does not fit "
                f"{self.bits} bits",
            )
        if self.noise is not None:
            self.noise.check(
                self.size,
                clients=self.clients_max,
                honest=self.honest_survivors,
                bits=self.bits,
                alone=not (self.whole or self.slots) and self.weight_max == 1,
            )

    def check_size(self, size: int) -> None:
        """Refuse a configuration of a longer or shorter vector than the client gives.

        Zeros would be given in its place, whatever memory these take.

        Args:
            size: elements of the client's vector.

        Raises:
            PeerMisbehaved: the numbers differ.
        """
        if self.size != size:
            refusal.refuse(
                "config-size-differs",
                f"a vector of {self.size} elements is wanted, and this device gives one of {size}",
            )

    def check_form(self, expected: Sequence[Slot], *, whole: int) -> None:
        """Refuse a configuration with other figures or elements than the client gives.

        What is out of its range could not be encoded, which the server would notice.

        Args:
            expected: the figures.
            whole: levels of the whole numbers that the client sends in place of an update; 0 for an
                update.

        Raises:
            PeerMisbehaved: they differ.
        """
        if (self.levels if self.whole else 0) != whole:
            refusal.refuse(
                "config-elements-differ",
                f"whole={self.whole} with levels={self.levels}, and this device sends "
                + (f"whole numbers in {whole} levels" if whole else "an update"),
            )
        if self.codec is not None and tuple(expected) != COMPRESSED_SLOTS:
            refusal.refuse(
                "codec-for-other-vector",
                f"a codec is for updates alone, and this device gives the figures "
                f"{[slot.name for slot in expected]}, which are of another vector, or of a job "
                "without federated.compression",
            )
        if self.codec is None and tuple(expected) == COMPRESSED_SLOTS:
            refusal.refuse(
                "codec-missing",
                "all elements of an update are wanted, and this device gives the figures of a job "
                "with federated.compression",
            )
        if self.noise is not None:
            # The norm that is clipped has to be that of an update alone, see TRAINING_SLOTS, or of
            # another vector that goes without figures.
            if tuple(expected) not in (TRAINING_SLOTS, ()):
                refusal.refuse(
                    "noise-for-other-vector",
                    f"noise is for updates alone, and this device gives the figures "
                    f"{[slot.name for slot in expected]}, which are of another vector",
                )
            return
        if self.slots != tuple(expected):
            refusal.refuse(
                "config-slots-differ",
                f"the figures {[slot.name for slot in self.slots]} are wanted, and this device "
                f"gives {[slot.name for slot in expected]}, each within its own range",
            )

    @property
    def _most_levels(self) -> int:
        if self.whole:
            return COUNT_LEVELS
        return WIDE_LEVELS if self.bits == 64 else MAX_LEVELS

    def _malformed(self) -> str | None:
        """Return the first invalid field as `name=value`, or None."""
        names = [slot.name for slot in self.slots]
        valid = {
            "bits": self.bits in RING_BITS if self.codec is None else 2 <= self.bits <= 32,
            "codec": self.codec is None
            or (not (self.whole or self.noise) and self.codec.fits(self.levels, self.size)),
            "size": self.size <= MAX_SIZE,
            "clients_min": 2 <= self.clients_min <= self.clients_max,
            "clients_max": self.clients_max <= MAX_COHORT,
            "complete_up_to": self.complete_up_to <= 4096,
            "levels": 2 <= self.levels <= self._most_levels,
            "whole": not self.whole or self.levels in (BIN_LEVELS, COUNT_LEVELS),
            "clip": 2.0**-126 <= self.clip < math.inf,  # a part of it must not be zero
            "weight_max": 1 <= self.weight_max <= MAX_COUNT,
            "corrupt_permille": self.corrupt_permille < 1000,
            "selected_ppm": 1 <= self.selected_ppm <= MILLION,
            "slots": names == sorted(set(names)) and all(slot.is_valid for slot in self.slots),
        }
        for name, is_valid in valid.items():
            if not is_valid:
                return f"{name}={getattr(self, name)!r}"
        return None


def _cohort_of(config: RoundConfig) -> tuple[int, ...]:
    """What decides who may be in a sum, and which graph protects it."""
    return (
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientRequirements:
    """Minimum security a device requires of any configuration."""

    honest_min: int = 10
    """Fewest honest clients in a sum: the smallest sum, less the clients that may collude."""
    corrupt_permille: int = 100
    """Floor for `RoundConfig.corrupt_permille`: colluding clients to be protected against."""
    dropout_permille: int = 450
    """Ceiling for `RoundConfig.dropout_permille`."""
    participations_per_run: int | None = None
    """Maximum number of attempts of one run that this device takes part in; None is no limit. The
    comparisons of a run, and its evaluations, are runs of their own."""
    participations: int | None = None
    """Maximum number of attempts of all runs together; None is no limit."""
    selection_slack: int | None = None
    """How many times more of the enrolled clients than the smallest sum needs may be eligible for
    a round, see `lottery`; None accepts any selection."""
    noise: float | None = None
    """Least noise multiplier of every sum; None accepts sums without noise."""
    epsilon: float | None = None
    """Most epsilon that all sums of this client may imply together, at `delta`; sums without noise
    are refused then."""
    delta: float = 1e-6
    group: RandomGroup | None = None
    """The random group that is summed: everybody in the roster has to be in it. None for a sum of
    any devices. Like the share, it is checked with `selection_slack`."""

    def check(self, config: RoundConfig) -> None:
        """Refuse a configuration that does not meet the requirements.

        Raises:
            PeerMisbehaved: it does not; the message names the field.
        """
        graph = config.graph(config.clients_max)
        if graph.honest_min < self.honest_min:
            refusal.refuse("config-honest-below-floor", self.too_few_honest(graph))
        if config.corrupt_permille < self.corrupt_permille:
            refusal.refuse(
                "config-corruption-below-floor",
                f"corrupt_permille={config.corrupt_permille} is below this device's own floor of "
                f"{self.corrupt_permille}",
            )
        if config.dropout_permille > self.dropout_permille:
            refusal.refuse(
                "config-dropout-above-ceiling",
                f"dropout_permille={config.dropout_permille} is above this device's own ceiling "
                f"of {self.dropout_permille}",
            )
        multiplier = 0.0 if config.noise is None else config.noise.multiplier
        if self.noise is not None and multiplier < self.noise:
            refusal.refuse(
                "config-noise-below-floor",
                f"a sum with noise of {multiplier} times the clipping bound, and this device "
                f"requires {self.noise} (its owner sets [privacy] in policy.toml)",
            )

    def too_few_honest(self, graph: GraphParameters) -> str:
        """The sentence that refuses a cohort whose smallest sum has too few honest clients."""
        return (
            f"a sum over {graph.survivors_min} of {graph.clients} devices, of which "
            f"{graph.survivors_min - graph.honest_min} may collude with the server, is one over "
            f"{graph.honest_min} honest ones, and this device requires {self.honest_min} (its "
            "owner sets [privacy] clients_min in policy.toml)"
        )

    def check_selection(self, config: RoundConfig, population: int, now: float) -> None:
        """Refuse a draw of another time, or a share that lets the server choose among too many.

        Args:
            config: the configuration.
            population: enrolled clients, as in this client's own enrolment.
            now: this client's time in Unix seconds.

        Raises:
            PeerMisbehaved: the message names the numbers.
        """
        if self.selection_slack is None:
            return
        if abs(config.draw - now) > DRAW_SECONDS:
            refusal.refuse(
                "draw-not-now",
                f"the draw is of {utc(config.draw)}, more than a day from the clock of this "
                f"device, which is at {utc(now)}",
            )
        # Not clients_max, which a server could set high without inviting that many. The draw
        # leaves one in so many of the selected devices for a random group.
        needed = config.clients_min * (1 if self.group is None else self.group.count)
        allowed = largest_share(self.selection_slack, needed, population)
        if config.selected_ppm > allowed:
            refusal.refuse(
                "selection-too-wide",
                f"{config.selected_ppm} millionths of {population} enrolled devices may be "
                f"selected for a sum over at least {needed}, and this device's own "
                f"limit is {allowed} (selection_slack={self.selection_slack})",
            )
