"""Know which modules of a model are being called: what they compute has no name of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn


@contextlib.contextmanager
def called_modules(model: nn.Module) -> Iterator[Sequence[nn.Module]]:
    """The modules whose `forward()` runs, the innermost last; empty between calls of the model.

    The sequence changes while the block runs.
    """
    called: list[nn.Module] = []

    def enter(module: nn.Module, args: Any) -> None:
        called.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        # Not the last one where another hook has failed before `enter`: this one is called still.
        if called and called[-1] is module:
            called.pop()

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            # Next to `forward()`: what other hooks of a module compute belongs to its caller.
            entered = module.register_forward_pre_hook(enter)
            hooks.callback(entered.remove)
            left = module.register_forward_hook(leave, prepend=True, always_call=True)
            hooks.callback(left.remove)
        yield called
