"""The job's table `[federated]`: rounds on edge devices, and who takes part in them."""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from isthmus.errors import JobError
from isthmus.job.section import Hours, PositiveSeconds, Section


class DeviceHours(Hours):
    """Hours in which some devices may be asked to train; several for one device add up."""

    devices: Annotated[str, Field(min_length=1)]
    """Their names: `tablet-7`, or a pattern with `*`, `?` and `[...]` such as `tablet-*`."""


class Participation(Section):
    """The most that is asked of one device."""

    rounds: Annotated[int, Field(ge=1, le=1_000_000)]
    """Rounds that it may be asked to train in, whether its update came or not."""
    hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Within so many hours, at any time. Default: in the whole run."""


class Utility(Section):
    """Guided selection (Oort, Lai et al. 2021).

    A device's utility is its examples times its last mean loss, relative to the others', plus a
    bonus for those who were not asked for long, less what it is slower than the others. With secure
    aggregation nobody's loss or number of examples is known: speed and bonus decide alone.
    """

    exploration: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Share of the first cohort that is left for devices that were never asked."""
    exploration_decay: Annotated[float, Field(gt=0, le=1)] = 0.98
    """What it is multiplied with each round."""
    min_exploration: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Below this it does not fall."""
    preferred_seconds: PositiveSeconds | None = None
    """A device that takes longer is slow. Default: what four of five devices took."""
    slowness: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    """alpha: a device that takes r times the preferred seconds counts r ** -alpha; 0 is off."""
    uncertainty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """The bonus is sqrt(this x ln(round) / last round that it was asked in)."""


class Buffer(Section):
    """Asynchronous buffered aggregation (FedBuff, Nguyen et al. 2022)."""

    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Devices at work at the same time. Default: twice the cohort."""
    staleness_exponent: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """An update that began s rounds ago counts (1 + s) ** -this of a fresh one; 0: as much."""
    max_staleness: Annotated[int, Field(ge=0)] = 20
    """One that began longer ago is not used."""

    def discount(self, stale: int) -> float:
        """What an update counts that began so many rounds ago.

        >>> Buffer(staleness_exponent=0.5).discount(3)
        0.5
        """
        return float((1.0 + stale) ** -self.staleness_exponent)


def buffer_name(run_id: str, round_: int) -> bytes:
    """What devices agree on where a cohort has one model: 32 bytes that name a buffer."""
    return hashlib.sha256(f"isthmus/buffer/{run_id}/{round_}".encode()).digest()


class FlowerStrategy(Section):
    """A strategy of Flower, or one written for it."""

    name: str
    """Class name in `flwr.serverapp.strategy`, or `module:Name` of your own."""
    options: dict[str, Any] = Field(default={})
    """Its keyword arguments."""
    inner: FlowerStrategy | None = None
    """For one that wraps another, such as those for differential privacy: its `strategy`."""


class FlowerSection(Section):
    """Flower as a guest; the server needs the extra `flower`, and so do devices for an `app`."""

    strategy: FlowerStrategy = FlowerStrategy(name="FedAvg")
    """Makes the next model of a round's updates, in place of their weighted mean."""
    app: str | None = None
    """A ClientApp that trains on the devices in place of the task: `path/to/file.py:app`, relative
    to the job file, or `package.module:app`."""
    config: dict[str, bool | int | float | str] = Field(default={})
    """The app's `context.run_config`, and each message's `content["config"]`."""
    max_bytes: Annotated[int, Field(ge=1)] = 4 << 30
    """A round's updates are together in the server's memory, cohort x model; at most so much."""
    max_examples: Annotated[int, Field(ge=1)] = 1_000_000
    """With an app, a device that says that it trained on more is refused. It counts by its own
    word: a number near what honest devices have bounds what a lying one weighs."""


