"""Create the Flower strategy that a job configures.

The job determines the cohort and the quorum (`federated.cohort`, `federated.quorum`). The sampling
options of Flower's strategies are therefore set here and refused in the job.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Message
from flwr.serverapp import strategy as shipped
from flwr.serverapp.strategy import Strategy

from isthmus.errors import JobError, UpdateError
from isthmus.job.flower import FlowerStrategy

ALL_NODES: Mapping[str, float] = {
    "fraction_train": 1.0,
    "fraction_evaluate": 1.0,
    "min_train_nodes": 1,
    "min_evaluate_nodes": 1,
    "min_available_nodes": 1,
}
"""Sampling options for a known cohort: select every node, however few there are."""


def sampling_options(nodes: int) -> Mapping[str, float]:
    """Sampling options with which the strategy draws `nodes` of the connected nodes."""
    return {
        **ALL_NODES,
        "fraction_train": 1e-9,  # always less than one node, so that `min_train_nodes` decides
        "min_train_nodes": nodes,
        "min_available_nodes": nodes,
    }


EVALUATED = "fraction_evaluate"
"""Sampling option that a job may set: the share of the cohort that evaluates the aggregate."""

NOISE_COUNT_OPTION = "num_sampled_clients"
"""Number of updates for which a differential privacy wrapper scales its noise."""

_TREES = ("FedXgbBagging", "FedXgbCyclic")
_CLIPPED_BY_CLIENTS = (
    "DifferentialPrivacyClientSideFixedClipping",
    "DifferentialPrivacyClientSideAdaptiveClipping",
)
_WHERE = "federated.flower.strategy"


def make_strategy(
    config: FlowerStrategy,
    quorum: int,
    *,
    clips: bool = False,
    sampling: Mapping[str, float] = ALL_NODES,
    where: str = _WHERE,
) -> Strategy:
    """Create a strategy for rounds of at least `quorum` updates.

    Args:
        config: the strategy's name, options and inner strategy.
        quorum: the fewest updates of a round.
        clips: whether devices run an app that clips its updates when a strategy relies on that.
        sampling: sampling options to set.
        where: the job key, for error messages.

    Raises:
        JobError: unknown strategy, one that cannot work here, or options that it does not accept.
    """
    strategy_class = _strategy_class(config.name, where)
    _check_usable(strategy_class, where, clips)
    parameters = inspect.signature(strategy_class).parameters
    options = dict(config.options)
    for name, value in sampling.items():
        if name == EVALUATED and name in options:
            share = options[name]
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise JobError(f"{where}.options.{name}={share!r}: must be a number from 0 to 1")
            continue
        if name in options:
            raise JobError(
                f"{where}.options.{name} is not used here: federated.cohort and federated.quorum "
                "determine the cohort; leave it out"
            )
        if name in parameters:
            options[name] = value
    if NOISE_COUNT_OPTION in parameters:
        updates = options.setdefault(NOISE_COUNT_OPTION, quorum)
        if isinstance(updates, int) and updates > quorum:
            raise JobError(
                f"{where}.options.{NOISE_COUNT_OPTION}={updates} is above the quorum of {quorum}: "
                "a round of fewer updates would get too little noise; lower it, or leave it out"
            )
    if config.inner is not None:
        options["strategy"] = make_strategy(
            config.inner, quorum, clips=clips, sampling=sampling, where=f"{where}.inner"
        )
    elif "strategy" in parameters and parameters["strategy"].default is inspect.Parameter.empty:
        raise JobError(
            f"{where}.inner is missing: {config.name} wraps another strategy; "
            'name it, e.g. inner = { name = "FedAvg" }'
        )
    try:
        strategy: Strategy = strategy_class(**options)
    except Exception as error:  # user code may raise anything
        raise JobError(f"{where}.options: {config.name}: {' '.join(str(error).split())}") from error
    return strategy


def _strategy_class(name: str, where: str) -> type[Strategy]:
    module, separator, attribute = name.rpartition(":")
    if not separator:
        candidate = getattr(shipped, name, None) if name in shipped.__all__ else None
        if candidate is None:
            known = ", ".join(
                known_name
                for known_name in shipped.__all__
                if known_name not in ("Result", "Strategy", *_TREES)
            )
            raise JobError(
                f"{where}.name={name!r} is not a strategy of Flower; choose one of {known}, or "
                "module:Name for your own"
            )
    else:
        try:
            candidate = getattr(importlib.import_module(module), attribute, None)
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise JobError(
                f"{where}.name={name!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
    if (
        not (isinstance(candidate, type) and issubclass(candidate, Strategy))
        or candidate is Strategy
    ):
        raise JobError(f"{where}.name={name!r} is not a subclass of flwr's Strategy")
    return candidate


def _check_usable(strategy_class: type[Strategy], where: str, clips: bool) -> None:
    names = {
        base.__name__ for base in strategy_class.__mro__ if base.__module__.startswith("flwr.")
    }
    if names & set(_TREES):
        raise JobError(
            f"{where}.name={strategy_class.__name__!r} merges trees, and this model has none"
        )
    if names & set(_CLIPPED_BY_CLIENTS) and not clips:
        raise JobError(
            f"{where}.name={strategy_class.__name__!r} needs devices that clip their updates, and "
            "those of this job do not; use the one with ServerSide in its name"
        )


def innermost(strategy: Any) -> Any:
    """The innermost strategy, which aggregates; the others wrap it."""
    while isinstance(inner := getattr(strategy, "strategy", None), Strategy):
        strategy = inner
    return strategy


def check_losses(strategy: Any, replies: Iterable[Message]) -> None:
    """Refuse losses below 0 where they are raised to a power (q-FFL, Li et al. 2020).

    Raises:
        UpdateError: a loss is below 0; its power would not be a number.
    """
    aggregating = innermost(strategy)
    if not isinstance(aggregating, shipped.QFedAvg):
        return
    key = aggregating.train_loss_key
    records = [
        list(reply.content.metric_records.values()) for reply in replies if reply.has_content()
    ]
    losses = [metrics[0].get(key) for metrics in records if metrics]
    negative = sum(isinstance(loss, int | float) and loss < 0 for loss in losses)
    if negative:
        raise UpdateError(
            "QFedAvg does not support losses below 0, and "
            f"{negative} of {len(losses)} devices have one; "
            "add a constant to the task's loss, or choose another strategy"
        )


def describe_strategy(strategy: Any) -> str:
    """Name a strategy and those it wraps, for messages."""
    inner = getattr(strategy, "strategy", None)
    name = type(strategy).__name__
    return f"{name} around {describe_strategy(inner)}" if isinstance(inner, Strategy) else name
