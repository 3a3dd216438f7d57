"""What devices' apps answer, looked at before a strategy sees all of it together.

Flower's strategies take a round's replies or none: one that does not fit the others fails the
round for everybody, so it is refused here, and only whoever sent it loses by it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

import torch
from flwr.app import RecordDict

from isthmus.errors import UpdateError
from isthmus.integrations.flower.messages import read_record
from isthmus.tensors.exchange_set import TensorLayout

K = TypeVar("K")


def check(
    records: RecordDict,
    layout: TensorLayout,
    scratch: torch.Tensor,
    *,
    weighted_by: str,
    max_examples: int,
) -> int:
    """Refuse a reply that would spoil everybody's; returns its weight.

    Its arrays are put into the order of the layout: strategies match those of a round by place.

    Args:
        records: what came.
        layout: the model's.
        scratch: float32 (N), overwritten.
        weighted_by: name of the figure that is its weight.
        max_examples: the most that this may be.

    Raises:
        UpdateError: not one record of the model's arrays, float and finite, or not one of finite
            figures with a weight from 0 to `max_examples`.
    """
    arrays, figures = list(records.array_records.values()), list(records.metric_records.values())
    if len(arrays) != 1 or len(figures) != 1:
        raise UpdateError(
            f"it holds {len(arrays)} records of arrays and {len(figures)} of figures, "
            "not one of each"
        )
    read_record(arrays[0], layout.parts(scratch))
    for entry in layout.entries:
        arrays[0][entry.name] = arrays[0].pop(entry.name)
    for name, array in arrays[0].items():
        if not array.dtype.startswith("float"):
            raise UpdateError(f"the array {name!r} is {array.dtype}, and no float")
    for name, value in figures[0].items():
        if not all(map(math.isfinite, value if isinstance(value, list) else [value])):
            raise UpdateError(f"the figure {name!r} is not finite")
    weight = figures[0].get(weighted_by)
    if not isinstance(weight, int | float) or not 0 <= weight <= max_examples:
        raise UpdateError(
            f"its {weighted_by}={weight!r} is not a number from 0 to "
            f"federated.flower.max_examples={max_examples}"
        )
    return int(weight)


def odd_ones(replies: Mapping[K, RecordDict]) -> set[K]:
    """Whose records or figures have other names than most of them; of two halves, the later.

    Strategies want the same names of all, and which these are is the app's affair.
    """
    forms = {key: _form(records) for key, records in replies.items()}
    if not forms:
        return set()
    ((usual, _),) = Counter(forms.values()).most_common(1)
    return {key for key, form in forms.items() if form != usual}


def _form(records: RecordDict) -> tuple[object, ...]:
    figures = (
        (name, key, len(value) if isinstance(value, list) else None)
        for name, record in records.metric_records.items()
        for key, value in record.items()
    )
    return frozenset(records.array_records), frozenset(figures)
