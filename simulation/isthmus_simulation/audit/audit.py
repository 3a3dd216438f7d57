"""An audit of a job: which canaries, how many runs, and what follows from the guesses."""

from __future__ import annotations

import dataclasses
import math
import secrets
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from isthmus.errors import JobError, UserError
from isthmus.job import Job
from isthmus.job.federated import MAX_SECURE_COHORT
from isthmus.printable import counted
from isthmus.task import Task, load_task
from isthmus_privacy.dp.accounting import Composition
from isthmus_privacy.dp.auditing import CANARIES, Claim, Measurement
from isthmus_privacy.dp.calibration import NoisePlan
from isthmus_privacy.dp_sgd.device_examples import DeviceExamplesPlan
from isthmus_server.model.global_model import GlobalModel
from isthmus_simulation.audit.device_canaries import (
    Guesses,
    Undercharge,
    audit_devices,
    exceeds,
    most_in_a_run,
)
from isthmus_simulation.audit.example_canaries import (
    audit_examples,
    largest_device,
    most_of_devices,
)
from isthmus_simulation.audit.membership import MembershipReport, membership_run, report_of
from isthmus_simulation.run import Simulation

Unit = Literal["device", "example"]
RunAudited = Callable[[int, int, Path], "AuditedRun"]
"""Runs a simulation; it gets the canaries that are wanted, a seed, and a folder."""

MOST_CANARIES = 1_000_000
"""Most canaries of an audit."""
_AT_ONCE = 1000
"""Canary devices of a run."""
_MOST_RUNS = 200


@dataclasses.dataclass(frozen=True)
class AuditedRun:
    """What was found in simulated runs."""

    guesses: Guesses
    undercharged: Undercharge | None
    """What a ledger or an account had of somebody at the end, if that is less than it cost."""
    most_times: int
    """How often the device took part in one run that did so most often."""


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """What an audit of a job with noise has found."""

    job: str
    unit: Unit
    mechanism: str
    """In words."""
    budget: float
    """Epsilon of the job's table."""
    delta: float
    measurement: Measurement
    asked: int
    """Guesses that were asked for: as runs count as a whole, more may have been made."""
    usual: float | None
    """What an audit of the usual size finds, as `Measurement.finds`; None if this one has it."""
    runs: int
    """Simulated ones."""
    undercharged: Undercharge | None
    """What a ledger or an account had of somebody at the end, if that is less than it cost."""
    repeated: tuple[int, int] | None
    """How often somebody took part in a run, and how often at most by what is claimed, if that is
    less."""

    @property
    def is_over_budget(self) -> bool:
        """Whether what is claimed is more than the job's table allows."""
        return exceeds(self.measurement.claimed, self.budget)

    @property
    def is_alarm(self) -> bool:
        """Whether the job reveals more than it claims, or claims more than it may."""
        beyond = self.is_over_budget or self.repeated is not None or self.undercharged is not None
        return self.measurement.is_alarm or beyond

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        found = self.measurement
        return {
            "job": self.job,
            "noise": True,
            "unit": self.unit,
            "mechanism": self.mechanism,
            "budget": self.budget,
            "delta": self.delta,
            "claimed_epsilon": finite(found.claimed),
            "measured_epsilon_at_least": finite(found.epsilon),
            "whatever_the_fault_at_least": finite(found.least),
            "confidence": found.confidence,
            "guesses": found.guesses,
            "right": found.right,
            "right_at_least": found.probability,
            "right_allowed": found.allowed,
            "most_measurable_epsilon": finite(found.most),
            "finds_noise_below": found.finds,
            "runs": self.runs,
            "over_budget": self.is_over_budget,
            "undercharged": self.undercharged is not None,
            "repeated": self.repeated is not None,
            "alarm": self.is_alarm,
        }

    def lines(self) -> list[tuple[str, str]]:
        """The report as lines: names and texts."""
        found = self.measurement
        confidence = in_percent(found.confidence)
        neighbour = "update is" if self.unit == "device" else "gradients are"
        most = f"an epsilon of {found.most:.3g}" if math.isfinite(found.most) else "no noise at all"
        whole = ""
        if found.guesses > self.asked:
            whole = f" ({self.asked} were asked for, and a run counts as a whole)"
        finds = "no missing noise"
        if found.finds is not None:
            finds = f"noise below {found.finds:.0%} of what is promised, in 99 of 100 audits"
        return [
            ("unit", f"one {self.unit}, whose {neighbour} zeros in the neighbouring data"),
            ("noise", self.mechanism),
            (
                "claimed",
                f"epsilon {found.claimed:.3f} at delta {self.delta:g} (the budget is "
                f"{self.budget:g})",
            ),
            (
                "measured",
                f"epsilon at least {found.epsilon:.3f} if nothing but noise is missing, with "
                f"confidence {confidence}; at least {found.least:.3f} whatever is wrong",
            ),
            (
                "guesses",
                f"{found.right} of {found.guesses} right, in "
                f"{counted(self.runs, 'simulated run')}{whole}; so at least "
                f"{found.probability:.1%} are, and the claim allows {found.allowed:.1%}",
            ),
            (
                "reach",
                f"so many guesses can show at most {most}, which is a limit of the method and not "
                f"what the job reveals, and find {finds}",
            ),
            ("verdict", self._verdict()),
        ]

    def _verdict(self) -> str:
        found = self.measurement
        if found.is_alarm:
            return (
                f"ALARM: it is as if the noise was {1 / found.factor:.0%} of what is promised, or "
                "each canary contributed more than it may; an honest job gives an alarm in at most "
                f"{in_percent(1 - found.confidence)} of audits"
            )
        if self.is_over_budget:
            return f"ALARM: what is claimed is more than the budget of {self.budget:g}"
        if self.repeated is not None:
            times, claimed = self.repeated
            return (
                f"ALARM: one {self.unit} took part {times} times, and what is claimed is about "
                f"{claimed}"
            )
        if self.undercharged is not None:
            charged = self.undercharged.charged
            due = self.undercharged.due
            return f"ALARM: a ledger has an epsilon of {charged:.3f} for rounds that cost {due:.3f}"
        missed = "missing noise"
        if found.finds is not None:
            missed = f"noise between {found.finds:.0%} and 100% of what is promised"
        more = ""
        if self.usual is not None:
            more = f"; --canaries {CANARIES} would find noise below {self.usual:.0%}"
        return (
            f"no alarm: nothing was measured that the claim excludes; {missed} may not have been "
            f"found{more}"
        )


