"""`isthmus.run`, `isthmus.simulate` and `isthmus.Run`: a run from a script or a notebook."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from isthmus.errors import UserError
from isthmus.task import Task
from isthmus_server.python import tables
from isthmus_server.python.child_process import IN_RUN, RunProcess
from isthmus_server.python.saved_model import DELIVERED, load_model
from isthmus_server.python.task_source import source_of
from isthmus_server.read.report.report import Report, read_report
from isthmus_server.storage.records import FinalModel, Receipt, RoundRecord
from isthmus_server.storage.run_description import is_simulated
from isthmus_server.storage.store import Store

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from torch import nn

OnRound = Callable[["Run", RoundRecord], None]
"""Called after each committed round."""


class Run:
    """A run of this machine, by its directory: under way, ended, or started by the command.

    Guarantees:
      * everything that it returns was committed; nothing is kept in memory.
    """

    def __init__(self, directory: Path | str) -> None:
        """Look at the run in a directory."""
        self.directory = Path(directory).absolute()
        self._process: RunProcess | None = None

    def __repr__(self) -> str:
        """Directory, status and the last round."""
        try:
            report = self.report()
        except UserError as error:
            return f"Run({str(self.directory)!r}): {error}"
        return f"Run({str(self.directory)!r}): {report.status}, {len(report.rounds)} rounds"

    # -- what it did -------------------------------------------------------------------------------

    def report(self) -> Report:
        """Everything about the run so far, see docs/reference/report.md.

        Raises:
            UserError: there is no run in the directory, or it is damaged.
        """
        with contextlib.closing(Store.open(self.directory)) as store:
            return read_report(store)

    @property
    def status(self) -> str:
        """`running`, `stopped`, `finished`, `failed` or `cancelled`, see `Report.status`."""
        return self.report().status

    @property
    def rounds(self) -> Sequence[RoundRecord]:
        """The committed rounds, in order."""
        return self.report().rounds

    @property
    def receipts(self) -> Sequence[Receipt]:
        """What participants did in the committed rounds, in order."""
        return [receipt for record in self.rounds for receipt in record.receipts]

    @property
    def final(self) -> FinalModel | None:
        """The delivered model's metrics, hash and file; None before the end."""
        return self.report().final

    def frame(self) -> pd.DataFrame:
        """A row for each committed round: regime, participants, metrics, cost so far.

        Raises:
            UserError: pandas is not installed.
        """
        return tables.rounds_frame(self.rounds)

    def receipts_frame(self) -> pd.DataFrame:
        """A row for each participant of each committed round.

        Raises:
            UserError: pandas is not installed.
        """
        return tables.receipts_frame(self.rounds)

    def plot(self, metric: str | None = None, against: str = "cost") -> Axes:
        """Draw a metric of the evaluated rounds, by default the first that is not the loss.

        Args:
            metric: its name.
            against: `cost`, `round`, `seconds`, or another column of `frame()`.

        Raises:
            UserError: pandas or matplotlib is not installed, or the run has no such column.
        """
        return tables.plot(self.rounds, metric, against)

    def model(self, round: str | int = DELIVERED) -> nn.Module:  # noqa: A002 - as users call it
        """The task's model with the weights of a round; see `load_model`."""
        return load_model(self.directory, round)

    # -- control -----------------------------------------------------------------------------------

    def wait(self) -> Run:
        """Wait until the run ends or was stopped; Ctrl-C ends it after the running round.

        Raises:
            UserError: it failed, with the reason; `resume` continues it.
        """
        process = self._process
        if process is None:
            return self
        try:
            status, last_line = process.wait()
        except KeyboardInterrupt:
            self.stop()
            raise
        finally:
            self._process = None if not process.running else process
        if status and not process.stopped:
            raise UserError(last_line.removeprefix("isthmus: ") or "the run was ended")
        return self

    def stop(self) -> None:
        """Have the run end after the running round, see `wait`; `resume` continues it.

        Raises:
            UserError: another process runs it.
        """
        if self._process is None:
            if self.status == "running":
                raise UserError(f"{self.directory} was not started here; stop it where it was")
            return
        self._process.stop()

    def resume(
        self, *, on_round: OnRound | None = None, wait: bool = True, quiet: bool = False
    ) -> Run:
        """Continue a run that was stopped or has failed, from its last committed round.

        Raises:
            UserError: it cannot be continued, or failed again.
        """
        command = "simulate" if is_simulated(self.directory) else "run"
        return self._start(command, ["--resume"], on_round, wait=wait, quiet=quiet)

    def _start(
        self,
        command: str,
        arguments: Sequence[str],
        on_round: OnRound | None,
        *,
        wait: bool,
        quiet: bool,
    ) -> Run:
        if os.environ.get(IN_RUN):
            raise UserError(
                "isthmus.run was called by a process of a run, which imports the task's file; "
                'call it under `if __name__ == "__main__":`'
            )

        seen = len(self.rounds) if "--resume" in arguments else 0

        def show(line: str) -> None:
            nonlocal seen
            if not quiet:
                print(line, flush=True)
            if on_round is not None and line.startswith("round "):
                new = self.rounds[seen:]
                seen += len(new)
                for record in new:
                    on_round(self, record)

        self._process = RunProcess(command, [*arguments, "--run-dir", str(self.directory)], show)
        return self.wait() if wait else self


