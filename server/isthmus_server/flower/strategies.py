"""Making the strategy that a job names.

Whom to ask, and how many of them have to answer, is the job's business (`federated.cohort`,
`quorum`), so the options with which Flower's strategies do their own sampling are not the user's.
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
from isthmus.job.federated import FlowerStrategy

EVERYBODY: Mapping[str, float] = {
    "fraction_train": 1.0,
    "fraction_evaluate": 1.0,
    "min_train_nodes": 1,
    "min_evaluate_nodes": 1,
    "min_available_nodes": 1,
}
"""The options of sampling where the cohort is known: everybody, however few they are."""


def so_many(nodes: int) -> Mapping[str, float]:
    """The options of sampling where the strategy draws so many nodes of those connected."""
    return {
        **EVERYBODY,
        "fraction_train": 1e-9,  # of any number of nodes less than one: `min_train_nodes` decides
        "min_train_nodes": nodes,
        "min_available_nodes": nodes,
    }


RELEASES = "num_sampled_clients"
"""The number of updates that a wrapper for differential privacy reckons its noise for."""

_TREES = ("FedXgbBagging", "FedXgbCyclic")
_CLIPPED_BY_CLIENTS = (
    "DifferentialPrivacyClientSideFixedClipping",
    "DifferentialPrivacyClientSideAdaptiveClipping",
)
_WHERE = "federated.flower.strategy"


def make(
    config: FlowerStrategy,
    quorum: int,
    *,
    clips: bool = False,
    sampling: Mapping[str, float] = EVERYBODY,
    where: str = _WHERE,
) -> Strategy:
    """A new strategy, for rounds of at least `quorum` updates.

    `clips`: devices run an app, which clips its updates where the strategy counts on that.

    Raises:
        JobError: there is none of that name, it is of no use here, or it does not take its options.
    """
    kind = _class(config.name, where)
    _check_use(kind, where, clips)
    takes = inspect.signature(kind).parameters
    options = dict(config.options)
    for name, value in sampling.items():
        if name in options:
            raise JobError(
                f"{where}.options.{name} is not used here: federated.cohort and federated.quorum "
                "say whom to ask; leave it out"
            )
        if name in takes:
            options[name] = value
    if RELEASES in takes:
        releases = options.setdefault(RELEASES, quorum)
        if isinstance(releases, int) and releases > quorum:
            raise JobError(
                f"{where}.options.{RELEASES}={releases} is above the quorum of {quorum}: "
                "a round of fewer updates would get too little noise; lower it, or leave it out"
            )
    if config.inner is not None:
        options["strategy"] = make(
            config.inner, quorum, clips=clips, sampling=sampling, where=f"{where}.inner"
        )
    elif "strategy" in takes and takes["strategy"].default is inspect.Parameter.empty:
        raise JobError(
            f"{where}.inner is missing: {config.name} wraps another strategy; "
            'name it, e.g. inner = { name = "FedAvg" }'
        )
    try:
        made: Strategy = kind(**options)
    except Exception as error:  # it may be anybody's code
        raise JobError(f"{where}.options: {config.name}: {' '.join(str(error).split())}") from error
    return made


def _class(name: str, where: str) -> type[Strategy]:
    module, separator, attribute = name.rpartition(":")
    if not separator:
        found = getattr(shipped, name, None) if name in shipped.__all__ else None
        if found is None:
            known = ", ".join(
                one for one in shipped.__all__ if one not in ("Result", "Strategy", *_TREES)
            )
            raise JobError(
                f"{where}.name={name!r} is not a strategy of Flower; there are {known}, or "
                "module:Name for one of your own"
            )
    else:
        try:
            found = getattr(importlib.import_module(module), attribute, None)
        except (Exception, SystemExit) as error:  # it may be anybody's code
            raise JobError(
                f"{where}.name={name!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
    if not (isinstance(found, type) and issubclass(found, Strategy)) or found is Strategy:
        raise JobError(f"{where}.name={name!r} is not a class made from flwr's Strategy")
    return found


def _check_use(kind: type[Strategy], where: str, clips: bool) -> None:
    names = {base.__name__ for base in kind.__mro__ if base.__module__.startswith("flwr.")}
    if names & set(_TREES):
        raise JobError(f"{where}.name={kind.__name__!r} merges trees, and this model has none")
    if names & set(_CLIPPED_BY_CLIENTS) and not clips:
        raise JobError(
            f"{where}.name={kind.__name__!r} counts on devices that clip their updates, which "
            "those of this job do not; use the one with ServerSide in its name"
        )


def innermost(strategy: Any) -> Any:
    """The strategy that merges: what all others wrap."""
    while isinstance(inner := getattr(strategy, "strategy", None), Strategy):
        strategy = inner
    return strategy


def check_losses(strategy: Any, replies: Iterable[Message]) -> None:
    """Refuse losses below 0 where they are raised to a power (q-FFL, Li et al. 2020).

    Raises:
        UpdateError: there is one, and the strategy would make no number of it.
    """
    merging = innermost(strategy)
    if not isinstance(merging, shipped.QFedAvg):
        return
    key = merging.train_loss_key
    records = [list(one.content.metric_records.values()) for one in replies if one.has_content()]
    losses = [some[0].get(key) for some in records if some]
    below = sum(isinstance(loss, int | float) and loss < 0 for loss in losses)
    if below:
        raise UpdateError(
            f"QFedAvg takes no loss below 0, and {below} of {len(losses)} devices have one; add a "
            "constant to the task's loss, or choose another strategy"
        )


def describe(strategy: Any) -> str:
    """Its name, and those it wraps."""
    inner = getattr(strategy, "strategy", None)
    name = type(strategy).__name__
    return f"{name} around {describe(inner)}" if isinstance(inner, Strategy) else name
