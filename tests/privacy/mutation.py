"""Mutation test of the refusals: each is disabled in turn, and an attack must detect it.

All refusals go through one function and each has one place, so letting that function return for
one code is the same as deleting that check. An attack detects it if it then does not end in that
refusal: it succeeds, or something else stops it.
"""

import contextlib
import dataclasses

from tests.privacy.attacks import ATTACKS

from isthmus_privacy.crypto import refusal


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of the mutation test."""

    refusals: int
    killed: int
    """Refusals whose removal an attack detected."""
    survivors: tuple[str, ...]
    """Refusals whose removal no attack detected."""
    sole_defences: tuple[str, ...]
    """Refusals without which an attack succeeds silently."""

    def __str__(self):
        text = f"refusals: {self.refusals}\nrefusals_killed: {self.killed}"
        text += f"\n  sole defence against an attack: {len(self.sole_defences)}"
        if self.survivors:
            text += f"\n  removal not detected: {', '.join(self.survivors)}"
        return text


@contextlib.contextmanager
def disabled(code):
    """Disable the refusal of a code."""
    original = refusal.refuse

    def refuse(refused_code, reason, *, peer=None):
        if refused_code != code:
            original(refused_code, reason, peer=peer)

    refusal.refuse = refuse
    try:
        yield
    finally:
        refusal.refuse = original


def outcome(attack):
    """How an attack ends: the code of a refusal, `succeeded`, or the class of another error."""
    try:
        attack()
    except Exception as error:  # noqa: BLE001  any error is an outcome
        return getattr(error, "code", "") or type(error).__name__
    return "succeeded"


def check():
    """Disable each refusal in turn and run its attacks."""
    survivors, sole_defences = [], []
    for code in refusal.REFUSALS:
        with disabled(code):
            outcomes = {outcome(attack) for attack in ATTACKS.get(code, ())}
        if not outcomes - {code}:
            survivors.append(code)
        if "succeeded" in outcomes:
            sole_defences.append(code)
    return Report(
        refusals=len(refusal.REFUSALS),
        killed=len(refusal.REFUSALS) - len(survivors),
        survivors=tuple(survivors),
        sole_defences=tuple(sole_defences),
    )
