"""How exactly a device's number of examples is in the weight of its update.

The sum of the weights is known of every round. Over rounds with other devices such sums are linear
equations, and their solution is the weight of each device, though nobody lies. So the owner of a
device chooses what its weight says, and a job what it needs:

    exact   the number of examples
    coarse  the power of two that is nearest to it by ratio
    equal   1

A weight depends on nothing but the number of examples and the kind: it has no random part, which
the mean over rounds would remove.

>>> [weight_of(number, "coarse") for number in (0, 1, 3, 5, 90, 91, 1000)]
[0, 1, 4, 4, 64, 128, 1024]
>>> agreed(None, "coarse"), agreed("equal", "coarse"), agreed("exact", "coarse")
('coarse', 'equal', None)
"""

from __future__ import annotations

from typing import Literal, get_args

Weights = Literal["exact", "coarse", "equal"]
"""Kinds of weights, by how much they say."""

_KINDS: tuple[Weights, ...] = get_args(Weights)


def weight_of(examples: int, weights: Weights) -> int:
    """The weight of an update.

    Args:
        examples: of the device, 0 or more; without any an update weighs nothing.
        weights: the kind.
    """
    if weights == "exact" or not examples:
        return examples
    if weights == "equal":
        return 1
    lower = examples.bit_length() - 1
    # Nearest by ratio: above 2 ** (lower + 1/2), whose square is a whole number.
    return 1 << (lower + (examples * examples > 1 << (2 * lower + 1)))


def agreed(wanted: Weights | None, owners: Weights) -> Weights | None:
    """The kind of weights that a device gives in a job; None if it cannot take part.

    Args:
        wanted: by the job; None for what each owner gives.
        owners: the most exact kind that the device's owner gives. The owner also gives those that
            say less.
    """
    if wanted is None:
        return owners
    return wanted if _KINDS.index(wanted) >= _KINDS.index(owners) else None
