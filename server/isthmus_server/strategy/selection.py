"""What selects the devices of a round among those that may be invited.

A package provides a selection by an entry point of the group `isthmus.device_selections`: a name,
which jobs write in `federated.selection`, and a class that is called with the job's `[federated]`.
The class checks `federated.selection_settings`, and raises `UserError` if they cannot be used.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from isthmus.errors import JobError, UserError
from isthmus.job.federated import FederatedSection
from isthmus.provided import make_provided
from isthmus_server.strategy.attendance import ParticipationRecord
from isthmus_server.strategy.device_selection import select_devices

SELECTIONS = "isthmus.device_selections"
"""Entry-point group of selections."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionRequest:
    """What a selection is asked for one round."""

    round: int
    """Number of the round, from 1; the same in all attempts at the round."""
    count: int
    """Devices to select; never more than there are."""
    devices: Mapping[str, int]
    """Names of the devices that may be invited now, sorted, with the number of examples that each
    declared: their hours, participation and privacy budgets allow it."""
    records: Mapping[str, ParticipationRecord]
    """Earlier invitations of devices, with their last seconds, and their last examples and loss as
    far as the server may know them."""
    seed: int
    """The job's."""

    def random(self) -> random.Random:
        """A source of random numbers that is the same in all attempts and after every resume."""
        text = f"isthmus/selection/{self.seed}/{self.round}"
        return random.Random(text)  # noqa: S311 - a sample, not a secret


class DeviceSelection(Protocol):
    """Selects the devices of each round."""

    def select(self, request: SelectionRequest) -> Sequence[str]:
        """Names of at most `count` of the devices, in any order, each once.

        Fewer are invited as they are; with fewer than the quorum the attempt fails, and is repeated
        for as long as the run would wait for devices. The answer should follow from the request
        alone, so that a resumed run invites the same devices.
        """
        ...


class UniformSelection:
    """A random sample, the same for the same seed and round."""

    def __init__(self, federated: FederatedSection) -> None:
        """`federated` has no settings for it."""

    def select(self, request: SelectionRequest) -> Sequence[str]:
        """See `DeviceSelection.select`."""
        return select_devices(
            request.devices, count=request.count, seed=request.seed, round_=request.round
        )


class UtilitySelection:
    """Guided selection (Oort, Lai et al. 2021), by `federated.utility`."""

    def __init__(self, federated: FederatedSection) -> None:
        """`federated.utility` has the settings."""
        self._guided = federated.utility

    def select(self, request: SelectionRequest) -> Sequence[str]:
        """See `DeviceSelection.select`."""
        return select_devices(
            request.devices,
            count=request.count,
            seed=request.seed,
            round_=request.round,
            records=request.records,
            guided=self._guided,
        )


class CheckedSelection:
    """The selection that a job names, whose answers are checked."""

    def __init__(self, federated: FederatedSection) -> None:
        """Construct it, which checks its settings.

        Raises:
            UserError: there is no such selection, or its settings cannot be used.
        """
        self._shown = f"federated.selection={federated.selection!r}"
        found = make_provided(SELECTIONS, federated.selection, self._shown, federated)
        if not callable(getattr(found, "select", None)):
            raise JobError(f"{self._shown} is not a selection of devices: it has no select()")
        self._selection: DeviceSelection = found

    def select(self, request: SelectionRequest) -> list[str]:
        """The names that it selects, sorted.

        Raises:
            JobError: it failed, or answered something else than names of available devices.
        """
        where = f"{self._shown} in round {request.round}"
        try:
            answer: Any = self._selection.select(request)
            if isinstance(answer, str):
                raise TypeError("select() returned a string, not names")
            names = sorted(answer)
        except Exception as error:  # third-party code may raise anything
            reason = " ".join(str(error).split())
            if not isinstance(error, UserError):
                reason = f"{type(error).__name__}: {reason}"
            raise JobError(f"{where} failed: {reason}") from error
        for name in names:
            if not isinstance(name, str) or name not in request.devices:
                raise JobError(f"{where} selected {name!r}, which is no available device")
        if len(set(names)) != len(names):
            raise JobError(f"{where} selected a device twice")
        if len(names) > request.count:
            raise JobError(f"{where} selected {len(names)} devices of at most {request.count}")
        return names