def finite(number: float) -> float | None:
    """The number, or None for infinity, which JSON does not have."""
    return number if math.isfinite(number) else None


def in_percent(share: float) -> str:
    """A share with all digits that it has."""
    return f"{100 * share:.9g} %"


class Audit:
    """An audit of one job."""

    def __init__(
        self,
        job: Job,
        base: Path,
        *,
        unit: Unit | None,
        canaries: int,
        confidence: float,
        run: Callable[[Simulation], None],
    ) -> None:
        """Set up.

        Args:
            job: to be audited.
            base: where its relative paths start.
            unit: whose promise; None for the one that the job has.
            canaries: guesses that are wanted.
            confidence: of the bounds.
            run: runs a simulation to its end.

        Raises:
            JobError: the job cannot be audited.
        """
        self.job = job
        self.base = base
        self.unit = unit_of(job, unit)
        self.canaries = canaries
        self.confidence = confidence
        self._run = run

    def report(self) -> AuditReport | MembershipReport:
        """Run the audit.

        Raises:
            UserError: the job cannot be audited or simulated, or the canaries are too few.
        """
        data = self.job.task.data_in(self.base)
        source = self.job.task.source
        task = load_task(source, self.job.task.settings, base=self.base, data=data)
        if self.unit is None:
            return self._membership(task)
        model = GlobalModel.of(self.job, task, self.base)
        if self.unit == "device":
            return self._devices(model.layout.size)
        parameters = model.module.named_parameters()
        trained = {name: each.numel() for name, each in parameters if each.requires_grad}
        return self._examples(task, trained)

    def _membership(self, task: Task) -> MembershipReport:
        devices = self.job.simulation.population(self.job.federated)
        with tempfile.TemporaryDirectory(prefix="isthmus-audit-") as folder:
            run = membership_run(self.job, self.base, Path(folder) / "run")
            self._run(run)
            return report_of(run, task, devices, self.confidence)

    def _devices(self, elements: int) -> AuditReport:
        job = self.job
        privacy = job.privacy
        assert privacy is not None
        plan = NoisePlan.of_job(job)
        times = _rounds_of_a_device(plan, job.rounds)
        claim = Claim(plan.event("audit"), 1 if plan.correlated else times, privacy.delta)
        own = job.simulation.population(job.federated)
        most = min(most_in_a_run(job, elements, own), _AT_ONCE)
        if not elements:
            raise JobError("no parameter of the model is trained, so devices send nothing")
        if most < 1:
            raise JobError(
                f"a round with {job.federated.cohort} of {own} devices has no room for a canary "
                f"device, with delta={privacy.delta:g} and secure sums of at most "
                f"{MAX_SECURE_COHORT:,} devices; lower delta or federated.cohort"
            )
        self._check_enough(claim, most)

        def one(wanted: int, seed: int, folder: Path) -> AuditedRun:
            count = min(wanted, most)
            audited = audit_devices(job, self.base, folder, elements, count, seed)
            self._run(audited)
            canaries = audited.canaries
            return AuditedRun(
                guesses=canaries.guesses(plan, times),
                undercharged=audited.undercharged(plan),
                most_times=max(canaries.rounds_of_each.values(), default=0),
            )

        mechanism = (
            f"{privacy.mechanism}, multiplier {plan.multiplier:.4g}, for "
            f"{counted(times, 'round')} of a device"
        )
        return self._report_of(claim, times, privacy.epsilon, mechanism, one)

    def _examples(self, task: Task, trained: Mapping[str, int]) -> AuditReport:
        job = self.job
        privacy = job.federated.privacy
        assert privacy is not None
        devices = job.simulation.population(job.federated)
        index, examples = largest_device(task, devices)
        plan = DeviceExamplesPlan.of(job.federated, job.rounds, examples)
        times = _participations_of_a_device(plan)
        claim = Claim(plan.event, times, privacy.delta)
        most = most_of_devices(job, examples, sum(trained.values()))
        self._check_enough(claim, most)

        def one(_wanted: int, seed: int, folder: Path) -> AuditedRun:
            shard = index, devices
            audited = audit_examples(job, self.base, folder, shard, examples, trained, seed)
            self._run(audited)
            return AuditedRun(
                guesses=audited.canaries.guesses(times),
                undercharged=audited.undercharged(times, privacy.delta),
                most_times=audited.canaries.most_times,
            )

        mechanism = (
            f"DP-SGD on devices with {examples} examples, multiplier {plan.multiplier:.4g}, for "
            f"{times} x {plan.steps} steps that have an example with a probability of "
            f"{plan.probability:.4g}"
        )
        return self._report_of(claim, times, privacy.epsilon, mechanism, one)

    def _report_of(
        self, claim: Claim, times: int, budget: float, mechanism: str, one: RunAudited
    ) -> AuditReport:
        """Run until enough guesses were made, and report what they show.

        Args:
            claim: that is audited.
            times: participations of which it is.
            budget: epsilon of the job's table.
            mechanism: in words.
            one: a run.

        Raises:
            UserError: too many runs would be needed.
        """
        assert self.unit is not None
        found, runs = self._until_enough(one)
        guesses = found.guesses
        usual = None
        if guesses.made < CANARIES:
            usual = claim.finds(CANARIES, self.confidence, guesses.shares)
        return AuditReport(
            job=self.job.name,
            unit=self.unit,
            mechanism=mechanism,
            budget=budget,
            delta=claim.delta,
            measurement=claim.measured(
                guesses.right, guesses.made, self.confidence, guesses.shares
            ),
            asked=self.canaries,
            usual=usual,
            runs=runs,
            undercharged=found.undercharged,
            repeated=(found.most_times, times) if found.most_times > times else None,
        )

    def _until_enough(self, one: RunAudited) -> tuple[AuditedRun, int]:
        """All guesses and the worst of the rest, and the number of runs they are of."""
        total = Guesses(0, 0, {})
        undercharged: list[Undercharge | None] = []
        most_times = 0
        runs = 0
        share = 1.0  # of the canaries that a run asks
        while total.made < self.canaries:
            if runs == _MOST_RUNS:
                raise UserError(
                    f"{runs} simulated runs gave {total.made} of the {self.canaries} guesses that "
                    "were asked for; lower --canaries"
                )
            with tempfile.TemporaryDirectory(prefix="isthmus-audit-") as folder:
                # Nobody who writes a task or a job can know the coins.
                seed = secrets.randbits(48)
                wanted = math.ceil((self.canaries - total.made) / share)
                found = one(wanted, seed, Path(folder) / "run")
            undercharged.append(found.undercharged)
            most_times = max(most_times, found.most_times)
            runs += 1
            guesses = found.guesses
            if not guesses.made:
                raise UserError(
                    "no canary was asked in a simulated run, so nothing can be guessed; see what "
                    "`isthmus simulate` says of the job"
                )
            share = min(1.0, guesses.made / wanted)
            total = total.plus(guesses)
        return AuditedRun(total, Undercharge.worst(undercharged), most_times), runs

    def _check_enough(self, claim: Claim, most: int) -> None:
        """Refuse an audit that could not find anything, or not make its guesses.

        Args:
            claim: that is audited.
            most: canaries of a run.

        Raises:
            UserError: with the number of canaries that could.
        """
        needed = claim.needed(self.confidence)
        if needed is None or needed > MOST_CANARIES:
            raise UserError(
                f"{self.job.name!r} claims an epsilon of {claim.epsilon():.3g}, which allows all "
                f"guesses to be right: not even {MOST_CANARIES:,} canaries could find anything; "
                "lower epsilon"
            )
        if self.canaries > most * _MOST_RUNS:
            raise UserError(
                f"a run of {self.job.name!r} has room for {most} canaries, and {_MOST_RUNS} runs "
                f"for {most * _MOST_RUNS:,}; lower --canaries, for which at least {needed} are "
                "needed"
            )
        if self.canaries < needed:
            many = "1 canary" if self.canaries == 1 else f"{self.canaries} canaries"
            raise UserError(
                f"{many} can show an epsilon of at most "
                f"{claim.most(self.canaries, self.confidence):.3g} with confidence "
                f"{in_percent(self.confidence)}, and {self.job.name!r} claims "
                f"{claim.epsilon():.3g}: nothing could be found; at least {needed} are needed "
                "(--canaries)"
            )


