"""How rounds of each kind move a held-out metric, learnt from the rounds that there were.

A round of a kind moves the metric `y` towards the value `c` at which rounds of that kind alone
would end, by a part of the distance that shrinks with it::

    dy/dn = -k (y - c) |y - c|^b        for rounds n of one kind

With `b` near 0 the approach is exponential, with a larger one a power law. The speed `k` and the
end `c` are those of the kind; the first value, `b` and the noise of an evaluation are shared. Kinds
that end at different values pull in opposite directions, as when the datacenter has other data than
the target. What the rounds leave open, a sample of all parameters by Markov chains keeps open (the
affine-invariant ensemble of Goodman and Weare 2010), so that a forecast is a sample too.

Two things that the job sets are known. The first steps of a server's optimizer with momentum are
short, by that momentum. And where an average of the last rounds' models is evaluated, its metric
says little while models of several kinds are in it: such rounds count by the part of the last kind.

The model knows a run by one number. What it leaves out makes its intervals too narrow, for which
`WIDENING` makes up, and `UNSEEN` where a forecast goes on after the rounds that there were.

A run that has just begun says little of its end, which may be far from all that was seen (`END`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from isthmus.job import StrategySection

Values = npt.NDArray[np.float64]

WIDENING = 1.5
"""Factor on the distance of an interval's ends from its median; no run was used to choose it."""
AGAIN = 0.02
"""Standard deviation of the metric at the end between runs of one policy with other seeds, as a
part of all that it moved (measured in ten scenarios)."""
COVERED = 0.9
"""Part of the outcomes that an interval is meant to hold."""
LEAST_EVALUATED = 3
"""Evaluated rounds of a kind that a forecast needs."""

MAX_VALUE = 1e100
"""Largest value that is forecast: a run whose metric is larger has diverged, and squares of what is
larger may not be numbers."""

FIRST = 0.25
"""What the first round is expected to move, as a part of all that the metric moved."""
MIXED = 0.3
"""Standard deviation of the metric of an average of models of several kinds, as a part of all that
it moved, if hardly one is of the last kind."""
LATE = 1.0
"""Rounds by which a bend of the metric may come earlier or later than the model has it. Steady
motion is no bend: if a round of it could come later too, the first rounds of a slow run would
hardly differ from those of a run that stands still."""
END = 3.0
"""Standard deviation of the end of a kind around the values last seen, in parts of all that the
metric moved. With 1, runs of few rounds were expected to end near there: after three of twenty
rounds, in runs that move slowly, half as many intervals held the end."""
UNSEEN = 0.5
"""Standard deviation of what the metric does after the rounds that there were, as a part of what is
forecast of it. Slow runs first accelerate, or rest, which the model does not have."""
_WALKERS = 64
_DRAWN = 4000
"""Draws of the prior, of which the first walkers are taken."""
_HEATS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Exponents of the likelihood, from the prior to the posterior."""
_SWEEPS = 30
"""Moves of all walkers with each exponent before the last."""
_LAST_SWEEPS = 400
"""Moves of all walkers with the last one."""
_KEPT = 4
"""Times at the end at which all walkers are taken into the sample."""
_APART = 50
"""Moves between two of these times."""
_STRETCH = 2.0
_SHARED = 3
"""Parameters that all kinds share: the first value, the bend and the noise, before those of the
kinds."""


@dataclasses.dataclass(frozen=True)
class Inertia:
    """Why a metric goes on after rounds of another kind: what the job sets of it is known."""

    average: float = 0.0
    """Decay of the average of models that is evaluated; 0 if the last model is."""
    momentum: float = 0.0
    """Momentum of the server's optimizer, whose first steps are shorter by it."""

    @classmethod
    def of(cls, strategy: StrategySection) -> Self:
        """The inertia of a job's runs, by its strategy."""
        momentum = strategy.server_optimizer.options.get("momentum", 0.0)
        is_known = isinstance(momentum, int | float) and 0 <= momentum < 1
        return cls(strategy.served_average, float(momentum) if is_known else 0.0)

    def decay(self, averaged: int) -> float:
        """Weight of the average so far, when the model with this number is added to it."""
        return min(self.average, 1 - 1 / averaged) if self.average else 0.0

    def part(self, steps: int) -> float:
        """The server's step with this number, as a part of a later one."""
        return 1 - self.momentum**steps


