"""Validate the replies of ClientApps before a strategy aggregates them.

Flower's strategies accept all replies of a round or none: a single malformed reply would fail the
round. Such replies are refused here, so that only their sender is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

import torch
from flwr.app import MetricRecord, RecordDict

from isthmus.errors import UpdateError
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_flower.messages import read_record

K = TypeVar("K")


def check_reply(
    records: RecordDict,
    layout: TensorLayout,
    scratch: torch.Tensor,
    *,
    weighted_by: str,
    max_examples: int,
) -> int:
    """Check one reply and return its weight.

    Reorders the reply's arrays as in the layout, because strategies match arrays by position.

    Args:
        records: the reply's records.
        layout: the model's layout.
        scratch: float32 (N), overwritten.
        weighted_by: name of the metric that is the reply's weight.
        max_examples: the largest allowed weight.

    Raises:
        UpdateError: there is not exactly one record with the model's arrays, float and finite, or
            not exactly one record of finite metrics with a weight from 0 to `max_examples`.
    """
    arrays = list(records.array_records.values())
    metrics = list(records.metric_records.values())
    if len(arrays) != 1 or len(metrics) != 1:
        raise UpdateError(
            f"it holds {len(arrays)} array records and {len(metrics)} metric "
            "records, not one of each"
        )
    read_record(arrays[0], layout.parts(scratch))
    for entry in layout.entries:
        arrays[0][entry.name] = arrays[0].pop(entry.name)
    for name, array in arrays[0].items():
        if not array.dtype.startswith("float"):
            raise UpdateError(f"the array {name!r} is {array.dtype}, not a float type")
    return _weight_of(metrics[0], weighted_by, max_examples)


def check_metrics(records: RecordDict, *, weighted_by: str, max_examples: int) -> None:
    """Check the reply to an evaluation, which has no arrays; see `check_reply`.

    Raises:
        UpdateError: there is not exactly one record of metrics, or one of them or the weight is
            not valid.
    """
    metrics = list(records.metric_records.values())
    if len(metrics) != 1:
        raise UpdateError(f"it holds {len(metrics)} metric records, not one")
    _weight_of(metrics[0], weighted_by, max_examples)


def _weight_of(metrics: MetricRecord, weighted_by: str, max_examples: int) -> int:
    """Check finite metrics and return their weight."""
    for name, value in metrics.items():
        if not all(map(math.isfinite, value if isinstance(value, list) else [value])):
            raise UpdateError(f"the metric {name!r} is not finite")
    weight = metrics.get(weighted_by)
    if not isinstance(weight, int | float) or not 0 <= weight <= max_examples:
        raise UpdateError(
            f"its {weighted_by}={weight!r} is not a number from 0 to "
            f"federated.flower.max_examples={max_examples}"
        )
    return int(weight)


def inconsistent_replies(replies: Mapping[K, RecordDict]) -> set[K]:
    """Find replies whose records or metrics have other names than most; on a tie, the later ones.

    Strategies need the same names in all replies; the app chooses which.
    """
    schemas = {key: _schema(records) for key, records in replies.items()}
    if not schemas:
        return set()
    ((majority, _),) = Counter(schemas.values()).most_common(1)
    return {key for key, schema in schemas.items() if schema != majority}


def _schema(records: RecordDict) -> tuple[object, ...]:
    metrics = (
        (name, key, len(value) if isinstance(value, list) else None)
        for name, record in records.metric_records.items()
        for key, value in record.items()
    )
    return frozenset(records.array_records), frozenset(metrics)
