"""Load the policy that a job names: a built-in one, an entry point of a package, or module:Name.

A policy may have the attributes `regimes`, those that it needs, and `metric`, the held-out metric
that it uses: a job in which one of them cannot exist is then refused before it is trained.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from isthmus.errors import JobError, UserError
from isthmus.job import Job, StrategySection
from isthmus.provided import load_provided, provided
from isthmus_server.strategy.policies import BUILT_IN
from isthmus_server.strategy.policy import Kind, Policy

ENTRY_POINTS = "isthmus.policies"
"""Packages provide policies as entry points of this group: a name, and a class."""


def load_policy(strategy: StrategySection) -> Policy:
    """Construct the policy that a job names.

    Raises:
        UserError: there is no policy of that name or several, the object is not a policy, or its
            constructor raised.
    """
    # Built-in names first, so that no package that is installed can change what a job means.
    factory: Any = BUILT_IN.get(strategy.policy)
    try:
        if factory is None:
            factory = _load_external(strategy.policy, BUILT_IN)
        policy: Policy = factory(strategy)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        raise JobError(
            f"strategy.policy={strategy.policy!r} cannot be constructed: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(policy, "plan", None)):
        raise JobError(f"strategy.policy={strategy.policy!r} is not a policy: it has no plan()")
    return policy


def state_in_words(policy: str, state: Mapping[str, Any]) -> list[str]:
    """What a policy keeps in mind between rounds, in sentences.

    They are those of the policy's own static method `state_in_words`, if it is built in and has
    one. The code of other packages is not run only to read a log: their state is listed.

    Args:
        policy: its name in the job.
        state: of its last answer, as JSON data.
    """
    describe = getattr(BUILT_IN.get(policy), "state_in_words", None)
    if describe is not None:
        sentences: list[str] = describe(state)
        return sentences
    return [", ".join(f"{name}={value}" for name, value in sorted(state.items()))]


def check_names(names: Iterable[str], option: str) -> None:
    """Refuse names that no policy has, built in or of an installed package.

    Args:
        names: of policies; `module:Name` is one of the user's own.
        option: that has the names, for the sentence.

    Raises:
        UserError: with the first such name, and those that are the most like it.
    """
    known = sorted({*BUILT_IN, *provided(ENTRY_POINTS)})
    for name in names:
        if name in known or ":" in name:
            continue
        nearest = difflib.get_close_matches(name, known, cutoff=0.5)
        meant = (
            f"did you mean {' or '.join(nearest)}" if nearest else "there are " + ", ".join(known)
        )
        raise UserError(f"{option} names {name!r}, which is no policy; {meant}")


def check_participants(
    job: Job, policy: Policy, clients: int | None = None, ranks: int | None = None
) -> None:
    """Refuse a job whose policy needs participants that `isthmus run` does not start.

    A job that starts none is for a server, which participants join. `clients` is the number of
    devices, by default `federated.clients`; `ranks` those of the datacenter, by default
    `datacenter.ranks`.

    Raises:
        JobError: with what is missing.
    """
    clients = job.federated.clients if clients is None else clients
    if not clients and not job.datacenter.ranks:
        return
    ranks = job.datacenter.ranks if ranks is None else ranks
    regimes: Collection[Kind] = getattr(policy, "regimes", ())
    for regime in regimes:
        name = f"strategy.policy={job.strategy.policy!r} trains {regime} rounds"
        if regime != "federated" and not ranks:
            raise JobError(
                f"{name}, and datacenter.ranks=0 starts no datacenter; raise it, or choose another "
                "policy"
            )
        if regime != "datacenter" and clients < job.federated.needed:
            raise JobError(
                f"{name}, which need {job.federated.needed} devices (the quorum of "
                f"federated.cohort={job.federated.cohort}), and federated.clients={clients} starts "
                "fewer; raise clients, lower cohort or quorum, or choose another policy"
            )


def _load_external(name: str, built_in: Iterable[str]) -> Any:
    """Load a policy class from an entry point, or from `module:Name`."""
    outside = provided(ENTRY_POINTS)
    if name in outside:
        return load_provided(ENTRY_POINTS, name, f"strategy.policy={name!r}")
    module, separator, attribute = name.partition(":")
    if not separator:
        raise JobError(
            f"strategy.policy={name!r} is unknown; choose one of "
            f"{', '.join(sorted({*built_in, *outside}))}, or module:Name for your own"
        )
    if module.endswith(".py"):
        raise JobError(
            f"strategy.policy={name!r} names a file instead of a module; use "
            f"{module.removesuffix('.py').replace('/', '.')}:{attribute}, installed or in the "
            "folder of the task's file"
        )
    return getattr(importlib.import_module(module), attribute)
