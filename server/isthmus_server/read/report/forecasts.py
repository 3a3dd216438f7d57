"""Forecasts of rounds in words, and how well they came true."""

from __future__ import annotations

import math
from collections.abc import Iterator

from isthmus_server.read.report.durations import duration
from isthmus_server.storage.records import RoundRecord
from isthmus_server.strategy.forecast import RoundForecast

ALIKE = 0.1
"""Part by which time, cost and bytes may be off their forecast without a word."""


def in_words(forecast: RoundForecast) -> str:
    """What a planned round takes and achieves.

    >>> in_words(RoundForecast(price=8, device_bytes=3.2e6, seconds=12, metric="accuracy",
    ...     value=0.84, rounds_to_target=9))
    'forecast: 12 s, cost 8, 3.2 MB to and from devices, accuracy 0.84; the target in 9 rounds'
    >>> in_words(RoundForecast(price=0.5, device_bytes=0, metric="loss"))
    'forecast: cost 0.5; time and loss are not known before a round like it'
    """
    parts = [] if forecast.seconds is None else [duration(forecast.seconds)]
    parts.append(f"cost {forecast.price:g}")
    if forecast.device_bytes:
        parts.append(f"{forecast.device_bytes / 1e6:.3g} MB to and from devices")
    if forecast.value is not None:
        parts.append(f"{forecast.metric} {forecast.value:.4g}")
    unknown = ["time"] if forecast.seconds is None else []
    unknown += [forecast.metric] if forecast.value is None else []
    sentence = f"forecast: {', '.join(parts)}"
    if unknown:
        verb = "are" if len(unknown) > 1 else "is"
        sentence += f"; {' and '.join(unknown)} {verb} not known before a round like it"
    if forecast.rounds_to_target is None:
        return sentence
    if math.isinf(forecast.rounds_to_target):
        return f"{sentence}; such rounds come no closer to the target"
    return f"{sentence}; the target in {math.ceil(forecast.rounds_to_target)} rounds"


def ratios(forecast: RoundForecast, record: RoundRecord) -> Iterator[tuple[str, float]]:
    """Time, cost and bytes of a committed round, each divided by what was forecast of it.

    They are of the one attempt that was committed, without the comparisons of models that were made
    before it was planned: their cost is known then, and no part of the forecast.
    """
    if forecast.seconds:
        yield "time", record.seconds / forecast.seconds
    if forecast.price:
        before = sum(each.price for each in record.comparisons)
        yield "cost", (record.cost.price - before) / forecast.price
    if forecast.device_bytes:
        before_bytes = sum(each.device_bytes for each in record.comparisons)
        yield "bytes", (record.cost.device_bytes - before_bytes) / forecast.device_bytes


def compared(forecast: RoundForecast, record: RoundRecord) -> str:
    """A committed round compared with its forecast; empty if nothing was forecast.

    Of time, cost and bytes it has those that differ, and says if the others do not.
    """
    known = dict(ratios(forecast, record))
    parts = [
        f"{ratio:.2g} times the {name}" for name, ratio in known.items() if abs(ratio - 1) > ALIKE
    ]
    alike = [name for name, ratio in known.items() if abs(ratio - 1) <= ALIKE]
    if alike and not parts:
        parts.append(f"{' and '.join(alike)} within {ALIKE:.0%}")
    actual = record.metrics.get(forecast.metric)
    if forecast.value is not None and actual is not None:
        parts.append(f"{forecast.metric} {actual:.4g} instead of {forecast.value:.4g}")
    return f"compared with the forecast: {', '.join(parts)}" if parts else ""
