"""Decisions that all ranks take together: failures, control signals, mean losses and scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from isthmus.errors import UserError
from isthmus.task.scoring import Averages
from isthmus.task.scoring.units import UNUSABLE_WEIGHTS
from isthmus_datacenter.messages import ControlSignal
from isthmus_datacenter.parallel.equivalence_check import has_left_others
from isthmus_datacenter.parallel.model_shard import local
from isthmus_datacenter.rank_messages import TEXT_CHARACTERS, RankMessages

_FAILURES: RankMessages[str | None] = RankMessages("failures", str | None)
_AVERAGES: RankMessages[list[tuple[str, float, float]]] = RankMessages(
    "means", list[tuple[str, float, float]], 1 << 20
)


class ConsensusError(UserError):
    """A failure that every rank raises: none waits for another, and all can take a new command."""


class StoppedError(ConsensusError):
    """All ranks stopped at the same step because of a control signal."""


class fail_together:  # noqa: N801 - used as a statement
    """Context manager for code that each rank runs separately: afterwards all continue or all fail.

    All ranks enter it together. An error with the note that others may wait for this rank is
    raised on it alone: it ends, and they with it.

    Raises:
        ConsensusError: some rank raised a `UserError`; the message is that of the first such rank.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Not the user's: the rank ends, the others notice, and the command is repeated on new ones.
        if error is not None and not isinstance(error, UserError):
            return
        if has_left_others(error):  # which cannot take part: this rank ends with its error
            return
        # Every rank takes part, with or without a failure: one that left here would keep the others
        # waiting.
        own = None if error is None else str(error)[:TEXT_CHARACTERS]
        messages = _FAILURES.all_gather(own)
        first = next((each for each in messages if each is not None), None)
        if first is not None:
            raise ConsensusError(first) from error


def start_units_all_reduce(
    units: float, signal: ControlSignal, ranks: int
) -> Callable[[], tuple[float, ControlSignal]]:
    """Start to sum a step's units over all ranks and to find the strongest signal of any rank.

    The function returned waits for the result; until it is called, this rank goes on. The
    reduction runs between processors, so that the device's queue never has to be waited for.
    """
    if ranks == 1:
        return lambda: (units, signal)
    numbers = torch.tensor(
        [units, *(int(signal is each) for each in (ControlSignal.SAVE, ControlSignal.CANCEL))],
        dtype=torch.float64,  # exact for whole numbers of units
    )
    work = dist.all_reduce(numbers, async_op=True)
    assert work is not None

    def wait() -> tuple[float, ControlSignal]:
        work.wait()
        all_units, save, abort = numbers.tolist()
        if abort:
            return all_units, ControlSignal.CANCEL
        return all_units, ControlSignal.SAVE if save else ControlSignal.CONTINUE

    return wait


def finite_mean_loss(
    loss_sum: torch.Tensor,
    units: float,
    parameters: Iterable[torch.Tensor],
    steps: tuple[int, int],
    ranks: int,
) -> float:
    """Compute the mean loss of all ranks, and check that it and all parameters are finite.

    This is done once, after the steps, because it waits for the device.

    Args:
        loss_sum: sum of the losses that this rank counts, a scalar in float64.
        units: number of units of all replicas.
        parameters: those of this rank.
        steps: first step and the step after the last.
        ranks: their number.

    Raises:
        ConsensusError: something is not finite, on some rank.
    """
    # Frozen parameters may be whole numbers.
    parts = [part for part in map(local, parameters) if part.numel() and part.is_floating_point()]
    # The largest magnitude is not finite exactly if an element is not, and takes no memory.
    # A rank may have no element of a small model.
    norms = torch._foreach_norm(parts, math.inf) if parts else []
    largest = torch.stack([norm.double() for norm in norms]).amax() if norms else 0.0 * loss_sum
    sums = torch.stack([loss_sum, largest * 0.0]).cpu()  # the second is NaN if one is not finite
    if ranks > 1:
        dist.all_reduce(sums)
    mean = float(sums[0]) / (units or 1)
    if math.isfinite(mean) and math.isfinite(float(sums[1])):
        return mean
    if not math.isfinite(units):
        raise ConsensusError(
            f"between steps {steps[0]} and {steps[1]}, loss() returned {UNUSABLE_WEIGHTS}"
        )
    what = "model is not finite" if math.isfinite(mean) else f"loss is not finite ({mean})"
    raise ConsensusError(
        f"the {what} between steps {steps[0]} and {steps[1]}; lower the learning rate or check "
        "the data"
    )


def gather_averages(parts: list[Averages]) -> Averages:
    """Add the sums and counts of all ranks, in the order of ranks."""
    own_rows = [
        (name, float(part.sums[name]), float(part.counts[name]))
        for part in parts
        for name in part.sums
    ]
    averages = Averages()
    for name, total, units in (row for rows in _AVERAGES.all_gather(own_rows) for row in rows):
        averages.add_sum(name, torch.tensor(total, dtype=torch.float64), units)
    return averages
