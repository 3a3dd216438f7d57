"""The job's table `[strategy]`: which regime a round uses, and how the next model follows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from isthmus.job.section import FREE, Hours, Price, Section

RegimeName = Literal["datacenter", "federated", "hybrid"]


class ServerOptimizer(Section):
    """Any optimizer of `torch.optim`, applied to the merged pseudo-gradient (Reddi et al. 2021).

    SGD with lr=1 is FedAvg; momentum makes it FedAvgM, Nesterov DiLoCo's outer step, Adam FedAdam.
    """

    name: str = "SGD"
    """Class name in `torch.optim`."""
    options: Annotated[dict[str, Any], FREE] = Field(default={"lr": 1.0})
    """Keyword arguments of the class."""


class Window(Hours):
    """Hours in which one regime is available."""

    side: Literal["datacenter", "federated"]
    """The regime. One without any window is always available."""


class Phase(Section):
    """Consecutive rounds in one regime."""

    regime: RegimeName
    """The regime of these rounds."""
    rounds: Annotated[int, Field(ge=1)] | None = None
    """Number of rounds; without it the phase lasts until the end of the run."""
    hours: tuple[Hours, ...] = ()
    """Only in these hours; outside of them later phases are used."""


class TargetMetric(Section):
    """A value of a central held-out metric at which the run ends."""

    name: str
    """The metric: `loss`, or one that the task returns."""
    at_least: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The value, for a metric that rises, such as an accuracy."""
    at_most: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The value, for a metric that falls, such as a loss."""

    @model_validator(mode="after")
    def _one_value(self) -> TargetMetric:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(
                "set at_least for a metric that rises or at_most for one that falls, and not both"
            )
        return self

    @property
    def rises(self) -> bool:
        """Whether higher is better."""
        return self.at_least is not None

    def missing(self, value: float) -> float:
        """How far a value is from the target; 0 or less if the target is reached."""
        return self.at_least - value if self.at_least is not None else value - (self.at_most or 0.0)

    def __str__(self) -> str:
        """In words."""
        if self.at_least is not None:
            return f"{self.name} of at least {self.at_least:g}"
        return f"{self.name} of at most {self.at_most:g}"


class PricesSection(Section):
    """Prices of work in a unit of your choice, which `budget` and the report use."""

    client_update: Price = 1.0
    """One device taking part in one round."""
    datacenter_step: Price = 0.01
    """One optimizer step of the whole datacenter."""
    client_evaluation: Price = 0.02
    """One device scoring one model."""


class StrategySection(Section):
    """The choice of each round's regime, and the computation of the next model."""

    policy: str = "alternate"
    """`adaptive`, `rule`, `datacenter`, `federated`, `hybrid`, `alternate`, `schedule`, `plateau`,
    `budget`, `availability`, `bandit`, one that a package provides, or your own `module:Name`."""
    schedule: tuple[Phase, ...] = ()
    """For the policy `schedule`: each round uses the first phase with rounds left and within its
    hours; after all phases the last one continues."""
    settings: Annotated[dict[str, Any], FREE] = Field(default={})
    """Settings of the policy, see docs/strategy.md."""
    objective: Literal["quality", "time", "cost"] = "quality"
    """`quality`: the best model within the limits. `time`, `cost`: `target_metric` in the shortest
    time, or at the lowest price. Only the policy `adaptive` uses it to choose regimes."""
    target_metric: TargetMetric | None = None
    """The run ends after the round that reaches it, with any policy."""
    target_edge_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the target distribution that is on the devices; the rest is the datacenter's."""
    windows: tuple[Window, ...] = ()
    """When devices or the datacenter are available: none of their rounds begins outside."""
    merge: Literal["weighted", "projected", "transfer"] = "weighted"
    """How a hybrid round merges both pseudo-gradients: `weighted`, a weighted mean; `projected`,
    the mean without the datacenter's component against the devices' direction (Yu et al. 2020);
    `transfer`, only the devices', which add the datacenter's gradient to each of their steps
    (one-way transfer, Augenstein et al. 2022)."""
    datacenter_weight: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of the datacenter's pseudo-gradient in a hybrid round; the rest is the devices'."""
    transfer_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """For merge = "transfer": the factor of the datacenter's gradient."""
    served_average: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of an exponential moving average of the rounds' models, which is evaluated and served;
    0 serves the last model."""
    server_optimizer: ServerOptimizer = ServerOptimizer()
    """The optimizer that applies the merged pseudo-gradient to the model."""

    @model_validator(mode="after")
    def _has_target(self) -> StrategySection:
        if self.objective != "quality" and self.target_metric is None:
            raise ValueError(
                f"objective={self.objective!r} needs a target_metric, such as "
                '{ name = "accuracy", at_least = 0.9 }'
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> StrategySection:
        if self.policy == "schedule" and not self.schedule:
            raise ValueError("policy='schedule' needs at least one phase in strategy.schedule")
        for number, phase in enumerate(self.schedule[:-1], 1):
            if phase.rounds is None and not phase.hours:
                raise ValueError(
                    f"phase {number} of strategy.schedule never ends, and others follow it; "
                    "give it rounds or hours"
                )
        return self
