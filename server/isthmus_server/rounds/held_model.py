"""Fetch the model that only a datacenter has."""

from __future__ import annotations

import dataclasses

from isthmus.errors import RoundFailed
from isthmus_server.model.global_model import GlobalModel
from isthmus_server.regimes.datacenter import DatacenterRegime
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.rounds.run_progress import RunProgress
from isthmus_server.transport.link import Link


class HeldModel:
    """The committed model of a run, as far as it stayed in the datacenter that trained it."""

    def __init__(
        self,
        link: Link,
        model: GlobalModel,
        progress: RunProgress,
        roster: ParticipantRoster,
        datacenter: DatacenterRegime,
    ) -> None:
        self._link = link
        self._model = model
        self._progress = progress
        self._roster = roster
        self._datacenter = datacenter
        self._fetched_after: int | None = None
        """The committed round whose model was fetched last."""

    async def fetch(self) -> None:
        """Bring the model to the server; does nothing if it is there.

        Raises:
            RoundFailed: the datacenter is not connected, or could not send the model.
        """
        state = self._progress.state
        if not state.model_in_datacenter:
            return
        name = state.holder
        assert name is not None
        if not await self._roster.wait_for(datacenters=[name]):
            raise RoundFailed(f"the datacenter {name!r}, which has the model, is not connected")
        async with self._link.turn([name]):
            # In the place of the model that the datacenter has changed: nobody needs it any more.
            with self._model.being_filled() as payload:
                await self._datacenter.export(name, state.datacenter_step, payload)
        # Not stored: after a crash the server has no model again, and fetches it again.
        self._progress.state = dataclasses.replace(self._progress.state, model_in_datacenter=False)
        self._fetched_after = state.round

    def forget(self) -> None:
        """Note that the server has only what is stored, as after a crash."""
        state = self._progress.state
        if self._fetched_after == state.round:
            self._progress.state = dataclasses.replace(state, model_in_datacenter=True)
            self._fetched_after = None
