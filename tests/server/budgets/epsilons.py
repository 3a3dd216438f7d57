"""Where the epsilons of compositions are found."""

import functools
import threading

from isthmus_privacy.dp import accounting
from isthmus_privacy.dp.accounting import Composition


def found_on_the_loop(monkeypatch) -> list[Composition]:
    """The compositions whose epsilon is found on the event loop from now on; none is known yet."""
    on_the_loop = []
    epsilon = accounting._epsilon.__wrapped__

    @functools.cache
    def noted(composition, delta):
        if threading.current_thread() is threading.main_thread():
            on_the_loop.append(composition)
        return epsilon(composition, delta)

    monkeypatch.setattr(accounting, "_epsilon", noted)
    return on_the_loop
