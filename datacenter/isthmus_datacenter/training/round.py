"""Train one round on one rank: start or resume, take the steps (`step_loop`), save and evaluate."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from isthmus.errors import StorageError
from isthmus.task.definition import defines
from isthmus.task.scoring import Averages
from isthmus_datacenter.checkpointing.checkpoints import MidRoundCheckpoint, RankProgress
from isthmus_datacenter.checkpointing.model_file import load_shards, store_shards
from isthmus_datacenter.messages import (
    PROFILES,
    Command,
    ControlSignal,
    ReadSignal,
    RecordedStep,
)
from isthmus_datacenter.training.consensus import (
    ConsensusError,
    StoppedError,
    fail_together,
    gather_averages,
)
from isthmus_datacenter.training.engine import Engine
from isthmus_datacenter.training.profile import ProgressReporter, RoundProfile, SendReport
from isthmus_datacenter.training.rng import generator_states, restore_generators
from isthmus_datacenter.training.step_figures import StepRecorder
from isthmus_datacenter.training.step_loop import StartPoint, StepLoop
from isthmus_datacenter.training.step_trace import StepTrace


def train_round(
    engine: Engine, command: Command, send_report: SendReport, read_signal: ReadSignal
) -> dict[str, object]:
    """Train from one absolute step to another, and save the state there.

    All ranks call this together. The engine's `figures` are the round's profile afterwards.

    Args:
        engine: the run.
        command: the steps, the model to load, and where to write the result.
        send_report: receives progress reports on one rank.
        read_signal: returns the control signal that this rank has received.

    Returns:
        Counts, losses and notes, identical on all ranks but for `seconds`.

    Raises:
        ConsensusError: there is no state to start from, the loss is not finite, or a signal
            stopped the steps.
        StorageError: a checkpoint could not be written or read.
        TaskError: the task raised on this rank, maybe on this one only.
    """
    return _Round(engine, command).run(send_report, read_signal)


class _Round:
    """One training command."""

    def __init__(self, engine: Engine, command: Command) -> None:
        self._engine = engine
        self._command = command
        self._profile = RoundProfile(engine.placement.device)
        if command.until_step > command.from_step:
            engine.go_to_step(command.from_step, trains=True)
        self._state_step = self._find_state_step()
        """Step whose state the round starts from; None for the initial state."""
        self._lineage = self._compute_lineage()
        """Identifies everything that states within the round follow from; None if unknown."""
        self._newest_mid_round: MidRoundCheckpoint | None = None
        self._resets_optimizer = engine.job.datacenter.optimizer_on_load == "reset"
        self._rate: float | None = None
        """Scheduled learning rate of the first step."""
        self._recorder: StepRecorder | None = None
        self._trace = self._make_trace()
        self._flops = 0.0
        """Operations of one step; 0 if unknown."""

    def run(self, send_report: SendReport, read_signal: ReadSignal) -> dict[str, object]:
        """See `train_round`."""
        engine = self._engine
        command = self._command
        profile = self._profile
        engine.round = command.round
        # The state first: the schedules' rates are set on the optimizer that it brings.
        start = self._resume() or self._start()
        with fail_together():
            self._rate = engine.begin_schedules(command.position)
        recorder = self._recorder = self._make_recorder(start)
        loop = StepLoop(
            engine.forward_backward,
            engine.optimizer,
            engine.layout.statistics,
            profile,
            start,
            recorder,
        )
        try:
            loss = self._train_steps(loop, start, send_report, read_signal)
        except ConsensusError:
            with contextlib.suppress(StorageError):  # the first failure is the one to report
                engine.checkpoints.finish_save()  # collective: every rank raises this error
            raise
        per_step = engine.order.replicas * engine.order.batch_size
        steps, trained = (command.until_step - first for first in (command.from_step, start.step))
        figures = profile.step_figures(
            trained, trained * per_step, loop.units - start.units, self._flops
        )
        with profile.host_time("checkpoint"):
            engine.checkpoints.begin_save(command.until_step, engine.shard, engine.optimizer)
        # Neither of these changes the state, which is being written at the same time.
        evaluation = {}
        if command.evaluate:
            with profile.host_time("evaluation"):
                evaluation = engine.evaluator.run(engine.forward_backward, engine.coordinates.data)
                engine.shard.check_structure()
        # Before others need memory for the result: nothing is trained until they have it.
        engine.trim_memory()
        if command.result is not None:
            with profile.host_time("exchange"):
                store_shards(Path(command.result), engine.layout, engine.shard)
        with profile.host_time("checkpoint"):
            engine.checkpoints.finish_save()
        if engine.placement.rank == 0:
            engine.checkpoints.keep_only({*self._needed_steps(), command.until_step})
        engine.step = command.until_step
        engine.figures = {**figures, **profile.round_figures()} if trained else {}
        return {
            "steps": steps,
            "resumed": start.step if start.step > command.from_step else None,
            "notes": self._notes(),
            "examples": steps * per_step,
            "training": self._training_figures(loss, loop.parts),
            "evaluation": evaluation,
            "step_figures": _as_mappings(recorder),
            "seconds": profile.seconds,
        }

    # -- start ----------------------------------------------------------------------------------

    def _find_state_step(self) -> int | None:
        """The step whose state the round starts from; None for the initial state.

        If the command has a model, the rest of the state may be older, or new: this datacenter
        may have been disconnected for some rounds, or take part for the first time.
        """
        checkpoints = self._engine.checkpoints
        first = self._command.from_step
        if self._command.model is None or first == 0 or checkpoints.has(first):
            return first
        return checkpoints.newest_step(first)

    def _compute_lineage(self) -> str | None:
        """A digest of everything that the round's states follow from; None if it is not known."""
        engine = self._engine
        command = self._command
        if command.model is not None and not command.model_digest:
            return None
        step = self._state_step
        before = "nothing" if step is None else engine.checkpoints.data_name(step)
        where = f"{engine.dims.data} {engine.dims.pipeline} {command.position}"
        where += f" {engine.order.position(command.from_step)}"
        # All that decides about the states within the round, so that a checkpoint of another
        # attempt is used exactly if it is what this attempt would have computed.
        text = f"{before} {command.model_digest} {where} {engine.job.model_dump_json()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _start(self) -> StartPoint:
        """Restore the state before the round's first step."""
        engine = self._engine
        command = self._command
        # A model that comes replaces the parameters. What is needed of the state before are the
        # optimizer, if it is kept, and buffers that are not exchanged.
        if command.model is None or not self._resets_optimizer or engine.shard.has_buffers():
            if self._state_step is None:
                engine.reset_to_initial_state()
            else:
                engine.restore_step(self._state_step)
        engine.invalidate_state()
        if command.model is not None:
            with self._profile.host_time("exchange"):
                load_shards(Path(command.model), engine.layout, engine.shard)
            if self._resets_optimizer:
                engine.reset_optimizer()
        engine.seed_generators(command.from_step)
        return StartPoint(command.from_step)

    def _resume(self) -> StartPoint | None:
        """Restore the last state that an earlier attempt saved within this round, if any."""
        engine = self._engine
        command = self._command
        if self._lineage is None or command.until_step == command.from_step:
            return None
        checkpoint = engine.checkpoints.newest_mid_round(self._lineage, command.until_step)
        if checkpoint is None:
            return None
        engine.invalidate_state()
        self._newest_mid_round = checkpoint
        with fail_together():
            engine.reset_optimizer()
        progress = engine.checkpoints.restore_mid_round(
            checkpoint, engine.shard, engine.optimizer, self._position()
        )
        restore_generators(progress.generators, engine.placement.device)
        recorded = [RecordedStep(**each) for each in progress.step_figures]
        return StartPoint(
            checkpoint.step, progress.loss_sum, progress.units, progress.parts, recorded
        )

    def _position(self) -> str:
        coordinates = self._engine.coordinates
        return f"{coordinates.data}.{coordinates.pipeline}"

    def _needed_steps(self) -> set[int]:
        """Steps whose checkpoints a repetition of the round needs."""
        steps = {self._command.from_step}
        return steps if self._state_step is None else steps | {self._state_step}

    def _training_figures(self, loss: float | None, parts: Averages) -> dict[str, float]:
        """The mean loss and its named parts, and with a schedule the first step's learning rate."""
        if loss is None:
            return {}
        figures = {"loss": loss}
        if defines(self._engine.task, "training_step"):
            own = [parts] if self._engine.forward_backward.counts_losses else []
            gathered = gather_averages(own).result()
            figures = {**gathered, **figures}
        return figures if self._rate is None else {**figures, "learning_rate": self._rate}

    def _notes(self) -> list[str]:
        """Notes for the user on what the round started from."""
        command = self._command
        state_step = self._state_step
        change = None
        if command.until_step > command.from_step:
            change = self._engine.positions.change_at(command.from_step)
        notes = [*filter(None, [change, self._trace.note])]
        if command.model is None or self._resets_optimizer or state_step == command.from_step:
            return notes
        kept = "a new one" if state_step is None else f"that of step {state_step}"
        return [
            *notes,
            f"the optimizer kept at step {command.from_step} is {kept}: this datacenter did not "
            "train the steps before",
        ]

    # -- steps ----------------------------------------------------------------------------------

    def _train_steps(
        self, loop: StepLoop, start: StartPoint, send_report: SendReport, read_signal: ReadSignal
    ) -> float | None:
        """Train; return the mean loss over the round, None without steps or if it is private."""
        engine = self._engine
        profile = self._profile
        first = self._command.from_step
        until = self._command.until_step
        reporter = None
        reports = engine.forward_backward.counts_losses and engine.coordinates.data == 0
        if reports and not engine.private:  # nobody may know a private loss
            reporter = ProgressReporter(
                send_report,
                until - first,
                engine.order.replicas * engine.order.batch_size,
                engine.placement.device,
                steps_before=start.step - first,
                loss_sum_before=start.loss_sum,
                recorder=self._recorder,
            )
        profile.begin()
        # By the step and not by what was read before: a resumed round reads what an undisturbed one
        # would.
        batches = profile.timed_reads(engine.batch_source.batches(start.step, until))
        position = self._command.position + start.step - first
        try:
            for taken in loop.take(self._observed(batches, start.step), position, read_signal):
                self._trace.after(taken.step)
                if reporter is not None:
                    reporter.step(loop.loss_sum, taken.local_units, taken.global_units)
                # The last step has the round's own checkpoint.
                if self._lineage is not None and taken.step + 1 < until:
                    checkpoint = MidRoundCheckpoint(self._lineage, taken.step + 1)
                    self._save_mid_round(checkpoint, loop, taken.signal)
            self._trace.end()
        finally:
            self._trace.abandon()
        mean = loop.finish(first, until)
        profile.end()
        return None if engine.private else mean

    def _make_recorder(self, start: StartPoint) -> StepRecorder | None:
        """What records the figures of steps; None if the job asks for none."""
        engine = self._engine
        interval = engine.job.datacenter.log_steps
        if not interval:
            return None
        return StepRecorder(
            interval,
            engine.placement.device,
            engine.dims.ranks,
            counts_losses=engine.forward_backward.counts_losses,
            earlier=start.step_figures,
        )

    def _make_trace(self) -> StepTrace:
        """What traces the steps that the job has chosen."""
        engine = self._engine
        chosen = engine.job.datacenter.profile_steps
        steps = range(0) if chosen is None else range(chosen[0] - 1, chosen[1])
        state = engine.placement.state
        # Not in the run's own directory, which is deleted when the run is over.
        directory = state.parent / PROFILES / state.name
        return StepTrace(steps, directory, engine.placement.rank, engine.placement.device)

    def _observed(self, batches: Iterable[Any], first: int) -> Iterator[Any]:
        """The batches as they are; the operations of a step are counted on the first one."""
        for step, batch in enumerate(batches, first):
            self._flops = self._engine.step_flops(batch)
            self._trace.before(step)
            yield batch

    def _save_mid_round(
        self,
        checkpoint: MidRoundCheckpoint,
        loop: StepLoop,
        signal: ControlSignal,
    ) -> None:
        """Save the state within the round, at the job's interval or because of a signal.

        Raises:
            StoppedError: a signal requested it, and the state is saved.
        """
        engine = self._engine
        command = self._command
        interval = engine.job.datacenter.checkpoint_steps
        if signal is not ControlSignal.SAVE and (interval == 0 or checkpoint.step % interval):
            return
        progress = RankProgress(
            position=self._position(),
            saves=engine.coordinates.tensor == 0,
            generators=generator_states(engine.placement.device),
            loss_sum=float(loop.loss_sum),
            units=loop.units,
            parts={
                name: (float(part), float(loop.parts.counts[name]))
                for name, part in loop.parts.sums.items()
            },
            step_figures=_as_mappings(self._recorder),
        )
        with self._profile.host_time("checkpoint"):
            engine.checkpoints.begin_mid_round_save(
                checkpoint, engine.shard, engine.optimizer, progress
            )
            if engine.placement.rank == 0:  # the previous one is complete by now
                engine.checkpoints.keep_only(self._needed_steps(), self._newest_mid_round)
        self._newest_mid_round = checkpoint
        if signal is ControlSignal.SAVE:
            engine.checkpoints.finish_save()
            raise StoppedError(
                f"stopped after step {checkpoint.step} of {command.from_step} to "
                f"{command.until_step}, which is saved: the machines are about to be taken away"
            )


def _as_mappings(recorder: StepRecorder | None) -> list[dict[str, Any]]:
    """All figures of a round so far, as they are sent and stored."""
    return [] if recorder is None else [dataclasses.asdict(each) for each in recorder.finish()]
