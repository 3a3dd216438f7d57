"""What the models of runs achieve on a device's own validation data, for its owner alone.

With secure aggregation the server learns sums over devices, and no figure of a single one. The
device has evaluated the model itself, so its owner can know: in `figures.json` of its state
directory, by `isthmus client status`, and in its log.

>>> own = OwnFigures(None)
>>> own.note("heart-1", 15, {"accuracy": 0.75, "loss": 0.5})
>>> own.sentences
['heart-1, model of round 15: accuracy 0.75, loss 0.5']
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from isthmus.errors import DamagedError
from isthmus.printable import in_a_line
from isthmus.system.sealed_files import read_sealed, write_sealed

FILE = "figures.json"

_MOST_RUNS = 16
"""Runs whose figures are kept, those of the last evaluations."""

_MOST_FIGURES = 64
"""Figures of a run that are kept. Their names are those of the task, which declares few."""

log = logging.getLogger(__name__)


class OwnFigures:
    """The figures of the last model that a device evaluated, for each of its last runs."""

    def __init__(self, directory: Path | None) -> None:
        """Continue those of a state directory; None keeps them as long as this process runs.

        A file that is damaged is begun anew: nothing depends on it.
        """
        self._path = None if directory is None else directory / FILE
        self._runs: dict[str, tuple[int, dict[str, float]]] = {}
        """Round and figures by run, in the order of the last evaluations."""
        try:
            self._read()
        except (DamagedError, OSError) as error:
            log.warning("the figures of this device begin anew: %s", error)

    @classmethod
    def read(cls, directory: Path) -> OwnFigures:
        """The figures in a state directory.

        Raises:
            DamagedError: the file is damaged.
            OSError: it cannot be read.
        """
        own = cls(None)
        own._path = directory / FILE
        own._read()
        return own

    def _read(self) -> None:
        if self._path is None or not self._path.exists():
            return
        for run_id, (round_, figures) in read_sealed(self._path)["runs"]:
            self._runs[run_id] = int(round_), dict(figures)

    def note(self, run_id: str, round_: int, figures: Mapping[str, float]) -> None:
        """Keep the figures of the model of a round."""
        kept = {in_a_line(name): value for name, value in sorted(figures.items())[:_MOST_FIGURES]}
        name = in_a_line(run_id)
        self._runs.pop(name, None)
        self._runs[name] = round_, kept
        while len(self._runs) > _MOST_RUNS:
            del self._runs[next(iter(self._runs))]
        log.info("on this device's own data: %s", self.sentences[-1])
        if self._path is not None:
            try:
                write_sealed(self._path, {"runs": list(self._runs.items())})
            except OSError as error:  # the evaluation is worth more than its copy for the owner
                log.warning("the figures of this device could not be written: %s", error)

    @property
    def sentences(self) -> list[str]:
        """One for each run, the last one evaluated at the end."""
        return [
            f"{name}, model of round {round_}: "
            + (", ".join(f"{each} {value:.4g}" for each, value in figures.items()) or "no figures")
            for name, (round_, figures) in self._runs.items()
        ]