class FederatedSection(Section):
    """Rounds on edge devices."""

    clients: Annotated[int, Field(ge=0, le=512)] = 0
    """Devices that `isthmus run` starts on this machine."""
    mode: Literal["rounds", "buffered"] = "rounds"
    """A cohort that trains together, or a buffer of as many updates that devices fill at their own
    pace."""
    buffer: Buffer = Buffer()
    """For mode = "buffered"."""
    cohort: Annotated[int, Field(ge=1)] = 8
    """Updates wanted each round."""
    over_selection: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Invite cohort x this; the first `cohort` to report are taken (Bonawitz et al. 2019)."""
    quorum: Annotated[int, Field(ge=1)] | None = None
    """Fewest updates a round may be committed with. Default: three quarters of the cohort."""
    selection: Literal["uniform", "utility"] = "uniform"
    """Who is invited of those who may be: anybody, or whoever promises the most (`utility`)."""
    utility: Utility = Utility()
    """For selection = "utility"."""
    participation: Participation | None = None
    """How often one device may be asked. Default: in every round."""
    hours: tuple[DeviceHours, ...] = ()
    """When devices may be asked, by name; a device that no entry names may be at any time."""
    local_epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over a device's own data in one round. Default 1, unless local_steps is set."""
    local_steps: Annotated[int, Field(ge=0)] | None = None
    """Optimizer steps in one round, instead of epochs; 0 sends back a zero update."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Examples in one local step."""
    proximal: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """mu of the FedProx term mu/2 |w - w_round|^2 (Li et al. 2020); 0 is off."""
    secure_aggregation: bool = True
    """The server learns the sum of a round's updates and no single one (Bell et al. 2020)."""
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 4.0
    """With secure aggregation, elements of an update are clipped to +- this."""
    max_examples: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    """With secure aggregation, a device with more examples weighs as much as one with these."""
    flower: FlowerSection | None = None
    """Aggregate with a strategy of Flower."""

    @model_validator(mode="after")
    def _work_and_quorum_fit(self) -> FederatedSection:
        if self.local_epochs is not None and self.local_steps is not None:
            raise ValueError("set local_epochs or local_steps, not both")
        if self.quorum is not None and self.quorum > self.cohort:
            raise ValueError(
                f"quorum={self.quorum} is above cohort={self.cohort}; lower one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _secure_enough(self) -> FederatedSection:
        """With fewer, a sum would show somebody's part, or a round could be opened twice."""
        least = self._least_secure(self.cohort)
        if self.secure_aggregation and self.needed < least:
            raise ValueError(
                f"secure_aggregation needs a quorum of at least {least} with cohort={self.cohort}, "
                f"not {self.needed}; raise it, or set secure_aggregation = false"
            )
        return self

    @model_validator(mode="after")
    def _an_app_trains_as_it_likes(self) -> FederatedSection:
        fields = type(self).model_fields
        unused = [
            name
            for name in ("local_epochs", "local_steps", "batch_size", "proximal")
            if getattr(self, name) != fields[name].default
        ]
        if self.flower is not None and self.flower.app is not None and unused:
            raise ValueError(
                f"{unused[0]} says nothing to flower.app={self.flower.app!r}, which trains "
                "as it likes; leave it out, and give the app what it reads in flower.config"
            )
        return self

    @model_validator(mode="after")
    def _a_strategy_sees_updates(self) -> FederatedSection:
        if self.flower is not None and self.secure_aggregation:
            raise ValueError(
                f"flower.strategy.name={self.flower.strategy.name!r} works on single updates, and "
                "with secure_aggregation the server learns only their sum; set "
                "secure_aggregation = false if it may see each of them, or leave the strategy out"
            )
        return self

    @model_validator(mode="after")
    def _buffer_fits(self) -> FederatedSection:
        if self.mode == "rounds":
            return self
        if self.over_selection != 1:
            raise ValueError(
                f"over_selection={self.over_selection:g} does not go with mode='buffered', which "
                "keeps buffer.concurrency devices at work; leave it out"
            )
        if self.flower is not None:
            raise ValueError(
                f"flower.strategy.name={self.flower.strategy.name!r} works on rounds; set "
                "mode = 'rounds', or leave the strategy out"
            )
        return self

    @property
    def concurrency(self) -> int:
        """Devices at work at the same time with mode = "buffered"."""
        return self.buffer.concurrency or 2 * self.cohort

    @property
    def needed(self) -> int:
        """The quorum, with its default."""
        return self.quorum if self.quorum is not None else -(-3 * self.cohort // 4)

    @property
    def invited(self) -> int:
        """Devices asked in one round."""
        return math.ceil(self.cohort * self.over_selection)

    def for_cohort(self, cohort: int) -> FederatedSection:
        """The same with another cohort, and the quorum that goes with it.

        A quorum that the job sets stays, and grows where secure aggregation needs more.

        Raises:
            JobError: the quorum is above the cohort, or the cohort is too small for a secure sum.
        """
        quorum = -(-3 * cohort // 4) if self.quorum is None else self.quorum
        if self.secure_aggregation:
            quorum = max(quorum, self._least_secure(cohort))
        if cohort < quorum:
            raise JobError(f"a cohort of {cohort} devices is below the quorum of {quorum}")
        return self.model_copy(update={"cohort": cohort, "quorum": quorum})

    @staticmethod
    def _least_secure(cohort: int) -> int:
        return max(3, 56 * cohort // 100 + 1)
