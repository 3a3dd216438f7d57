"""Decisions that all ranks take together: what failed, whether to stop, what everybody scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from isthmus.errors import UserError
from isthmus.task.scoring import Averages
from isthmus_datacenter.parallel.model_shard import local
from isthmus_datacenter.service.messages import ControlSignal


class AgreedError(UserError):
    """A failure that every rank knows of: all are well and can take the next command."""


class StoppedError(AgreedError):
    """All ranks stopped at the same step because they were asked to."""


class agreement:  # noqa: N801 - used as a statement
    """Code that each rank runs on its own; after it, all go on or all fail.

    Raises:
        AgreedError: some rank raised a `UserError`; the message is its sentence.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, UserError):
            return
        said: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, None if error is None else str(error))
        sentence = next((each for each in said if each is not None), None)
        if sentence is not None:
            raise AgreedError(sentence) from error


def ask_for_units(
    mine: int, signal: ControlSignal, ranks: int
) -> Callable[[], tuple[int, ControlSignal]]:
    """Units scored by all ranks in this step, and the strongest signal that any rank heard of.

    What is returned waits for them; until it is called, this rank goes on. Between processors, not
    devices: the device's queue never has to be waited for.
    """
    if ranks == 1:
        return lambda: (mine, signal)
    numbers = torch.tensor(
        [mine, *(int(signal is each) for each in (ControlSignal.SAVE, ControlSignal.CANCEL))]
    )
    work = dist.all_reduce(numbers, async_op=True)
    assert work is not None

    def answer() -> tuple[int, ControlSignal]:
        work.wait()
        units, save, cancel = numbers.tolist()
        return (
            units,
            ControlSignal.CANCEL
            if cancel
            else ControlSignal.SAVE
            if save
            else ControlSignal.CONTINUE,
        )

    return answer


def agree_on_loss(
    summed: torch.Tensor, units: int, parameters: Iterable[torch.Tensor], steps: tuple[int, int]
) -> float:
    """The mean loss, if it and the parameters are finite: looked at once, after the work.

    Args:
        summed: losses that count and were seen here, a scalar in float64.
        units: of all replicas.
        parameters: those of this rank.
        steps: the first one, and the one to which all this was.

    Raises:
        AgreedError: something is not finite, on some rank.
    """
    parts = [part for part in map(local, parameters) if part.numel()]
    norms = torch._foreach_norm(parts, math.inf)
    largest = torch.stack([norm.double() for norm in norms]).amax() if norms else 0.0 * summed
    seen = torch.stack([summed, largest * 0.0]).cpu()
    if dist.get_world_size() > 1:
        dist.all_reduce(seen)
    mean = float(seen[0]) / max(units, 1)
    if math.isfinite(mean) and math.isfinite(float(seen[1])):
        return mean
    what = "model is not finite" if math.isfinite(mean) else f"loss is not finite ({mean})"
    raise AgreedError(
        f"the {what} between steps {steps[0]} and {steps[1]}; lower the learning rate or check "
        "the data"
    )


def over_all_ranks(parts: list[Averages], ranks: int) -> Averages:
    """All ranks' sums and counts, added in the order of ranks."""
    mine = [
        (name, float(part.sums[name]), part.counts[name]) for part in parts for name in part.sums
    ]
    everyones: list[list[tuple[str, float, int]]] = [[] for _ in range(ranks)]
    dist.all_gather_object(everyones, mine)
    averages = Averages()
    for name, total, units in (row for rows in everyones for row in rows):
        averages.sums[name] = averages.sums.get(name, torch.zeros((), dtype=torch.float64)) + total
        averages.counts[name] = averages.counts.get(name, 0) + units
    return averages
