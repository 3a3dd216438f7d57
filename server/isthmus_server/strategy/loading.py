"""The policy that a job names: one of ours, one that a package provides, or any import path."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from isthmus.errors import JobError
from isthmus.job import StrategySection
from isthmus_server.strategy.policies import BUILT_IN
from isthmus_server.strategy.policy import Policy

ENTRY_POINTS = "isthmus.policies"
"""Packages provide policies by entry points of this group: a name, and a class."""


def load_policy(strategy: StrategySection) -> Policy:
    """The policy a job names.

    Raises:
        JobError: there is none of that name, it is none, or its constructor raised.
    """
    factory: Any = BUILT_IN.get(strategy.policy)
    try:
        if factory is None:
            factory = _found_elsewhere(strategy.policy, BUILT_IN)
        policy: Policy = factory(strategy)
    except JobError:
        raise
    except (Exception, SystemExit) as error:  # it may be anybody's code
        raise JobError(
            f"strategy.policy={strategy.policy!r} cannot be made: {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(policy, "plan", None)):
        raise JobError(f"strategy.policy={strategy.policy!r} is no policy: it has no plan()")
    return policy


def _found_elsewhere(name: str, built_in: Iterable[str]) -> Any:
    """A policy that a package provides by entry point, or `module:Name`."""
    provided = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in provided:
        return provided[name].load()
    module, separator, attribute = name.partition(":")
    if not separator:
        raise JobError(
            f"strategy.policy={name!r} is not known; there are "
            f"{', '.join(sorted({*built_in, *provided}))}, or module:Name for one of your own"
        )
    if module.endswith(".py"):
        raise JobError(
            f"strategy.policy={name!r} names a file, and a module is wanted: "
            f"{module.removesuffix('.py').replace('/', '.')}:{attribute}, installed or beside the "
            "task's file"
        )
    return getattr(importlib.import_module(module), attribute)
