"""The rounds of a run as pandas frames, and as a plot."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from isthmus.errors import UserError
from isthmus_server.storage.records import RoundRecord

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_COLORS = {"datacenter": "tab:blue", "federated": "tab:green", "hybrid": "tab:purple"}


def rounds_frame(rounds: Sequence[RoundRecord]) -> pd.DataFrame:
    """A row for each round, by its number; metrics are columns, and `cost` is the price so far."""
    rows = [
        {
            "round": record.round,
            "regime": record.regime,
            "reason": record.reason,
            "accepted": record.participants.accepted,
            **record.metrics,
            "price": record.cost.price,
            "cost": cost,
            "seconds": record.seconds,
            "device_bytes": record.cost.device_bytes,
            "model_sha256": record.model_sha256,
        }
        for record, cost in zip(
            rounds, itertools.accumulate(record.cost.price for record in rounds), strict=True
        )
    ]
    return _frame(rows, "round")


def receipts_frame(rounds: Sequence[RoundRecord]) -> pd.DataFrame:
    """A row for each participant of each round."""
    rows = [
        {"round": record.round, **receipt.to_json()}
        for record in rounds
        for receipt in record.receipts
    ]
    return _frame(rows, "round")


def plot(rounds: Sequence[RoundRecord], metric: str | None, against: str) -> Axes:
    """A metric of the evaluated rounds, with a mark in the colour of each round's regime."""
    names = [*{name: None for record in rounds for name in record.metrics}]
    if not names:
        raise UserError("no round of the run was evaluated, so there is nothing to plot")
    metric = metric or next((name for name in names if not name.endswith("loss")), names[0])
    frame = rounds_frame(rounds).reset_index()
    for name in (metric, against):
        if name not in frame:
            raise UserError(f"the run has no figure {name!r}; it has {', '.join(frame.columns)}")
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise _missing("matplotlib") from error
    evaluated = frame.dropna(subset=[metric])
    axes = plt.figure().gca()
    axes.plot(evaluated[against], evaluated[metric], color="lightgrey", zorder=1)
    for regime, part in evaluated.groupby("regime"):
        axes.scatter(part[against], part[metric], s=16, label=regime, color=_COLORS[str(regime)])
    axes.set(xlabel=against, ylabel=metric)
    axes.legend(frameon=False)
    return axes


def _frame(rows: list[dict[str, Any]], index: str) -> pd.DataFrame:
    try:
        import pandas
    except ImportError as error:
        raise _missing("pandas") from error
    frame = pandas.DataFrame(rows)
    return frame.set_index(index) if rows else frame


def _missing(package: str) -> UserError:
    return UserError(f"this needs {package}, of the extra `notebook`; pip install {package}")
