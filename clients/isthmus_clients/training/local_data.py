"""A device's training data, in the steps of a round, and where it is."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from isthmus.errors import TaskError
from isthmus.job import Job
from isthmus.job.federated import FederatedSection
from isthmus.task import Participant, Task, check_installed, user_code
from isthmus.task.measurements.statistics import StatisticsVector
from isthmus.task.not_finite import explain_not_finite
from isthmus.task.scoring import count_examples, training_batches
from isthmus.task.scoring.inputs import streamed_batches
from isthmus.task.scoring.order import EpochOrder, check_no_order
from isthmus_clients.training.example_order import first_pass, step_indices

log = logging.getLogger(__name__)


def locate(
    source: str,
    job: Job,
    base: Path,
    data: Path | None,
    tasks: Path | None,
    key: str = "task.source",
) -> tuple[Path, Path | None]:
    """Locate the code of a run and this device's data.

    Raises:
        TaskError: only code in the directory `tasks` may be loaded, and this code is not in it.
    """
    if tasks is not None:
        check_installed(source, tasks, key)
        return tasks, data
    return base, job.task.data_in(base) if data is None else data


@dataclasses.dataclass(frozen=True)
class StepPart:
    """One of the parts of a batch that are trained in sequence before a step."""

    batch: Any
    """What the loader gave, on the device."""
    examples: int
    """Number of its examples."""


class LocalData:
    """The data set of a device.

    An iterable one is an endless stream, of which each round reads `local_steps` batches from where
    the round before ended, so that a repeated round reads the same examples.
    """

    def __init__(
        self,
        task: Task,
        participant: Participant,
        job: Job,
        device: torch.device,
        *,
        withheld: bool = False,
    ) -> None:
        """Load the data, unless the job only collects statistics and the task gives their rows.

        Then `local_data` may need the statistics that are being collected. `withheld`: the server
        is on another machine, and not to know whether a training fails, whatever its job says.

        Raises:
            TaskError: there is none, or it is iterable and the job has no number of steps.
        """
        self._task = task
        self._settings = job.federated
        self._device = device
        self._withheld = withheld
        self._what = what = f"local_data() of {participant.name}"
        self._says_growth = True
        self.dataset: Dataset[Any]
        own_rows = type(task).statistics_data is not Task.statistics_data
        self._stream: IterableDataset[Any] | None = None
        # Placeholder data: nothing is trained, and the real data may not be readable yet.
        if job.statistics.collect and own_rows:
            self.dataset = TensorDataset(torch.zeros(1))
            self.examples = 1
            return
        with user_code("local_data()"):
            self.dataset = task.local_data(participant)
        self._stream = self.dataset if isinstance(self.dataset, IterableDataset) else None
        if self._stream is not None:
            self.examples = self._streamed_examples(what)
        else:
            self.examples = count_examples(self.dataset, what)
        """The weight of an update: examples of the data set, or those that a round reads."""
        self.order = EpochOrder(task, self.dataset, self.examples, self._settings.batch_size)

    def warn_of_growth(self) -> None:
        """Say once, in this device's log, that rows which were added since are not trained on."""
        if self.is_stream or not self._says_growth:
            return
        with user_code("__len__() of local_data()"):
            count = len(self.dataset)  # type: ignore[arg-type]  # it was counted at the opening
        if count <= self.examples:
            return
        self._says_growth = False
        log.warning(
            "%s has %d examples now, and had %d when this run was opened: the run goes on with "
            "those; the new ones are in the next run, or after a restart of the device",
            self._what,
            count,
            self.examples,
        )

    @property
    def is_stream(self) -> bool:
        """Whether the data set is iterable."""
        return self._stream is not None

    @property
    def advice(self) -> str:
        """What to do about a loss that is not finite.

        The data are not searched where the time of that could tell a server something.
        """
        settings = self._settings
        # A server on another machine can say `clients` too, and would have a search that takes time
        # only where a training fails.
        secure = settings.secure_aggregation and not settings.clients
        if self._withheld or secure or self.is_stream:
            return "lower the learning rate or check the data"
        return explain_not_finite(self.dataset, range(self.examples), self._what)

    def step_count(self, settings: FederatedSection) -> int:
        """The number of steps that some settings ask for."""
        if settings.local_steps is not None:
            return settings.local_steps
        return settings.steps(self.order.length)

    def has_lone_row(self, settings: FederatedSection) -> bool:
        """Whether rounds with some settings get to a last part of an epoch that has one row.

        False where all parts have one.
        """
        if self._stream is not None or self._part_size == 1 or self.order.length == 1:
            return False
        steps = settings.local_steps
        if steps is not None and steps * settings.batch_size < self.order.length:
            return False
        return self.order.length % settings.batch_size % self._part_size == 1

    def single_row(self) -> StepPart:
        """The first example as a batch by itself.

        Raises:
            TaskError: it cannot be read.
        """
        (batch,) = training_batches(self._task, self.dataset, [0], 1, self._device)
        return StepPart(batch, 1)

    @property
    def first_pass_examples(self) -> int:
        """The number of examples of `first_pass`."""
        size = self._settings.batch_size
        steps = self._settings.local_steps
        if self._stream is not None:
            return self.examples
        return self.order.length if steps is None else min(self.order.length, steps * size)

    def steps(
        self, seed: bytes, round_: int, settings: FederatedSection
    ) -> Iterator[Iterator[StepPart]]:
        """The parts of each step of a round; those of one are read before the next begins.

        `settings` say how many steps; the size of their batches is that of the job.
        """
        if self._stream is not None:
            return self._streamed_steps(self._stream, round_, settings.local_steps or 0)
        return map(self._parts, step_indices(seed, self.order, settings))

    def first_pass(self, seed: bytes, round_: int) -> Iterator[Iterator[StepPart]]:
        """The steps of the first epoch; all of an iterable data set."""
        if self._stream is not None:
            return self._streamed_steps(self._stream, round_, self._settings.local_steps or 0)
        return map(self._parts, first_pass(seed, self.order, self._settings))

    @property
    def _part_size(self) -> int:
        return self._settings.batch_size // self._settings.accumulate

    def _parts(self, indices: Sequence[int]) -> Iterator[StepPart]:
        size = self._part_size
        batches = training_batches(self._task, self.dataset, indices, size, self._device)
        for start, batch in zip(range(0, len(indices), size), batches, strict=True):
            yield StepPart(batch, min(size, len(indices) - start))

    def _streamed_steps(
        self, stream: IterableDataset[Any], round_: int, steps: int
    ) -> Iterator[Iterator[StepPart]]:
        settings = self._settings
        # From the round's number and not from what was read: a repeated attempt reads the same.
        start = (round_ - 1) * (settings.local_steps or 0) * settings.batch_size
        count = steps * settings.batch_size
        batches = streamed_batches(self._task, stream, start, count, self._part_size, self._device)
        for _ in range(steps):
            parts = itertools.islice(batches, settings.accumulate)
            yield (StepPart(batch, self._part_size) for batch in parts)

    def _streamed_examples(self, what: str) -> int:
        if self._settings.local_steps is None:
            raise TaskError(
                f"{what} is an iterable dataset, which has no epochs; set federated.local_steps"
            )
        check_no_order(self._task, what)
        return max(self._settings.local_steps, 1) * self._settings.batch_size

    def statistics(self, participant: Participant) -> list[int]:
        """The counts of this device's data, see `StatisticsVector.measure`."""
        return StatisticsVector(self._task).measure(participant, self.dataset).tolist()
