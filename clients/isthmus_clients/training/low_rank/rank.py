"""The rank with which a device trains low-rank changes of some matrices."""

from __future__ import annotations

from isthmus.errors import TaskError
from isthmus.job.exchange import LowRankSection
from isthmus.task import Participant, Task, user_code
from isthmus.tensors.division import Division


class LowRank:
    """The matrices that a device changes by products of factors, and the rank of these."""

    def __init__(
        self,
        task: Task,
        section: LowRankSection | None,
        division: Division,
        participant: Participant,
    ) -> None:
        """Take the rank that the task chooses for a device, or else the job's.

        Without a `section` of the job there are no such matrices.

        Raises:
            TaskError: not all matrices can have the rank.
        """
        self._task = task
        self._section = section
        self._division = division
        self.names = frozenset(division.adapted)
        self.rank = 1
        self.scale = 1.0
        if section is None:
            return
        with user_code("adapter_rank()"):
            chosen = task.adapter_rank(participant)
        self.rank = section.rank if chosen is None else chosen
        matrices = [each for each in division.exchanged.entries if each.name in self.names]
        smallest = min(matrices, key=lambda entry: min(entry.shape))
        if type(self.rank) is not int or not 1 <= self.rank <= min(smallest.shape):
            raise TaskError(
                f"adapter_rank() of {participant.name} returned {self.rank!r}; it must be a whole "
                f"number from 1 to {min(smallest.shape)}, the smaller side of {smallest.name!r}"
            )
        self.scale = section.alpha / self.rank

    def for_device(self, participant: Participant) -> LowRank:
        """Low rank of these matrices on another device, with that device's rank."""
        return LowRank(self._task, self._section, self._division, participant)
