"""The job's table `[simulation]`: devices that `isthmus simulate` computes in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from isthmus.errors import JobError
from isthmus.job.section import PositiveSeconds, Section

if TYPE_CHECKING:
    from isthmus.job.federated import FederatedSection

MOST_CONNECTED = 2000
"""Simulated devices that are connected at the same time by default, in a larger population."""

Spread = Annotated[float, Field(ge=0, le=5)]
Megabits = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SimulationSection(Section):
    """Simulated devices; only `isthmus simulate` and `isthmus plan` read this table.

    Durations are those of a simulated clock, on which `time` and `federated.hours` count too.
    """

    clients: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Devices of the population. Default: `federated.clients`."""
    connected: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Devices that are connected at the same time: random ones, others in each round. Default: all,
    but in a population of more than 2,000 that many, or twice the devices that a round invites."""
    training: Literal["auto", "stacked", "one-by-one"] = "auto"
    """Train the devices of a round in one batch of stacked models, or one after the other with the
    bits of real devices. `auto` measures which is faster."""
    processes: Annotated[int, Field(ge=1, le=256)] | None = None
    """Processes that train devices, with the same result for any number. Default: one for each
    core, or for each GPU with `federated.device`. Under torchrun each rank is one process."""
    step_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Simulated duration of a local step on the median device."""
    speed_spread: Spread = 0.0
    """Standard deviation of the logarithm of the devices' speeds; 0: all are equal."""
    down_mbit: Megabits | None = None
    """Megabits per second that the median device receives. Default: transfers take no time."""
    up_mbit: Megabits | None = None
    """Megabits per second that the median device sends. Default: transfers take no time."""
    bandwidth_spread: Spread = 0.0
    """Standard deviation of the logarithm of the devices' bandwidths."""
    datacenter_step_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Simulated duration of a step of the datacenter."""
    dropout: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of requests during which a device is lost."""
    offline_seconds: PositiveSeconds = 60.0
    """Simulated time after which a lost device is back."""

    @property
    def has_speeds(self) -> bool:
        """Whether anything takes a device time: its steps or its transfers."""
        return bool(self.step_seconds) or self.has_rates

    @property
    def has_rates(self) -> bool:
        """Whether transfers of devices take time."""
        return self.up_mbit is not None or self.down_mbit is not None

    def population(self, federated: FederatedSection) -> int:
        """The number of devices.

        Raises:
            JobError: nothing says it, or there are fewer than a round needs.
        """
        count = self.clients or federated.clients
        if not count:
            raise JobError(
                "the job names no number of devices to simulate; give --clients, or set "
                "simulation.clients"
            )
        if count < federated.cohort:
            raise JobError(
                f"a population of {count} devices (simulation.clients) is smaller than the cohort "
                f"of {federated.cohort} (federated.cohort); raise it, or lower the cohort"
            )
        return count

    def connections(self, population: int, invited: int) -> int:
        """The number of devices that are connected at the same time.

        Raises:
            JobError: they are fewer than a round invites.
        """
        count = self.connected or max(MOST_CONNECTED, 2 * invited)
        if self.connected is not None and count < min(invited, population):
            raise JobError(
                f"simulation.connected={count} is below the {invited} devices that a round "
                "invites; raise it"
            )
        return min(count, population)
