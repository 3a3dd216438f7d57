"""What training has cost the examples of this device: charged before it trains, never taken back.

    {directory}/examples.ledger    see `isthmus_privacy.dp.ledger`
    {directory}/examples.head      its last line, so that a ledger that was cut is noticed

The account is the device's own: no server can lower it, and none reads it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import PeerMisbehaved, UpdateError, UserError
from isthmus.system.private_files import make_private_directory
from isthmus_privacy.crypto import refusal
from isthmus_privacy.dp.accounting import SampledGaussian
from isthmus_privacy.dp.ledger import Charge, Ledger, LedgerHead, kept_head
from isthmus_privacy.dp_sgd.device_examples import EXAMPLE, ZERO_OUT, DeviceExamplesPlan
from isthmus_privacy.dp_sgd.renyi import epsilon_of_steps

log = logging.getLogger(__name__)

LEDGER_NAME = "examples.ledger"
_HEAD_NAME = "examples.head"
_POPULATION = "this-device"
_WHAT = "training"
"""What charges are for, before a digest of the settings; alone in those of older versions."""


class ExamplesAccount:
    """The charges of one device, of all runs.

    Guarantees:
      * a charge is on disk before `charge` returns: a kill at any moment loses none;
      * no participation begins with which a job's budget, or the owner's, would be exceeded;
      * a ledger that was edited, cut or lost without its head is refused, and nothing is trained.
    """

    def __init__(
        self, directory: Path | None, epsilon: float | None = None, delta: float = 1e-6
    ) -> None:
        """Set up; the ledger is opened with the first charge.

        Args:
            directory: of the ledger; None keeps the charges as long as this process runs.
            epsilon: the owner's limit for all runs together; None for no limit.
            delta: of that limit.
        """
        self._directory = directory
        self._epsilon = epsilon
        self._delta = delta
        self._ledger: Ledger | None = None
        self._in_memory: list[Charge] = []

    def charge(self, plan: DeviceExamplesPlan, run: str, round_: int, attempt: int) -> None:
        """Charge one participation, before it is trained.

        Args:
            plan: the noise of the participation, from the job and the examples of this device.
            run: id of the run.
            round_: of the run.
            attempt: of the round; one that is trained again is charged again.

        Raises:
            PeerMisbehaved: the job's budget or the owner's would be exceeded.
            UpdateError: the charge cannot be recorded, or earlier ones cannot be read.
        """
        charge = Charge(
            population=_POPULATION,
            unit=EXAMPLE,
            adjacency=ZERO_OUT,
            mechanism="dp-sgd",
            event=plan.event,
            run=run,
            round=round_,
            attempt=attempt,
            what=_what(plan),
        )
        try:
            charges = list(self._charges())
            # Under the ledger that is open and locked: another process cannot charge in between.
            self._check(plan, run, charges)
            if self._ledger is None:
                self._in_memory.append(charge)
            else:
                self._ledger.reserve(charge)
        except (OSError, UserError) as error:
            log.error("%s", error)  # its paths are not the server's business
            raise UpdateError(
                "this device cannot record what training costs its examples, and does not train "
                "without that record; its own log says why"
            ) from None
        of_run = [each for each in charges if each.run == run]
        log.log(
            logging.DEBUG if self._directory is None else logging.INFO,
            "participation %d in %s: one example has an epsilon of %.4g of %g at delta %g",
            len(of_run) + 1,
            run,
            _epsilon([*of_run, charge], plan.privacy.delta),
            plan.privacy.epsilon,
            plan.privacy.delta,
        )

    def spent(self, delta: float) -> float:
        """The epsilon of all charges so far, of all runs together."""
        return _epsilon(list(self._charges()), delta)

    def _check(self, plan: DeviceExamplesPlan, run: str, charges: list[Charge]) -> None:
        """Refuse a participation that would exceed a budget, in sentences without its numbers.

        What follows from the job and from how often the server has asked is refused first: of the
        rest it may not know.
        """
        privacy = plan.privacy
        after = [plan.event]
        if any(each.run == run and each.what not in (_WHAT, _what(plan)) for each in charges):
            refusal.refuse(
                "examples-of-another-job",
                "this device has trained in this run for a job with another budget or other steps "
                "(federated.privacy), and a run has one; go on with that job, or start a new run",
            )
        of_run = [_event(each) for each in charges if each.run == run]
        if len(of_run) >= plan.participations:
            refusal.refuse(
                "examples-asked-too-often",
                f"this device has trained {len(of_run)} times in this run, and once more would "
                f"exceed the {plan.participations} participations for which the budget of its "
                "examples is made (federated.privacy)",
            )
        if epsilon_of_steps(of_run + after, privacy.delta) > privacy.epsilon:
            refusal.refuse(
                "examples-beyond-the-jobs-budget",
                f"this device has trained {len(of_run)} times in this run, and once more would "
                f"exceed an epsilon of {privacy.epsilon:g} at delta {privacy.delta:g} for one of "
                "its examples (federated.privacy)",
            )
        if self._epsilon is None:
            return
        if epsilon_of_steps([*map(_event, charges), *after], self._delta) > self._epsilon:
            refusal.refuse(
                "examples-beyond-the-owners-limit",
                "with this round the training of all runs would exceed an epsilon of "
                f"{self._epsilon:g} at delta {self._delta:g} for one example of this device, its "
                "owner's limit ([privacy] examples_epsilon in policy.toml)",
            )

    def _charges(self) -> Iterator[Charge]:
        if self._directory is None:
            return iter(self._in_memory)
        if self._ledger is None:
            self._ledger = _open(self._directory)
        return (entry.charge for entry in self._ledger.entries.values())


@dataclasses.dataclass(frozen=True)
class RunAccount:
    """The account of a device, for one run."""

    account: ExamplesAccount
    plan: DeviceExamplesPlan
    run: str
    withheld: bool = False
    """Whether the server is not to know what follows from the number of examples."""

    def charge(self, round_: int, attempt: int) -> bool:
        """Charge one participation; False if it may not be trained, and the server is not to know.

        A device whose number of examples has changed during a run had other noise before, and its
        budget may be spent before all its participations: when that is, tells of the number.

        Raises:
            PeerMisbehaved: see `ExamplesAccount.charge`.
            UpdateError: likewise.
        """
        try:
            self.account.charge(self.plan, self.run, round_, attempt)
        except PeerMisbehaved as refused:
            if not self.withheld or refused.code != "examples-beyond-the-jobs-budget":
                raise
            log.error("this device takes part in %s without effect: %s", self.run, refused)
            return False
        return True


def spent_of(directory: Path, delta: float) -> tuple[float, dict[str, tuple[int, float]]]:
    """What is in the ledger of a device: epsilon of all runs together, and of each one.

    Returns:
        Epsilon at `delta` together, and the participations and epsilon by the id of a run.

    Raises:
        LedgerDamaged: there is no ledger, or it is not the one that was written.
    """
    ledger = Ledger.read(directory / LEDGER_NAME, _head(directory))
    charges: dict[str, list[Charge]] = {}
    for entry in ledger.entries.values():
        charges.setdefault(entry.charge.run, []).append(entry.charge)
    runs = {run: (len(each), _epsilon(each, delta)) for run, each in charges.items()}
    return _epsilon([charge for each in charges.values() for charge in each], delta), runs


def _what(plan: DeviceExamplesPlan) -> str:
    return f"{_WHAT} {plan.settings_digest}"


def _event(charge: Charge) -> SampledGaussian:
    assert isinstance(charge.event, SampledGaussian)
    return charge.event


def _epsilon(charges: list[Charge], delta: float) -> float:
    return epsilon_of_steps(map(_event, charges), delta)


def _head(directory: Path) -> LedgerHead | None:
    lost = "what training has cost the examples of this device is not known"
    return kept_head(directory / LEDGER_NAME, directory / _HEAD_NAME, lost)


def _open(directory: Path) -> Ledger:
    make_private_directory(directory)
    ledger = Ledger.open(directory / LEDGER_NAME, _head(directory))
    try:
        ledger.keep_head_in(directory / _HEAD_NAME)
    except BaseException:
        ledger.close()
        raise
    return ledger
