"""Forecasts of rounds in words, and how well they came true."""

from __future__ import annotations

import math

from isthmus_server.read.report.durations import duration
from isthmus_server.storage.records import RoundRecord
from isthmus_server.strategy.forecast import RoundForecast


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


def compared(forecast: RoundForecast, record: RoundRecord) -> str:
    """A committed round compared with its forecast; empty if nothing was forecast.

    Both prices are of the one attempt that was committed.
    """
    parts = []
    if forecast.seconds:
        parts.append(f"{record.seconds / forecast.seconds:.2g} times the time")
    if forecast.price:
        parts.append(f"{record.cost.price / forecast.price:.2g} times the cost")
    if forecast.device_bytes:
        parts.append(f"{record.cost.device_bytes / forecast.device_bytes:.2g} times the bytes")
    actual = record.metrics.get(forecast.metric)
    if forecast.value is not None and actual is not None:
        parts.append(f"{forecast.metric} {actual:.4g} instead of {forecast.value:.4g}")
    return f"compared with the forecast: {', '.join(parts)}" if parts else ""