@dataclasses.dataclass(frozen=True)
class RunPiece:
    """Consecutive rounds of a run, whose first model is known by a value or by nothing."""

    kinds: Sequence[str]
    """Kind of each round."""
    values: Sequence[float]
    """Metric after each round; NaN where it was not evaluated."""
    start: float | None = None
    """Metric of the model that they begin with; None for the first model of a run."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A forecast."""

    low: float
    median: float
    high: float


class LearningCurves:
    """A sample of what rounds of each kind do to a metric, by the rounds that there were."""

    def __init__(
        self,
        pieces: Sequence[RunPiece],
        *,
        bounded: bool,
        inertia: Inertia = Inertia(),
        seed: int = 0,
    ) -> None:
        """Learn it; takes about a second.

        Args:
            pieces: the rounds, of one or several runs of the same task.
            bounded: whether the metric is a share, between 0 and 1.
            inertia: of the runs.
            seed: of the sample.

        Raises:
            ValueError: no round was evaluated, or the values are too large to be added up.
        """
        seen = np.array([each for piece in pieces for each in piece.values if math.isfinite(each)])
        if not seen.size:
            raise ValueError("no round was evaluated")
        if float(np.abs(seen).max()) > MAX_VALUE:
            raise ValueError(f"its values are beyond {MAX_VALUE:g}")
        self.kinds = tuple(dict.fromkeys(kind for piece in pieces for kind in piece.kinds))
        self._inertia = inertia
        self._pieces = [_Course.of(piece, inertia) for piece in pieces if piece.kinds]
        self._scale = max(float(seen.max() - seen.min()), 0.01 * float(np.abs(seen).max()), 1e-9)
        self._low = 0.0 if seen.min() >= 0 else -math.inf
        self._high = 1.0 / self._scale if bounded else math.inf
        self._places, self._spreads = self._prior()
        self._sample = self._sampled(np.random.default_rng(seed))

    @classmethod
    def of_metric(cls, name: str, pieces: Sequence[RunPiece], inertia: Inertia) -> Self:
        """Learn the curves of a metric, which is a share if its values and its name allow it.

        Raises:
            ValueError: no round was evaluated with it, or its values are too large.
        """
        seen = [value for piece in pieces for value in piece.values if math.isfinite(value)]
        if not seen:
            raise ValueError(f"no round was evaluated with the metric {name!r}")
        is_share = not name.endswith("loss") and min(seen) >= 0 and max(seen) <= 1
        try:
            return cls(pieces, bounded=is_share, inertia=inertia)
        except ValueError as error:
            raise ValueError(f"the metric {name!r} cannot be forecast: {error}") from error

    # -- forecasts ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Size of the sample."""
        return len(self._sample)

    def after(self, kinds: Sequence[str], start: float | None = None) -> Values:
        """The metric after each of these rounds, without noise.

        Args:
            kinds: of the rounds; all are of `self.kinds`.
            start: metric of the model that they begin with; None for the first model of a run.

        Returns:
            One row for each member of the sample, one column for each round.
        """
        return self._scale * self._path(
            self._sample, _Course.of(RunPiece(kinds, (), start), self._inertia)
        )

    def followed(self, member: int) -> Followed:
        """A run by one member of the sample, before its first round."""
        first = self._sample[member, 0]
        bend = self._sample[member, 1]
        pulls = {
            kind: _Pull(
                math.exp(self._sample[member, _SHARED + 2 * place]),
                self._sample[member, _SHARED + 2 * place + 1],
            )
            for place, kind in enumerate(self.kinds)
        }
        return Followed(self._scale, first, math.exp(bend), pulls, self._inertia)

    @property
    def moved(self) -> float:
        """All that the metric moved in the rounds that there were."""
        return self._scale

    def noise(self) -> Values:
        """Standard deviation of one evaluation, by member of the sample."""
        return self._scale * np.exp(self._sample[:, 2])

    def doubt(self, kinds: Sequence[str]) -> Values:
        """Standard deviation of the metric after these rounds by what the model leaves out.

        That is its average of models, and what it does in more rounds of a kind than there were.

        Returns:
            One for each member of the sample.
        """
        course = _Course.of(RunPiece(kinds, ()), self._inertia)
        path = self._path(self._sample, course)
        unseen = UNSEEN * (path[:, -1] - path[:, self._seen(kinds) - 1])
        doubt: Values = self._scale * np.hypot(course.doubt[-1], unseen)
        return doubt

    def _seen(self, kinds: Sequence[str]) -> int:
        """How many of these rounds are no more of each kind than some piece has."""
        left = {kind: max(piece.kinds.count(kind) for piece in self._pieces) for kind in self.kinds}
        for place, kind in enumerate(kinds):
            if not left[kind]:
                return place
            left[kind] -= 1
        return len(kinds)

    def interval(self, values: Values, doubt: float | Values = 0.0) -> Interval:
        """The interval of a metric whose value in each member of the sample is given.

        Args:
            values: one for each member, without noise.
            doubt: see `doubt`; of all members, or of each.
        """
        deviation = np.hypot(np.hypot(self.noise(), AGAIN * self._scale), doubt)
        noisy = values + deviation * np.random.default_rng(1).standard_normal(len(values))
        tail = (1 - COVERED) / 2
        low, median, high = np.quantile(noisy, [tail, 0.5, 1 - tail])
        return self.widened(Interval(float(low), float(median), float(high)), WIDENING)

    def widened(self, found: Interval, factor: float) -> Interval:
        """An interval with ends so many times as far from its median, within what is possible."""
        low = max(found.median - factor * (found.median - found.low), self._low * self._scale)
        high = min(found.median + factor * (found.high - found.median), self._high * self._scale)
        return Interval(low, min(max(found.median, low), high), high)

    # -- the model, in units of the scale ----------------------------------------------------------

    def _prior(self) -> tuple[Values, Values]:
        """Means and standard deviations of the normal prior of all parameters."""
        firsts = [piece.values for piece in self._pieces if piece.start is None]
        begun = [next((v for v in each if math.isfinite(v)), math.nan) for each in firsts]
        known = [each for each in begun if math.isfinite(each)]
        every = [v for piece in self._pieces for v in piece.values if math.isfinite(v)]
        first = float(np.mean(known or every[:1])) / self._scale
        # The first round has moved the metric as most rounds do, from where only it began.
        gain = float(np.mean(every[-max(1, len(every) // 3) :])) / self._scale - first
        places = [first - math.copysign(FIRST, gain), math.log(0.7), math.log(0.03)]
        places[0] = min(max(places[0], self._low), self._high)
        spreads = [FIRST, 0.8, 1.0]
        for kind in self.kinds:
            of_kind = [
                value
                for piece in self._pieces
                for each, value in zip(piece.kinds, piece.values, strict=True)
                if each == kind and math.isfinite(value)
            ]
            last = of_kind[-max(1, len(of_kind) // 3) :] or every
            places += [math.log(0.3), float(np.mean(last)) / self._scale]
            spreads += [1.5, END]
        return np.array(places), np.array(spreads)

    def _path(self, parameters: Values, course: _Course) -> Values:
        """The metric after each round of a piece, for each row of parameters."""
        rows = len(parameters)
        value = parameters[:, 0]
        if course.start is not None:
            value = np.full(rows, course.start / self._scale)
        bend = np.exp(parameters[:, 1])[:, None]
        parts = []
        for kind, clock in course.runs:
            at = _SHARED + 2 * self.kinds.index(kind)
            speed = np.exp(parameters[:, at])[:, None]
            end = parameters[:, at + 1][:, None]
            away = value[:, None] - end
            with np.errstate(all="ignore"):  # of walkers that are far from what is likely
                shrunk = (1 + bend * speed * clock * np.abs(away) ** bend) ** (-1 / bend)
            part = end + away * shrunk
            parts.append(part)
            value = part[:, -1]
        return np.concatenate(parts, axis=1) if parts else np.empty((rows, 0))

    def _log_prior(self, parameters: Values) -> Values:
        """Logarithm of the prior density of each row, up to a constant."""
        distance = (parameters - self._places) / self._spreads
        density: Values = -0.5 * (distance**2).sum(axis=1)
        levels = np.concatenate([parameters[:, :1], parameters[:, _SHARED + 1 :: 2]], axis=1)
        density[((levels < self._low) | (levels > self._high)).any(axis=1)] = -np.inf
        return density

    def _log_likelihood(self, parameters: Values) -> Values:
        """Logarithm of the density of what was seen, for each row, up to a constant."""
        density = np.zeros(len(parameters))
        noise = np.exp(2 * parameters[:, 2])[:, None]
        for piece in self._pieces:
            if not piece.known.any():
                continue
            seen = piece.values[piece.known] / self._scale
            with np.errstate(all="ignore"):
                error = self._path(parameters, piece)[:, piece.known] - seen
                variance = noise + (LATE * piece.curvature[piece.known] / self._scale) ** 2
                variance += piece.doubt[piece.known] ** 2
                density += -0.5 * (error**2 / variance + np.log(variance)).sum(axis=1)
        density[~np.isfinite(density)] = -np.inf
        return density

    def _sampled(self, draw: np.random.Generator) -> Values:
        """Rows of parameters in proportion to their density.

        From the prior to the posterior in steps: walkers that begin far from what is likely would
        stay there.
        """
        size = len(self._places)
        walkers = self._places + self._spreads * draw.standard_normal((_DRAWN, size))
        is_possible = np.isfinite(self._log_prior(walkers))
        if is_possible.sum() < _WALKERS:  # many kinds, and values at an end of what there is
            walkers = self._redrawn(walkers, draw)
        else:
            walkers = walkers[is_possible]
        heat = 0.0
        kept = []
        for next_heat in _HEATS:
            gain = (next_heat - heat) * self._log_likelihood(walkers)
            weights = np.exp(gain - gain.max())
            walkers = walkers[draw.choice(len(walkers), _WALKERS, p=weights / weights.sum())]
            heat = next_heat
            last = heat == _HEATS[-1]
            density = self._density(walkers, heat)
            for sweep in range(_LAST_SWEEPS if last else _SWEEPS):
                walkers, density = self._moved(walkers, density, heat, draw)
                if last and sweep % _APART == _APART - 1:
                    kept.append(walkers)
        return np.concatenate(kept[-_KEPT:])

    def _redrawn(self, walkers: Values, draw: np.random.Generator) -> Values:
        """These draws of the prior with each level outside of what is possible drawn again.

        Each is around a value that was seen, so that a third of its draws at least are possible.
        """
        levels = np.concatenate([[0], np.arange(_SHARED + 1, walkers.shape[1], 2)])
        while True:
            drawn = walkers[:, levels]
            is_outside = (drawn < self._low) | (drawn > self._high)
            if not is_outside.any():
                return walkers
            again = self._places + self._spreads * draw.standard_normal(walkers.shape)
            walkers[:, levels] = np.where(is_outside, again[:, levels], drawn)

    def _density(self, parameters: Values, heat: float) -> Values:
        """Logarithm of the density of each row at an exponent of the likelihood."""
        density = self._log_prior(parameters)
        possible = np.isfinite(density)
        density[possible] += heat * self._log_likelihood(parameters[possible])
        return density

    def _moved(
        self, walkers: Values, density: Values, heat: float, draw: np.random.Generator
    ) -> tuple[Values, Values]:
        """One stretch move of each walker, half of them at a time."""
        walkers = walkers.copy()
        density = density.copy()
        half = _WALKERS // 2
        size = walkers.shape[1]
        order = draw.permutation(_WALKERS)
        for moved, others in ((order[:half], order[half:]), (order[half:], order[:half])):
            towards = walkers[draw.choice(others, half)]
            stretch = ((_STRETCH - 1) * draw.random(half) + 1) ** 2 / _STRETCH
            proposed = towards + stretch[:, None] * (walkers[moved] - towards)
            there = self._density(proposed, heat)
            with np.errstate(all="ignore"):
                gain = (size - 1) * np.log(stretch) + there - density[moved]
            accepted = np.log(draw.random(half)) < gain
            walkers[moved[accepted]] = proposed[accepted]
            density[moved[accepted]] = there[accepted]
        return walkers, density


class Followed:
    """A run by one member of a sample, round by round."""

    def __init__(
        self,
        scale: float,
        first: float,
        bend: float,
        pulls: Mapping[str, _Pull],
        inertia: Inertia,
    ) -> None:
        self._scale = scale
        self._model = first
        self._bend = bend
        self._pulls = pulls
        self._inertia = inertia
        self._steps = 0

    def next(self, kind: str) -> float:
        """The metric after one more round, of a kind, without noise."""
        pull = self._pulls[kind]
        part = 1.0
        if _is_stepped(kind):
            self._steps += 1
            part = self._inertia.part(self._steps)
        away = self._model - pull.end
        shrunk = 1 + self._bend * pull.speed * part * abs(away) ** self._bend
        self._model = pull.end + away * shrunk ** (-1 / self._bend)
        return self._scale * self._model


@dataclasses.dataclass(frozen=True)
class _Pull:
    """What rounds of a kind do, by one member of a sample."""

    speed: float
    end: float


@dataclasses.dataclass(frozen=True)
class _Course:
    """A piece of a run, with what does not depend on parameters."""

    kinds: Sequence[str]
    values: Values
    known: npt.NDArray[np.bool_]
    curvature: Values
    """By how much the motion of the metric changes from round to round, at each round."""
    doubt: Values
    """Standard deviation of what averages of models of several kinds do, in units of the scale."""
    start: float | None
    runs: Sequence[tuple[str, Values]]
    """Rounds of one kind in a row, with the whole rounds that they have made so far."""

    @classmethod
    def of(cls, piece: RunPiece, inertia: Inertia) -> Self:
        """Compute it."""
        steps = 0
        runs: list[tuple[str, Values]] = []
        doubt = []
        averaged = 0 if piece.start is None else 1
        others = 0.0
        for kind, rounds in itertools.groupby(piece.kinds):
            parts = []
            others = 1.0 if runs else 0.0
            for _ in rounds:
                averaged += 1
                others *= inertia.decay(averaged)
                doubt.append(MIXED * others**2)
                steps += _is_stepped(kind)
                # What was before a piece from a kept model has set the optimizer in motion.
                whole = piece.start is not None or not _is_stepped(kind)
                parts.append(1.0 if whole else inertia.part(steps))
            runs.append((kind, np.cumsum(parts)))
        count = len(piece.kinds)
        values = np.full(count, math.nan)
        values[: len(piece.values)] = piece.values
        return cls(
            piece.kinds,
            values,
            np.isfinite(values),
            _curvature(values),
            np.array(doubt),
            piece.start,
            runs,
        )


def _curvature(values: Values) -> Values:
    """The second differences of a metric, at each round where it is known; 0 at all others."""
    curvature = np.zeros(len(values))
    known = np.flatnonzero(np.isfinite(values))
    if len(known) > 1:
        motion = np.gradient(values[known], known)
        curvature[known] = np.abs(np.gradient(motion, known))
    return curvature


def _is_stepped(kind: str) -> bool:
    """Whether the server's optimizer makes a step in a round of a kind."""
    return not kind.startswith("datacenter")
