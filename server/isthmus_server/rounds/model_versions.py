"""The models of a run by the names that policies use, and where each is on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from isthmus_server.model.global_model import GlobalModel
from isthmus_server.storage.checkpoints import Checkpoints, Saved
from isthmus_server.storage.run_state import RunState
from isthmus_server.strategy.policy import CURRENT, INITIAL, SERVED, Plan

if TYPE_CHECKING:
    from isthmus_server.flower.strategy_adapter import FlowerStrategyAdapter


class Snapshots:
    """Models as a run goes on from them, hands them out, or keeps them for a policy.

    A model that is kept is a checkpoint that is not deleted: keeping one copies nothing.
    """

    def __init__(
        self,
        model: GlobalModel,
        checkpoints: Checkpoints,
        guest: FlowerStrategyAdapter | None = None,
    ) -> None:
        """`guest` is a Flower strategy, whose state is kept with the server optimizer's."""
        self.model = model
        self.checkpoints = checkpoints
        self.guest = guest

    def names(self, saved: Mapping[str, Saved]) -> tuple[str, ...]:
        """What may be compared and started from."""
        return (CURRENT, SERVED, INITIAL, *sorted(set(saved) - {CURRENT, SERVED}))

    def read(self, name: str, saved: Mapping[str, Saved]) -> torch.Tensor:
        """A model as a vector of its own, float32 (N); `a+b` is half of each.

        Raises:
            UserError: its checkpoint is damaged.
        """
        if "+" in name:
            parts = [self.read(part, saved) for part in name.split("+")]
            return torch.stack(parts).mean(0)
        if name == INITIAL:
            return self.model.initial()
        if name in (CURRENT, SERVED):
            return (self.model.vector if name == CURRENT else self.model.served_vector).clone()
        payload = bytearray(self.model.layout.nbytes)
        self.checkpoints.read_model(saved[name], payload)
        return self.model.layout.decode(payload)

    def write(
        self, round_: int, plan: Plan, saved: Mapping[str, Saved], *, away: bool
    ) -> dict[str, Saved]:
        """Checkpoints of a round's models, beside those that were kept before it.

        `away`: the current model is in the datacenter alone, and its checkpoint stays the old one.
        """
        models = dict(saved)
        if not away:
            models[CURRENT] = self.checkpoints.write_model(round_, self.model.payload)
            self._is_stored(models[CURRENT])
            models[SERVED] = models[CURRENT]
        if self.model.served_average:
            served = self.model.served_payload
            models[SERVED] = self.checkpoints.write_model(round_, served, "served")
        for name, kept in plan.keep.items():
            if kept:
                models[name] = models[kept]
            else:
                models.pop(name, None)
        return models

    def write_optimizer(self, round_: int) -> tuple[Saved | None, dict[str, Any]]:
        """The server optimizer's state, and a Flower strategy's: their tensors' file, and numbers.

        Raises:
            UserError: there is something that cannot be stored.
        """
        tensors, numbers = self.model.optimizer_state()
        if self.guest is not None:
            self.guest.add_state(tensors, numbers)
        return self.checkpoints.write_tensors(round_, tensors), numbers

    def restore(self, at: RunState) -> None:
        """Have everything as it was after the last commit.

        Raises:
            UserError: a checkpoint is damaged.
        """
        model = self.model
        if CURRENT in at.models:
            self.checkpoints.read_model(at.models[CURRENT], model.payload)
            self._is_stored(at.models[CURRENT])
        if model.served_average and SERVED in at.models:
            self.checkpoints.read_model(at.models[SERVED], model.served_payload)
            model.averaged = at.averaged
        if at.optimizer is not None or at.optimizer_numbers:
            tensors = {} if at.optimizer is None else self.checkpoints.read_tensors(at.optimizer)
            numbers = dict(at.optimizer_numbers)
            if self.guest is not None:
                self.guest.take_state(tensors, numbers)
            model.load_optimizer_state(tensors, numbers)

    def _is_stored(self, saved: Saved) -> None:
        self.model.is_stored(self.checkpoints.directory / saved.file, saved.sha256)
