"""Where in the order of examples each step of a run begins, whatever number of ranks trained it.

A step has as many examples as the replicas take together. If their number changes, the data go on
after the last example that was used, so that no example is repeated or left out. What was used is
kept in a small file, by the steps at which the size of a step changed. So is the digest of a data
set that has one: in another one the same positions are those of other examples.

>>> positions = DataPositions([StepExamples(step=0, position=0, replicas=2, batch_size=8)])
>>> positions.at(10)
160
>>> positions = positions.with_size(10, replicas=4, batch_size=8)
>>> positions.at(11)
192
>>> positions.with_size(5, replicas=2, batch_size=8).at(11)  # the steps from 5 on are trained anew
176
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from isthmus.errors import DamagedError, StorageError, TaskError
from isthmus.system.private_files import make_state_directory
from isthmus.system.sealed_files import read_sealed, write_sealed


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepExamples:
    """The size of the steps from one on."""

    step: int
    """The first step of this size."""
    position: int
    """Examples of all epochs before this step."""
    replicas: int
    batch_size: int
    """Examples of one replica in a step."""

    @property
    def examples(self) -> int:
        """Examples of a step."""
        return self.replicas * self.batch_size


@dataclasses.dataclass(frozen=True)
class DataPositions:
    """The sizes of a run's steps, in order."""

    sizes: Sequence[StepExamples] = ()
    data: str = ""
    """Digest of the data set; empty if it has none, or nothing was trained on it."""

    def at(self, step: int) -> int:
        """Examples before a step, which is not before the first that is known."""
        size = self._before(step + 1)
        assert size is not None
        return size.position + (step - size.step) * size.examples

    def with_size(self, step: int, *, replicas: int, batch_size: int) -> DataPositions:
        """The positions if the steps from `step` on have this size; later ones are forgotten.

        Where nothing is known of the steps before, they had the same size.
        """
        sizes = [each for each in self.sizes if each.step < step]
        kept = dataclasses.replace(self, sizes=sizes)
        before = kept._before(step)
        if before is not None and (before.replicas, before.batch_size) == (replicas, batch_size):
            return kept
        position = step * replicas * batch_size if before is None else kept.at(step)
        new = StepExamples(step=step, position=position, replicas=replicas, batch_size=batch_size)
        return dataclasses.replace(kept, sizes=[*kept.sizes, new])

    def with_data(self, digest: str, step: int) -> DataPositions:
        """The positions in a data set with this digest, where `step` is trained next.

        Raises:
            TaskError: the steps before were trained on another one.
        """
        if step and self.data and digest != self.data:
            raise TaskError(
                f"the training data are not those of which this run has used {self.at(step)} "
                "examples: files, tokenizer or length have changed; restore them, or begin another "
                "run"
            )
        return dataclasses.replace(self, data=digest)

    def change_at(self, step: int) -> str | None:
        """A sentence about a change of the step's size with this step; None if there is none."""
        new = next((each for each in self.sizes if each.step == step), None)
        old = self._before(step)
        if new is None or old is None:
            return None
        examples = f"{new.examples} examples"
        if new.examples != old.examples:
            examples += f" in place of {old.examples}"
        return (
            f"{_count(new.replicas)} in place of {old.replicas} from step {step} on: the data go "
            f"on at example {new.position} of the order, and a step has {examples}"
        )

    def _before(self, step: int) -> StepExamples | None:
        """The size of the step before this one."""
        return next((each for each in reversed(self.sizes) if each.step < step), None)

    # -- file -----------------------------------------------------------------------------------

    @classmethod
    def read(cls, directory: Path) -> DataPositions:
        """Read the positions of the run whose state is in a directory; none if it has none.

        Raises:
            DamagedError: they are not what was written.
            StorageError: they cannot be read.
        """
        path = directory / _FILE
        try:
            values = read_sealed(path)
            sizes = [StepExamples(**row) for row in values["sizes"]]
            return cls(sizes, values.get("data", ""))
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        except (DamagedError, KeyError, TypeError):
            raise DamagedError(
                f"{path} is damaged, which has how far the data were used; restore it, or delete "
                "it if the number of ranks has never changed"
            ) from None

    def write(self, directory: Path) -> None:
        """Write them atomically and durably.

        Raises:
            StorageError: they cannot be written.
        """
        path = directory / _FILE
        try:
            make_state_directory(directory)
            sizes = [dataclasses.asdict(each) for each in self.sizes]
            write_sealed(path, {"sizes": sizes, "data": self.data})
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}") from error


_FILE = "positions.json"


def _count(replicas: int) -> str:
    return f"{replicas} replica" if replicas == 1 else f"{replicas} replicas"