def _rounds_of_a_device(plan: NoisePlan, rounds: int) -> int:
    """The most rounds of one device that its budget allows."""
    privacy = plan.privacy

    def fits(times: int) -> bool:
        spent = Composition().plus(plan.event(""), times)
        if plan.measurements:
            spent = spent.plus(plan.measuring_event, plan.measurements)
        return spent.epsilon(privacy.delta) <= privacy.epsilon

    most = rounds
    if privacy.noise is None or privacy.participations is not None:
        most = min(rounds, plan.participations)
    if plan.correlated is not None or privacy.noise is None:
        return most
    return _most(most, fits)


def _participations_of_a_device(plan: DeviceExamplesPlan) -> int:
    """The most participations of one device that its budget allows.

    More than rounds, if the job leaves room for attempts that fail: a device has trained in those,
    too, and has charged it.
    """
    if plan.privacy.noise is None:
        return plan.participations
    return _most(plan.participations, lambda times: plan.epsilon(times) <= plan.privacy.epsilon)


def _most(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most`, at least 1, that fits, as all smaller ones do."""
    low = 1
    high = most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def unit_of(job: Job, wanted: Unit | None) -> Unit | None:
    """The unit whose promise is audited; None for a job without noise.

    Raises:
        JobError: the job does not promise that, or it cannot be audited.
    """
    has = {"device": job.privacy is not None, "example": job.federated.privacy is not None}
    tables = {"device": "[privacy]", "example": "[federated.privacy]"}
    if wanted is not None:
        if not has[wanted]:
            promised = [f"a table {tables[unit]}" for unit, is_there in has.items() if is_there]
            raise JobError(
                f"{job.name!r} has no table {tables[wanted]}, and it "
                f"has {' and '.join(promised) or 'no noise for what devices send'}: remove --unit"
            )
        return wanted
    if all(has.values()):
        raise JobError(
            f"{job.name!r} promises something to devices and to their examples; say which to audit "
            "by --unit device or --unit example"
        )
    for unit in ("device", "example"):
        if has[unit]:
            return unit
    if job.datacenter.privacy is not None:
        raise JobError(
            f"{job.name!r} protects the examples of a datacenter (datacenter.privacy), and a "
            "simulated datacenter adds no noise, so an audit could not see any; what its ledger "
            "charges holds without one (`isthmus privacy plan`), and tables [privacy] and "
            "[federated.privacy] can be audited"
        )
    if job.strategy.policy == "datacenter":
        raise JobError(
            f"{job.name!r} trains on no devices (strategy.policy = 'datacenter'), and an audit is "
            "of what devices send; choose another policy"
        )
    return None
