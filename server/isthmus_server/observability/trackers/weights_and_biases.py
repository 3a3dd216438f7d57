"""A run of Weights & Biases, online or offline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from isthmus.errors import UserError
from isthmus_server.observability.trackers.tracker import TrackedRun


class WeightsAndBiases:
    """Logs to a run of a project.

    The key, the host and the mode (`WANDB_MODE=offline`) are those of its own environment. Code,
    console output, the state of git and figures of the machine are not collected.
    """

    def __init__(self, project: str | None) -> None:
        """Use a project; None for that of the environment or the job's name."""
        self._project = project
        self._run: Any = None
        self._by_steps = False
        """Whether figures of single steps come too."""

    def begin(self, run: TrackedRun) -> str:
        """Begin or continue the run; its id is that of Isthmus.

        Raises:
            UserError: nobody is logged in, and it is not offline.
        """
        import wandb

        library: Any = wandb
        online = os.environ.get("WANDB_MODE", "online") not in ("offline", "disabled", "dryrun")
        if online and not library.login(prompt=False, verify=False):
            raise UserError("nobody is logged in; run `wandb login`, or set WANDB_MODE=offline")
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = library.init(
            project=self._project or os.environ.get("WANDB_PROJECT") or run.name,
            id=run.run_id,
            name=run.run_id,
            config=dict(run.parameters),
            dir=str(run.folder),
            resume="allow",
            settings=library.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                save_code=False,
                silent=True,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )
        # One run has one axis of steps, which only grows: figures of both kinds name their own.
        self._by_steps = bool(run.parameters.get("datacenter.log_steps"))
        if self._by_steps:
            self._run.define_metric("*", step_metric="round")
            self._run.define_metric("steps/*", step_metric="steps/step")
        return run.run_id

    def log(self, round_: int, figures: Mapping[str, float]) -> None:
        """Log figures; the step is the round."""
        if self._by_steps:
            self._run.log({**figures, "round": round_})
            return
        self._run.log(dict(figures), step=round_)

    def log_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Log figures of an optimizer step."""
        self._run.log({**figures, "steps/step": step})

    def end(self, failed: bool) -> None:
        """Send what is left."""
        self._run.finish(exit_code=int(failed))
