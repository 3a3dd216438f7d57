"""Length of the server's steps, for the adaptive policy: half for devices that forget.

Devices that come in turns undo each other's work, the more the longer one group trains alone, and
momentum carries its effect far into the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import get_args

from isthmus.job import StrategySection
from isthmus.job.section import Day
from isthmus.job.strategy import Window
from isthmus_server.strategy.policies.adaptive import evidence
from isthmus_server.strategy.policies.adaptive.state import AdaptiveSettings, AdaptiveState
from isthmus_server.strategy.policy import Observation
from isthmus_server.strategy.windows import forecast


class StepSize:
    """Chooses the factor on the server's steps.

    It is 1/2 for devices whose loss shows that they forgot what others taught. Devices that have
    several windows a day may be others in each: their steps are short from the start, because after
    whole ones in the first window short ones later do not make up for it. They are whole once
    devices of another window have trained whose loss shows that they forgot little.
    """

    def __init__(self, settings: AdaptiveSettings, strategy: StrategySection) -> None:
        self._settings = settings
        self._windows = [each for each in strategy.windows if each.side == "federated"]
        self._a_day = _most_windows(self._windows)
        self._all_theirs = strategy.target_edge_share == 1

    @property
    def in_turns(self) -> bool:
        """Whether other devices may come at other hours of a day."""
        return self._a_day > 1 and self._settings.damped < 1

    def choose(self, observation: Observation, state: AdaptiveState) -> tuple[float, str]:
        """Return the factor on the server's steps, and the reason for it or ""."""
        scale = state.step_scale
        loss_ratio = evidence.peak_device_loss_ratio(observation)
        short = scale * self._settings.damped
        if loss_ratio > self._settings.forgotten:
            why = f"; their loss rose to {loss_ratio:.2g} times the first"
            return short, f"{why}: steps x {short:g}"
        if not self.in_turns:
            return scale, ""
        # Public data that hold a part of the target are taught in every window.
        forgot_little = 0 < loss_ratio <= self._settings.undone  # 0: not known
        if len(state.windows) > 1 and forgot_little and self._all_theirs:
            why = f"; in another window their loss was only {loss_ratio:.2g} times the first"
            return scale, f"{why}: steps x {scale:g}"
        return short, f"; they have {self._a_day} windows a day: steps x {short:g}"

    def is_short(self, observation: Observation, state: AdaptiveState) -> bool:
        """Whether the steps are shorter than what was accepted before."""
        return self.choose(observation, state)[0] < state.step_scale

    def only_window(self, observation: Observation) -> set[str]:
        """The window of devices that is open now; none if there are several, or no turns."""
        if not self.in_turns:
            return set()
        windows = {
            f"{window.opens}-{window.closes}"
            for window in self._windows
            if forecast([window], "federated", observation.now).ready
        }
        return windows if len(windows) == 1 else set()


def _most_windows(windows: Sequence[Window]) -> int:
    """The most windows that open on one day of the week.

    Without those within another one of the day, in which no other devices come.
    """
    opened: dict[str, set[_Times]] = {}
    for window in windows:
        for day in window.days or get_args(Day):
            opened.setdefault(day, set()).add((window.opens, window.closes))
    return max((_outermost(times) for times in opened.values()), default=0)


_Times = tuple[str, str]
"""When a window opens and closes."""


def _outermost(times: Collection[_Times]) -> int:
    """How many windows of a day are not within another one.

    >>> _outermost([("06:00", "12:00"), ("08:00", "09:00"), ("22:00", "06:00"), ("23:00", "02:00")])
    2
    """
    return sum(not any(_is_within(one, other) for other in times) for one in times)


def _is_within(one: _Times, other: _Times) -> bool:
    """Whether a window is within another one that opens on the same day."""
    (opens, closes), (first, last) = one, other
    if first == last:  # all day
        return opens != closes or opens > first
    return one != other and first <= opens and (closes <= opens, closes) <= (last <= first, last)
