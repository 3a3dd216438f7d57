"""A mutation check of the refusals: each is taken away in turn, and some attack must notice.

All refusals go through one function and each has one place, so making that function return for
one name is the same as deleting that check. An attack notices if it then does anything but end in
that refusal: it succeeds, or something else stops it.
"""

import contextlib
import dataclasses

from attacks import ATTACKS

from isthmus_privacy.crypto import refusal


@dataclasses.dataclass(frozen=True)
class Report:
    """What came of it."""

    refusals: int
    killed: int
    """Refusals whose removal an attack noticed."""
    survivors: tuple[str, ...]
    """Those whose removal nobody noticed."""
    open: tuple[str, ...]
    """Those with nothing behind them: without the check, an attack succeeds in silence."""

    def __str__(self):
        text = f"refusals: {self.refusals}\nrefusals_killed: {self.killed}"
        text += f"\n  of them {len(self.open)} are the only thing between an attack and success"
        if self.survivors:
            text += f"\n  removal not noticed: {', '.join(self.survivors)}"
        return text


@contextlib.contextmanager
def without(code):
    """No refusal of that name."""
    original = refusal.refuse

    def refuse(name, reason, *, peer=None):
        if name != code:
            original(name, reason, peer=peer)

    refusal.refuse = refuse
    try:
        yield
    finally:
        refusal.refuse = original


def outcome(attack):
    """How an attack ends: the code of a refusal, `succeeded`, or what else it ran into."""
    try:
        attack()
    except Exception as error:  # noqa: BLE001  whatever stops it is what it ends in
        return getattr(error, "code", "") or type(error).__name__
    return "succeeded"


def check():
    """Take every refusal away in turn."""
    survivors, unguarded = [], []
    for code in refusal.REFUSALS:
        with without(code):
            ends = {outcome(attack) for attack in ATTACKS.get(code, ())}
        if not ends - {code}:
            survivors.append(code)
        if "succeeded" in ends:
            unguarded.append(code)
    return Report(
        refusals=len(refusal.REFUSALS),
        killed=len(refusal.REFUSALS) - len(survivors),
        survivors=tuple(survivors),
        open=tuple(unguarded),
    )
