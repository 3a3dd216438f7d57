"""Versions of the model by the names that policies use, in memory and as checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from isthmus.job.measurements import EvaluationSection
from isthmus.transport.blobs import describe
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.storage.checkpoints import Checkpoints, Saved
from isthmus_server.storage.run_state import RunState
from isthmus_server.strategy.observation import best_round, improves
from isthmus_server.strategy.policy import BEST, CURRENT, INITIAL, SERVED, PastRound, Plan

if TYPE_CHECKING:
    from isthmus_server.regimes.base import FederatedExtension

_EXTENSION = "extension."
"""Prefix of an extension's tensors and values among those of the server optimizer."""


class ModelVersions:
    """Reads, writes and restores the versions of one run's model.

    A model that a policy keeps is a checkpoint that is not deleted: keeping it copies nothing.
    """

    def __init__(
        self,
        model: GlobalModel,
        checkpoints: Checkpoints,
        evaluation: EvaluationSection,
        extension: FederatedExtension | None = None,
    ) -> None:
        """Prepare.

        Args:
            model: of the run.
            checkpoints: of the run.
            evaluation: the job's table, which says whether a best model is kept.
            extension: its state is stored with the server optimizer's.
        """
        self._model = model
        self._checkpoints = checkpoints
        self._evaluation = evaluation
        self._extension = extension

    def names(self, saved: Mapping[str, Saved]) -> tuple[str, ...]:
        """Versions that can be compared, and that a round can start from."""
        return (CURRENT, SERVED, INITIAL, *sorted(set(saved) - {CURRENT, SERVED}))

    def read(self, name: str, saved: Mapping[str, Saved]) -> torch.Tensor:
        """A copy of a version, float32 (N); `a+b` is the mean of two versions.

        Raises:
            UserError: its checkpoint is damaged.
        """
        if "+" in name:
            parts = [self.read(part, saved) for part in name.split("+")]
            return torch.stack(parts).mean(0)
        if name == INITIAL:
            return self._model.initial()
        if name in (CURRENT, SERVED):
            return (self._model.vector if name == CURRENT else self._model.served_vector).clone()
        payload = bytearray(self._model.layout.nbytes)
        self._checkpoints.read_model(saved[name], payload)
        return self._model.layout.decode(payload)

    @functools.cached_property
    def initial_sha256(self) -> bytes:
        """SHA-256 of the model that the run began with, from which devices may have trained."""
        return describe(self._model.layout.encode(self._model.initial())).sha256

    def sha256(self, name: str, saved: Mapping[str, Saved]) -> bytes:
        """SHA-256 of a version as an encoded model; empty if it is not known."""
        if name in (CURRENT, SERVED):
            model = self._model
            return model.blob.sha256 if name == CURRENT else bytes.fromhex(model.served_sha256)
        return bytes.fromhex(saved[name].sha256) if name in saved else b""

    def write(
        self, round_: int, plan: Plan, saved: Mapping[str, Saved], *, only_in_datacenter: bool
    ) -> dict[str, Saved]:
        """Write a round's checkpoints; returns all checkpoints that the run then has.

        `only_in_datacenter`: the current model is not on the server, so its last checkpoint stays.
        """
        models = dict(saved)
        if not only_in_datacenter:
            # In a file of its own: until this round is committed, the run continues from the last
            # one's.
            models[CURRENT] = self._checkpoints.write_model(round_, self._model.payload)
            self._mark_stored(models[CURRENT])
            models[SERVED] = models[CURRENT]
        if self._model.served_average:
            served = self._model.served_payload
            models[SERVED] = self._checkpoints.write_model(round_, served, "served")
        for name, kept in plan.keep.items():
            if kept:
                models[name] = models[kept]
            else:
                models.pop(name, None)
        return models

    def with_best(
        self, saved: Mapping[str, Saved], before: RunState, metrics: Mapping[str, float]
    ) -> dict[str, Saved]:
        """The checkpoints after a round with these metrics, with that of the best model.

        Raises:
            JobError: the task does not have the metric of `evaluation.keep_best`.
        """
        keep = self._evaluation.keep_best
        if keep is None or not improves(metrics, best_round(before.history, keep), keep):
            return dict(saved)
        return {**saved, BEST: saved[SERVED]}

    def load_delivered(self, state: RunState) -> PastRound | None:
        """Load the best model, if the run delivers it; returns the round of the delivered model.

        Raises:
            UserError: its checkpoint is damaged.
        """
        keep = self._evaluation.keep_best
        if keep is None or self._evaluation.deliver == "last" or BEST not in state.models:
            return state.history[-1] if state.history else None
        # The served average begins again at this model, so that it is delivered as it is.
        self._model.restart(self.read(BEST, state.models))
        return best_round(state.history, keep)

    def write_optimizer(self, round_: int) -> tuple[Saved | None, dict[str, Any]]:
        """Write the state of the server optimizer and of the extension.

        Returns the file of its tensors, and its JSON values.

        Raises:
            UserError: the state contains something that cannot be stored.
        """
        tensors, numbers = self._model.optimizer_state()
        if self._extension is not None:
            more_tensors, more_numbers = self._extension.export_state()
            tensors |= {_EXTENSION + name: tensor for name, tensor in more_tensors.items()}
            numbers |= {_EXTENSION + name: value for name, value in more_numbers.items()}
        return self._checkpoints.write_tensors(round_, tensors), numbers

    def undo(self, state: RunState) -> None:
        """Return to the last commit from whatever an attempt that failed has left.

        A model that only a datacenter has is not restored.

        Raises:
            UserError: a checkpoint is damaged.
        """
        # What the commit does not name is as it was at the start of the run.
        if CURRENT not in state.models:
            self._model.restart(self._model.initial())
        self._model.averaged = 0
        self._model.load_optimizer_state({}, {})
        if self._extension is not None:
            self._extension.reset()
        self.restore(state)

    def restore(self, state: RunState) -> None:
        """Restore models and optimizer state as of the last commit; what it does not name stays.

        Raises:
            UserError: a checkpoint is damaged.
        """
        model = self._model
        if CURRENT in state.models:
            self._checkpoints.read_model(state.models[CURRENT], model.payload)
            self._mark_stored(state.models[CURRENT])
        if model.served_average and SERVED in state.models:
            self._checkpoints.read_model(state.models[SERVED], model.served_payload)
            model.averaged = state.averaged
        if state.optimizer is not None or state.optimizer_numbers:
            tensors = (
                {} if state.optimizer is None else self._checkpoints.read_tensors(state.optimizer)
            )
            numbers = dict(state.optimizer_numbers)
            if self._extension is not None:
                self._extension.import_state(_pop_extension(tensors), _pop_extension(numbers))
            model.load_optimizer_state(tensors, numbers)

    def _mark_stored(self, saved: Saved) -> None:
        self._model.mark_stored(self._checkpoints.directory / saved.file, saved.sha256)


def _pop_extension(table: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in table if name.startswith(_EXTENSION)]
    return {name.removeprefix(_EXTENSION): table.pop(name) for name in names}