def run(
    job: Path | str | Mapping[str, Any],
    task: type[Task] | None = None,
    *,
    run_dir: Path | str | None = None,
    on_round: OnRound | None = None,
    wait: bool = True,
    quiet: bool = False,
    track: Sequence[str] = (),
    **overrides: Any,
) -> Run:
    """Train a job on this machine, as the command `isthmus run` does.

    Args:
        job: a job file, or a job's tables as a mapping, such as ``{"rounds": 5}``.
        task: the task, in place of the job's `task.source`.
        run_dir: directory of the run. Default: runs/NAME-TIME in the current folder.
        on_round: called with the run and the record of each committed round, in another thread.
            What it raises ends the run, and is raised here.
        wait: return when the run has ended; otherwise at once, see `Run.wait`.
        quiet: print nothing.
        track: trackers of the rounds: `tensorboard`, `mlflow`, `mlflow=URI`, `wandb`,
            `wandb=PROJECT`, `otel`, `otel=URL`, or those of installed packages.
        **overrides: other values of the job's keys: ``rounds=3``, ``**{"federated.clients": 4}``.

    Raises:
        UserError: the job or the task cannot be used, or the run failed: one sentence.
    """
    return _started("run", job, task, overrides, run_dir, on_round, track, wait=wait, quiet=quiet)


def simulate(
    job: Path | str | Mapping[str, Any],
    task: type[Task] | None = None,
    *,
    clients: int | None = None,
    cohort: int | None = None,
    run_dir: Path | str | None = None,
    on_round: OnRound | None = None,
    wait: bool = True,
    quiet: bool = False,
    track: Sequence[str] = (),
    **overrides: Any,
) -> Run:
    """Train a job with simulated devices, as the command `isthmus simulate` does.

    Args:
        job: see `run`, also for the arguments that are not listed here.
        task: likewise.
        clients: devices of the population, in place of the job's.
        cohort: updates in a round, in place of the job's.
        run_dir: see `run`.
        on_round: likewise.
        wait: likewise.
        quiet: likewise.
        track: likewise.
        **overrides: likewise.

    Raises:
        UserError: the job or the task cannot be used or simulated, or the run failed.
    """
    if clients is not None:
        overrides = {"simulation.clients": clients, **overrides}
    if cohort is not None:
        overrides = {"federated.cohort": cohort, **overrides}
    return _started(
        "simulate", job, task, overrides, run_dir, on_round, track, wait=wait, quiet=quiet
    )


def _started(
    command: str,
    job: Path | str | Mapping[str, Any],
    task: type[Task] | None,
    overrides: Mapping[str, Any],
    run_dir: Path | str | None,
    on_round: OnRound | None,
    track: Sequence[str],
    *,
    wait: bool,
    quiet: bool,
) -> Run:
    _check_is_job(job)
    name = job.get("name", "run") if isinstance(job, Mapping) else Path(job).stem
    directory = Path(run_dir) if run_dir is not None else _fresh_directory(str(name))
    made = directory.with_name(f"{directory.name}-job")
    path, changes = job_arguments(job, task, overrides, made)
    arguments = [str(path), *(part for change in changes for part in ("--set", change))]
    arguments += [part for tracker in track for part in ("--track", tracker)]
    return Run(directory)._start(command, arguments, on_round, wait=wait, quiet=quiet)


def job_arguments(
    job: Path | str | Mapping[str, Any],
    task: type[Task] | None,
    overrides: Mapping[str, Any],
    made: Path,
) -> tuple[Path, list[str]]:
    """The job file and the changes of its keys, `key=value`, as commands take them.

    Args:
        job: see `run`.
        task: likewise.
        overrides: likewise.
        made: folder for the files of a job or task that has none.

    Raises:
        UserError: the job or the task is none, or cannot be written.
    """
    _check_is_job(job)
    if task is not None:
        overrides = {"task.source": source_of(task, made), **overrides}
    path = _written(job, made) if isinstance(job, Mapping) else Path(job)
    return path, [f"{key}={_literal(value)}" for key, value in overrides.items()]


def _check_is_job(job: object) -> None:
    if not isinstance(job, str | Path | Mapping):
        raise UserError(f"the job is a job file or a mapping of its tables, and not {job!r}")


def _written(job: Mapping[str, Any], folder: Path) -> Path:
    """Write a job file; paths of the current folder become absolute."""
    job = dict(job)
    if isinstance(job.get("model"), Mapping):
        model = dict(job["model"])
        paths = {key: str(model[key]) for key in ("start", "base") if model.get(key)}
        job["model"] = model | {key: os.path.abspath(path) for key, path in paths.items()}  # noqa: PTH100 - as below
    task = dict(job.get("task", {}))
    for key in ("data", "source"):
        path = str(task.get(key, ""))
        if path and (key == "data" or path.partition(":")[0].endswith(".py")):
            task[key] = os.path.abspath(path)  # noqa: PTH100 - keeps what follows the colon
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "job.toml"
    table = {"name": "run", **job}
    file.write_text(_toml({**table, "task": task} if task else table), encoding="utf-8")
    return file


def _literal(value: Any) -> str:
    """A value as TOML in one line."""
    if isinstance(value, Path):
        value = str(value.absolute())
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(key)} = {_literal(each)}" for key, each in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return _toml({"x": value}).removeprefix("x = ").strip()


def _toml(table: Mapping[str, Any]) -> str:
    try:
        return tomli_w.dumps(table)
    except TypeError as error:  # None, for example: a key without a value is left out
        raise UserError(f"a value of the job is none that a job file can have: {error}") from None


def _fresh_directory(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return Path("runs") / f"{name}-{stamp}-{time.monotonic_ns() % 10**6:06}"
