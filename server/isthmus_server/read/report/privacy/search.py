"""The one value of a job that its privacy budget and a wanted noise leave open.

Found with the noise that the run would use (`NoisePlan`, `SampledNoisePlan`), so that planning a
job with the value that was found gives what was asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from isthmus.errors import JobError
from isthmus.job import Job, with_changes
from isthmus.job.federated import MAX_SECURE_COHORT
from isthmus_privacy.dp.calibration import NoisePlan, SampledNoisePlan
from isthmus_privacy.dp.searching import largest, least

Sought = Literal["rounds", "participations", "cohort", "epsilon"]

MOST_ROUNDS = 10**9
MOST_CORRELATED_ROUNDS = 4096
"""The noise of each number of them takes time in proportion to it."""
MOST_DEVICES = 10**6
"""Largest cohort without secure aggregation that is tried."""

_KEYS: Mapping[Sought, str] = {
    "rounds": "rounds",
    "participations": "privacy.participations",
    "cohort": "federated.cohort",
    "epsilon": "privacy.epsilon",
}
_PER_DECADE = 9000
"""Numbers of four significant digits, which an epsilon is looked for among."""
_EPSILONS = 6 * _PER_DECADE + 1
"""Up to 100: more is no protection."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A value that was found."""

    changes: Mapping[str, Any]
    """Keys of the job and their values, as for `isthmus.job.with_changes`."""
    sentence: str
    """What the value is."""

    def to_json(self) -> dict[str, Any]:
        """The changes and the sentence."""
        return {"changes": dict(self.changes), "sentence": self.sentence}

    def lines(self) -> list[tuple[str, str]]:
        """Names and sentences for a terminal."""
        overrides = " ".join(f"--set {key}={value!r}" for key, value in self.changes.items())
        return [("found", self.sentence), ("options", overrides)]


