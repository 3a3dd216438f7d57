"""Say what compares policies at one price that have ended at several."""

from __future__ import annotations

import math
from collections.abc import Sequence

from isthmus_server.read.pages.templates import digits

_ALIKE = 1.01
"""Prices that differ by a smaller factor are no difference."""


def unequal_ends(
    prices: Sequence[float],
    rounds: Sequence[float],
    budget: float | None = None,
    most_rounds: int | None = None,
) -> str:
    """A sentence that policies end at unequal prices or rounds, and what makes them equal.

    Args:
        prices: at which each ends.
        rounds: after which each ends.
        budget: that each has; None for none.
        most_rounds: that each has; None if that is not known.

    Returns:
        The sentence; empty if they are equal, or there is one policy.

    >>> unequal_ends([40.0, 24.0], [10.0, 10.0]).partition(": ")[0]
    'the policies end at unequal cost (24 to 40)'
    >>> unequal_ends([36.0, 40.0], [6.0, 10.0], budget=40.0).partition(", each where ")[2]
    'budget=40 has less left than its next round costs: that is one price'
    """
    if len(prices) < 2:
        return ""
    parts = []
    if max(prices) > _ALIKE * min(prices):
        parts.append(f"at unequal cost ({digits(min(prices))} to {digits(max(prices))})")
    if max(rounds) > min(rounds):
        parts.append(f"after unequal rounds ({digits(min(rounds))} to {digits(max(rounds))})")
    if not parts:
        return ""
    found = f"the policies end {' and '.join(parts)}"
    if len(parts) == 1 and max(rounds) > min(rounds):
        return f"{found}: they are compared at one price, and not by their rounds"
    of_round = [price / count for price, count in zip(prices, rounds, strict=True) if count]
    if not min(of_round):
        return f"{found}: they are not compared at one price, and one of them costs nothing"
    spent = [
        _has_spent(budget, price, price / count)
        for price, count in zip(prices, rounds, strict=True)
        if count
    ]
    if budget is not None and all(spent):
        return (
            f"{found}, each where budget={budget:.15g} has less left than its next round costs: "
            "that is one price"
        )
    given = "" if any(spent) else f"--set budget={_four_digits_up(max(prices)):.15g} "
    same = budget if budget is not None and any(spent) else _four_digits_up(max(prices))
    paid = math.floor(same / min(of_round) * (1 + 1e-9))
    if not given and most_rounds is not None and paid <= most_rounds:
        return (
            f"{found}: another limit ends some before budget={same:.15g} does, so that they are "
            "not at one price"
        )
    all_of_it = f"budget={same:.15g}" if not given else "the same"
    return (
        f"{found}: to compare them at one price, let all spend {all_of_it}: "
        f"{given}--set rounds={paid}, as many as the cheapest can pay"
    )


def _has_spent(budget: float | None, price: float, of_round: float) -> bool:
    """Whether a policy that ends at a price could not pay for another round."""
    return budget is not None and price + of_round > budget * (1 + 1e-9)


def _four_digits_up(price: float) -> float:
    """The next price with four digits, of which nobody lacks what rounding took.

    >>> _four_digits_up(12345.6), _four_digits_up(40.0), _four_digits_up(0.1 + 0.2)
    (12350.0, 40.0, 0.3)
    """
    unit = 10.0 ** (math.floor(math.log10(price)) - 3) if price > 0 else 1.0
    return float(f"{math.ceil(price / unit - 1e-9) * unit:.12g}")