def found_in(
    job: Job,
    base: Path,
    sought: Sought | None,
    noise: float | None,
    signal_to_noise: float | None,
    unit: str | None,
) -> Found | None:
    """Find a value for the command line.

    Args:
        job: with a privacy budget, or without one: then nothing is found.
        base: directory of the job's relative paths.
        sought: None for nothing.
        noise: see `DevicesTarget`.
        signal_to_noise: see `DevicesTarget`.
        unit: `device` or `example`; None for that of the job.

    Raises:
        UserError: see `DevicesTarget.find`, or the task cannot be used, or the options do not go
            together.
    """
    if sought is None:
        if (noise, signal_to_noise, unit) == (None, None, None):
            return None
        raise JobError(
            "--noise, --signal-to-noise and --unit are for --find; to plan a job with a noise "
            "multiplier, use --set privacy.noise=Z"
        )
    if job.privacy is None and job.datacenter.privacy is None:
        if job.federated.privacy is None:
            return None
        raise JobError(
            "--find is about [privacy] and [datacenter.privacy]; for [federated.privacy], whose "
            "devices find their own noise, set epsilon, noise or participations"
        )
    if unit is None:
        if job.privacy is not None and job.datacenter.privacy is not None:
            raise JobError(
                "the job has [privacy] and [datacenter.privacy]; say with --unit device or --unit "
                "example which of them --find is about"
            )
        unit = "example" if job.privacy is None else "device"
    if (job.privacy if unit == "device" else job.datacenter.privacy) is None:
        table = "[privacy]" if unit == "device" else "[datacenter.privacy]"
        raise JobError(f"--unit {unit} is about a table {table}, which the job does not have")
    if unit == "example":
        if signal_to_noise is not None:
            raise JobError(
                "--signal-to-noise is about the updates of devices; [datacenter.privacy] needs "
                "--noise"
            )
        return find_for_examples(sought, job, noise)
    target = DevicesTarget(noise=noise, signal_to_noise=signal_to_noise)
    if signal_to_noise is None:
        return target.find(sought, job, 0)
    from isthmus_server.read.report.privacy.update_noise import update_size

    return target.find(sought, job, update_size(job, base))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicesTarget:
    """What is wanted of the noise of a job with `[privacy]`: one of both, or both for a cohort."""

    noise: float | None = None
    """Noise multiplier of `PrivacySection.noise`; None for that of the job, if it has one."""
    signal_to_noise: float | None = None
    """2-norm of the sum of equal, clipped updates over that of the noise of a round."""

    def find(self, sought: Sought, job: Job, size: int) -> Found:
        """Find a value: the most rounds, or the least cohort or epsilon, with which it is met.

        Args:
            sought: which.
            job: with `[privacy]`; its other values stay.
            size: N, elements of an update.

        Raises:
            JobError: no value meets it, or the value does not depend on it, with the reason.
        """
        assert job.privacy is not None
        given = {} if self.noise is None else {"privacy.noise": self.noise}
        job = with_changes(job, given)
        self._check(sought, job)
        value = _SEARCHES[sought](self, job, size)
        if value is None:
            raise JobError(self._impossible(sought, job))
        if sought == "cohort" and 0 < (clients := job.federated.clients) < value:
            raise JobError(
                f"{self._wanted(job)} needs a cohort of {value} devices, and federated.clients="
                f"{clients} starts fewer; raise it, or set it to 0 for devices that join a server"
            )
        changes = {_KEYS[sought]: value, **given}
        which = "the least"
        if sought in ("rounds", "participations"):
            which = "the most"
            if value in (MOST_ROUNDS, MOST_CORRELATED_ROUNDS):
                which = "the most that is looked for,"
        return Found(
            changes=changes,
            sentence=f"{_KEYS[sought]} = {value}, {which} with {self._wanted(job)}",
        )

    def _check(self, sought: Sought, job: Job) -> None:
        privacy = job.privacy
        assert privacy is not None
        correlated = privacy.mechanism == "correlated"
        if self.signal_to_noise is not None and not self.signal_to_noise > 0:
            raise JobError(f"--signal-to-noise {self.signal_to_noise:g} is not above 0")
        if sought == "cohort":
            if self.signal_to_noise is None:
                raise JobError(
                    "--find cohort needs --signal-to-noise: the noise that a budget asks for is "
                    "the same for any cohort"
                )
            return
        if self.signal_to_noise is None and privacy.noise is None:
            raise JobError(f"--find {sought} needs --noise or --signal-to-noise")
        if self.signal_to_noise is not None and privacy.noise is not None:
            raise JobError(
                "a noise multiplier (--noise or privacy.noise) and --signal-to-noise together "
                f"leave only the cohort to be found, not {sought}; remove one of them"
            )
        if correlated and privacy.noise is not None and sought != "epsilon":
            raise JobError(
                "the noise multiplier of mechanism='correlated' is about all rounds together and "
                f"does not depend on {sought}; give --signal-to-noise"
            )
        if sought == "rounds" and privacy.participations is not None and not correlated:
            raise JobError(
                f"privacy.participations={privacy.participations} decides the noise, and any "
                "number of rounds has the same; remove it, or use --find participations"
            )

    def meets(self, job: Job, size: int) -> bool:
        """Whether the noise that a job's budget asks for, or its own, is as wanted.

        See `find` for the arguments.
        """
        privacy = job.privacy
        assert privacy is not None
        try:
            if self.signal_to_noise is not None:
                from isthmus_server.read.report.privacy.update_noise import noise_to_signal

                plan = NoisePlan.of_job(job)
                ratio = noise_to_signal(job, plan, size, job.federated.cohort)
                return ratio * self.signal_to_noise <= 1
            assert privacy.noise is not None
            needed = NoisePlan.of_job(_with_privacy(job, noise=None))
        except JobError:
            return False
        return needed.multiplier <= privacy.noise

    def _rounds(self, job: Job, size: int) -> int | None:
        assert job.privacy is not None
        most = MOST_CORRELATED_ROUNDS if job.privacy.mechanism == "correlated" else MOST_ROUNDS

        def fits(rounds: int) -> bool:
            return self.meets(job.model_copy(update={"rounds": rounds}), size)

        return largest(fits, most=most, start=job.rounds) or None

    def _participations(self, job: Job, size: int) -> int | None:
        assert job.privacy is not None
        most = MOST_ROUNDS
        if job.privacy.mechanism == "correlated":
            most = -(-job.rounds // job.privacy.separation)

        def fits(participations: int) -> bool:
            return self.meets(_with_privacy(job, participations=participations), size)

        return largest(fits, most=most, start=job.rounds) or None

    def _cohort(self, job: Job, size: int) -> int | None:
        assert job.privacy is not None
        delta = job.privacy.delta
        most = MAX_SECURE_COHORT if job.federated.secure_aggregation else MOST_DEVICES

        def fits(cohort: int) -> bool:
            try:
                federated = job.federated.for_cohort(cohort)
            except JobError:  # smaller than any secure sum
                return False
            if federated.invited * delta >= 1:
                return False
            return self.meets(job.model_copy(update={"federated": federated}), size)

        return least(fits, most=most, start=job.federated.cohort)

    def _epsilon(self, job: Job, size: int) -> float | None:
        assert job.privacy is not None

        def fits(number: int) -> bool:
            return self.meets(_with_privacy(job, epsilon=_epsilon_at(number)), size)

        found = least(fits, most=_EPSILONS, start=_number_of(job.privacy.epsilon))
        return None if found is None else _epsilon_at(found)

    def _wanted(self, job: Job) -> str:
        assert job.privacy is not None
        if self.signal_to_noise is None:
            return f"noise of {job.privacy.noise:g} times the clipping bound"
        return f"a signal-to-noise ratio of {self.signal_to_noise:g}"

    def _impossible(self, sought: Sought, job: Job) -> str:
        privacy = job.privacy
        assert privacy is not None
        budget = f"within epsilon={privacy.epsilon:g} at delta={privacy.delta:g}"
        none = {
            "rounds": f"not even one round {budget} is possible",
            "participations": f"not even one round of a device {budget} is possible",
            "cohort": f"no cohort that a job may have is large enough {budget} "
            f"in {job.rounds} rounds",
            "epsilon": f"no epsilon up to {_epsilon_at(_EPSILONS):g} is enough for "
            f"{job.rounds} rounds",
        }[sought]
        change = "ask for more noise" if self.signal_to_noise is None else "ask for a lower ratio"
        more = "lower rounds" if sought == "epsilon" else "raise epsilon"
        return f"{none} with {self._wanted(job)}; {change}, or {more}"


_SEARCHES = {
    "rounds": DevicesTarget._rounds,
    "participations": DevicesTarget._participations,
    "cohort": DevicesTarget._cohort,
    "epsilon": DevicesTarget._epsilon,
}


def find_for_examples(sought: Sought, job: Job, noise: float | None) -> Found:
    """Find the most rounds, or the least epsilon, of a job with `[datacenter.privacy]`.

    All rounds are taken as rounds of one datacenter.

    Args:
        sought: `rounds` or `epsilon`; others are no values of a datacenter.
        job: its other values stay.
        noise: noise multiplier of `DatacenterPrivacy.noise`; None for that of the job.

    Raises:
        JobError: see `DevicesTarget.find`.
    """
    assert job.datacenter.privacy is not None
    if sought not in ("rounds", "epsilon"):
        raise JobError(
            f"--find {sought} is about devices; [datacenter.privacy] has --find rounds and epsilon"
        )
    if noise is None:
        noise = job.datacenter.privacy.noise
    if noise is None:
        raise JobError(f"--find {sought} needs --noise for [datacenter.privacy]")
    epsilon = job.datacenter.privacy.epsilon
    steps = job.datacenter.steps
    given = {"datacenter.privacy.noise": noise}
    if sought == "epsilon":
        largest_epsilon = _epsilon_at(_EPSILONS)
        given["datacenter.privacy.epsilon"] = largest_epsilon
    plan = SampledNoisePlan.of(with_changes(job, given))
    assert plan is not None
    value: float
    if sought == "epsilon":
        spent = plan.epsilon(job.rounds * steps)
        if spent > largest_epsilon:
            raise JobError(
                f"{job.rounds} rounds of {steps} steps with noise of {noise:g} times the clipping "
                f"bound have an epsilon of {spent:.3g}; ask for more noise, or lower rounds"
            )
        value = _epsilon_at(_number_of(spent))
    else:
        bounded = largest(lambda n: plan.epsilon_bound(n * steps) <= epsilon, most=MOST_ROUNDS)
        value = largest(
            lambda n: plan.epsilon(n * steps) <= epsilon, most=MOST_ROUNDS, start=bounded
        )
        if not value:
            raise JobError(
                f"not even one round of {steps} steps with noise of {noise:g} times the clipping "
                f"bound is within datacenter.privacy.epsilon={epsilon:g}; raise one of them, or "
                "lower datacenter.steps"
            )
    key = "rounds" if sought == "rounds" else "datacenter.privacy.epsilon"
    which = "the most" if sought == "rounds" else "the least"
    return Found(
        changes={key: value, "datacenter.privacy.noise": noise},
        sentence=f"{key} = {value}, {which} with noise of {noise:g} times the clipping bound",
    )


def _with_privacy(job: Job, **changes: Any) -> Job:
    assert job.privacy is not None
    return job.model_copy(update={"privacy": job.privacy.model_copy(update=changes)})


def _epsilon_at(number: int) -> float:
    """The numbers of four significant digits in their order: 1e-4, 1.001e-4, ..., 100; from 1.

    >>> _epsilon_at(1), _epsilon_at(2), _epsilon_at(9001)
    (0.0001, 0.0001001, 0.001)
    """
    decade, digits = divmod(number - 1, _PER_DECADE)
    return float(f"{1000 + digits}e{decade - 7}")


def _number_of(epsilon: float) -> int:
    """The first of these numbers that is no smaller.

    >>> _epsilon_at(_number_of(8.0)), _epsilon_at(_number_of(8.0001))
    (8.0, 8.001)
    """
    most = _EPSILONS
    return least(lambda number: _epsilon_at(number) >= epsilon, most=most) or most
