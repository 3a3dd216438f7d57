"""The device owner's limits: `policy.toml` in the state directory, enforced for every request.

>>> limits = parse('jobs = ["keyboard-*"]', "policy.toml")
>>> limits.jobs
('keyboard-*',)

A refusal is one sentence, which is sent to the server. Usage is persisted before the work begins,
so that a crash never refunds it.
"""

from __future__ import annotations

import fnmatch
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator

from isthmus.errors import AdmissionRefused, DamagedError, JobError, UserError, cause_of
from isthmus.job import Job
from isthmus.job.section import DAYS, GroupName, Hours, Section, sentences
from isthmus.job.weights import Weights, agreed
from isthmus.system.sealed_files import read_sealed, write_sealed
from isthmus.wire import link_pb2
from isthmus_clients.device.package_versions import PackageVersions

_BUSCTL_SECONDS = 2.0
_NOT_METERED = (2, 4)
"""NetworkManager's NM_METERED_NO and NM_METERED_GUESS_NO."""


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""32 bytes in hexadecimal."""


class PrivacyLimits(Section):
    """Minimum privacy that this device requires."""

    secure_aggregation: bool = True
    """Never send an update or scores that are not masked."""
    clients_min: Annotated[int, Field(ge=2)] = 10
    """Never take part in a sum over fewer honest devices: the fewest that a round is committed
    with, less a tenth of its devices (rounded up), which may collude with the server."""
    buffered: bool = False
    """Take part in mode = "buffered", whose devices start from different models: those with the
    same start can be told apart from the others."""
    selection_slack: Annotated[int, Field(ge=1)] = 10
    """Let the server select from at most this many times as many of the enrolled devices as the sum
    needs. Fewer protect better against a server that selects colluding devices, and require more
    of the enrolled devices to be available at a time."""
    group: GroupName | None = None
    """The group that this device is in: it may take part in secure sums of this group only, over at
    least `clients_min` honest devices. Default: none, and only in sums of any devices."""
    participations_per_run: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of secure sums of one run that this device begins to take part in. A run's
    comparisons of models are counted apart from its updates."""
    participations: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of secure sums, of all runs since this device joined."""
    weights: Weights = "exact"
    """The most that the weights of this device's updates may say of its number of examples: the
    number itself, a power of two next to it, or nothing; see `isthmus.job.weights`."""
    counts: Literal["exact", "same-devices", "none"] = "exact"
    """In which sums this device may be with counts of its data: any; those of evaluations only with
    the same devices each time, in all runs of one version of a task; or none."""
    noise: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Never take part in a secure sum whose noise is less than this many times what one device
    changes (the noise multiplier), or that has none; `true` is 1."""
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Most epsilon that the secure sums of all runs since this device joined may imply together;
    those without noise are refused then. This device counts by itself, whatever the server says."""
    examples_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Take part only in jobs that protect the examples of this device (`[federated.privacy]`), and
    train no more than this epsilon allows for one of them, all runs together."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """Delta of `epsilon` and of `examples_epsilon`."""


class SandboxLimits(Section):
    """The process in which the code of tasks runs."""

    required: bool = False
    """Load no task where this kernel restricts its network and files only in part."""
    read: tuple[Path, ...] = ()
    """Files and directories that tasks may read besides `--data` and `--tasks`."""
    processes: Annotated[int, Field(ge=8)] = 256
    """Most processes of a task, each of their threads counted."""
    scratch_mb: Annotated[int, Field(ge=1)] = 1000
    """Most disk space of a task's scratch directory."""


class WeightLimits(Section):
    """Where files that models start from may come from, see `isthmus_clients.device.weights`."""

    folders: tuple[Path, ...] = ()
    """Folders in which the owner keeps models, which are used where they are."""
    sources: tuple[str, ...] = ()
    """Sources that are asked first: `https://HOST/FOLDER/` or `file:/FOLDER`."""
    job_sources: tuple[str, ...] = ()
    """Patterns of the sources that jobs may name (`model.sources`); * matches anything."""
    link: bool = True
    """Whether they may come from the server."""
    kb_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Most thousands of bytes per second that are fetched."""


class OwnerLimits(Section):
    """The owner's limits; anything not limited is allowed."""

    jobs: tuple[str, ...] = ("*",)
    """Patterns of job names; * matches anything."""
    digests: tuple[Digest, ...] = ()
    """Digests of the tasks that may be loaded, as printed by `isthmus task show`; empty allows all
    installed tasks."""
    authors: tuple[Digest, ...] = ()
    """Public keys of the authors whose packages may be fetched from the server."""
    hours: tuple[str, ...] = ()
    """Working hours in UTC, such as 22:00-06:00 or sat,sun 08:00-18:00; any of them applies."""
    hang_up: bool = True
    """Hang up when the server does not need this device, and check in again when it says."""
    charging_only: bool = False
    """Work only on mains power."""
    unmetered_only: bool = False
    """Work only if NetworkManager reports an unmetered connection."""
    rounds_per_day: Annotated[int, Field(ge=1)] | None = None
    """Requests to train or to score in one day (UTC)."""
    bytes_per_day: Annotated[int, Field(ge=1)] | None = None
    """Bytes of received models and sent updates in one day (UTC)."""
    cpu_percent: Annotated[int, Field(ge=1)] | None = None
    """CPU limit in percent of one core; see `isthmus_clients.device.resource_limits`."""
    memory_mb: Annotated[int, Field(ge=128)] | None = None
    """Memory limit of the process; see `isthmus_clients.device.resource_limits`."""
    server_sources: tuple[str, ...] = ()
    """Patterns of the addresses from which the server may have this device fetch models and
    packages, as it puts them on a mirror; * matches anything in a pattern with a host. Default:
    none, and all of it comes on the link."""
    server_uploads: tuple[str, ...] = ()
    """Patterns of the addresses at which the server may have this device put plain updates,
    encrypted, as into a store; likewise. Default: none, and all of them go over the link."""
    open_runs: Annotated[int, Field(ge=1)] | None = None
    """Runs whose task and data stay in memory at a time, for servers with several jobs at once; a
    run above it is opened again for its next round. Each has a process, up to `memory_mb`. None is
    as many as memory allows, see `isthmus_clients.device.sandbox.process_host.MOST_OPEN`."""
    personal_mb: Annotated[int, Field(ge=0)] = 0
    """Disk space for what jobs keep on this device between rounds (`exchange.personal`), of all
    runs; the run that was used longest ago is forgotten first. 0 refuses such jobs: a lying server
    can prepare a device that keeps a state for a later sum."""
    weights_mb: Annotated[int, Field(ge=0)] = 0
    """Disk space for files that models start from; 0 fetches none."""
    weights: WeightLimits = WeightLimits()
    """Where these files may come from."""
    privacy: PrivacyLimits = PrivacyLimits()
    """Minimum privacy that this device requires."""
    sandbox: SandboxLimits = SandboxLimits()
    """The process in which the code of tasks runs."""

    @field_validator("hours")
    @classmethod
    def _are_hours(cls, hours: tuple[str, ...]) -> tuple[str, ...]:
        for interval in hours:
            try:
                Hours.parse(interval)
            except JobError as error:
                raise ValueError(str(error)) from None
        return hours


def parse(text: str, origin: str) -> OwnerLimits:
    """Read a limits file's text.

    Raises:
        UserError: a key is unknown or its value invalid.
    """
    try:
        return OwnerLimits.model_validate(tomllib.loads(text.removeprefix("\ufeff")))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{origin} is not valid TOML: {error}") from None
    except ValidationError as error:
        raise UserError(f"{origin}: {'; '.join(sentences(error, OwnerLimits))}") from None


def load(path: Path) -> OwnerLimits:
    """Read the limits from a file; without a file the defaults apply.

    Raises:
        UserError: it cannot be read. A device must not start without the limits of its owner.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return OwnerLimits()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {cause_of(error)}") from None


class LimitsGuard:
    """Checks requests against the owner's limits and counts the daily usage.

    Guarantees:
      * an unknown condition (charging, unmetered network) counts as not met;
      * the usage of the day survives the process and is written before the work begins.
    """

    def __init__(
        self,
        limits: OwnerLimits,
        usage: Path,
        *,
        now: Callable[[], float] = time.time,
        power: Path = Path("/sys/class/power_supply"),
    ) -> None:
        """Prepare.

        Args:
            limits: of the owner.
            usage: file of the daily usage; the versions of packages are recorded next to it.
            now: Unix seconds.
            power: the sysfs directory of power supplies.
        """
        self.limits = limits
        self.versions = PackageVersions(usage.with_name("packages.json"))
        self.now = now
        self._usage = usage
        self._power = power

    def check_job(self, job: Job) -> None:
        """Refuse to open a run of a job that the owner does not allow.

        Raises:
            AdmissionRefused: its owner does not allow it.
        """
        if not any(fnmatch.fnmatchcase(job.name, pattern) for pattern in self.limits.jobs):
            allowed = ", ".join(self.limits.jobs) or "none"
            raise AdmissionRefused(
                f"its owner does not allow the job {job.name!r}; allowed: {allowed}"
            )
        keeps = job.exchange.has_personal or job.federated.compression is not None
        if keeps and not self.limits.personal_mb:
            raise AdmissionRefused(
                "its owner does not let jobs keep a part of the model on it between rounds "
                "(personal_mb in policy.toml)"
            )
        if self.limits.privacy.examples_epsilon is not None and job.federated.privacy is None:
            raise AdmissionRefused(
                "its owner lets it train only in jobs that protect its examples by noise "
                f"([privacy] examples_epsilon in policy.toml), and {job.name!r} has no table "
                "[federated.privacy]"
            )
        self._check_weights(job)
        if job.statistics.collect and self.limits.privacy.counts == "none":
            raise AdmissionRefused(
                "its owner lets it give no counts of its data ([privacy] counts in policy.toml)"
            )
        if not job.federated.secure_aggregation:
            self.check_plain()
        elif job.federated.mode == "buffered" and not self.limits.privacy.buffered:
            raise AdmissionRefused(
                "its owner does not allow sums of updates to different models (mode = "
                '"buffered"; [privacy] buffered in policy.toml)'
            )

    def _check_weights(self, job: Job) -> None:
        """Refuse a job that needs more exact weights than the owner gives.

        Raises:
            AdmissionRefused: it does, or its app sends numbers of examples of its own.
        """
        owners = self.limits.privacy.weights
        if owners == "exact":
            return
        gives = f"its owner gives {owners} weights ([privacy] weights in policy.toml)"
        if job.federated.app is not None:
            raise AdmissionRefused(
                f"{gives}, and the app {job.federated.app} sends numbers of examples by itself"
            )
        if agreed(job.federated.weights, owners) is None:
            raise AdmissionRefused(
                f"{gives}, and {job.name!r} needs {job.federated.weights} ones (federated.weights)"
            )

    def check_memory(self, job: Job, memory: link_pb2.Memory) -> None:
        """Refuse a job whose model alone needs more memory than the owner allows.

        What the task's code, its data and an optimizer need besides is not known before it runs.

        Args:
            job: the job.
            memory: of its model on a device, as the server says; without content for unknown.

        Raises:
            AdmissionRefused: so it does.
        """
        allowed = self.limits.memory_mb
        choice = job.federated.frozen_dtype
        if allowed is None or choice not in memory.frozen:
            return
        trained = 2 * memory.trained  # and the gradients
        needed = memory.frozen[choice] + trained
        if needed <= allowed << 20:
            return
        smaller = [
            f"{_megabytes(frozen + trained)} MB with federated.frozen_dtype = {name!r}"
            for name, frozen in sorted(memory.frozen.items(), key=lambda each: -each[1])
            if frozen + trained <= allowed << 20
        ]
        if smaller:
            would_fit = f"the job would need {' or '.join(smaller)}"
        else:
            would_fit = f"its owner would have to allow memory_mb = {_megabytes(needed)} and more"
        raise AdmissionRefused(
            f"its owner allows memory_mb = {allowed} (policy.toml), and the model of {job.name!r} "
            f"needs {_megabytes(needed)} MB here: {_megabytes(memory.frozen[choice])} for what is "
            f"frozen, in {choice}, and {_megabytes(trained)} for what is trained and its gradients,"
            f" without the states of an optimizer; {would_fit}"
        )

    def check_evaluation(self, job: Job) -> None:
        """Refuse an evaluation of a model, whose counts tell of this device's data.

        Where devices add the noise of `[privacy]`, no counts are sent.

        Raises:
            AdmissionRefused: the owner does not allow it, or only with the same devices each time,
                which the job does not ask.
        """
        counts = self.limits.privacy.counts
        if counts == "exact" or job.devices_add_noise:
            return
        shown = "([privacy] counts in policy.toml)"
        if counts == "none":
            raise AdmissionRefused(f"its owner lets it give no counts of its data {shown}")
        if not (job.federated.secure_aggregation and job.evaluation.same_devices):
            raise AdmissionRefused(
                f"its owner lets it be in evaluations with the same devices only {shown}, and "
                f"{job.name!r} does not ask the same ones each time by secure sums: set "
                "evaluation.same_devices = true"
            )

    def check_plain(self) -> None:
        """Refuse to send anything that is not masked.

        Raises:
            AdmissionRefused: the owner requires secure aggregation, or limits what only noise
                inside secure sums can meet.
        """
        limits = self.limits.privacy
        if limits.secure_aggregation:
            raise AdmissionRefused(
                "its owner requires secure aggregation, and this request is without"
            )
        if limits.noise is not None or limits.epsilon is not None:
            raise AdmissionRefused(
                "its owner limits privacy by noise or epsilon ([privacy] in policy.toml), which "
                "only sums with secure aggregation can meet, and this request is without"
            )

    def check_work(self, size: int, room: int = 0) -> None:
        """Refuse a round, or count it: `size` bytes are received, and `room` more are sent.

        Raises:
            AdmissionRefused: not at this time, or the daily limit is reached.
        """
        self._check_now()
        self._use(1, 2 * size + room)

    def check_fetch(self, size: int) -> None:
        """Refuse to receive `size` bytes of code, or count them.

        Raises:
            AdmissionRefused: not at this time, or the daily limit is reached.
        """
        self._check_now()
        self._use(0, size)

    def check_weights(self, size: int, hours: Sequence[str] = ()) -> None:
        """Refuse to receive `size` bytes of a model's files now, or count them.

        `hours` are in place of those of the limits, if there are any.

        Raises:
            AdmissionRefused: not at this time, or the daily limit is reached.
        """
        self._check_now(hours)
        self._use(0, size)

    def _check_now(self, hours: Sequence[str] = ()) -> None:
        limits = self.limits
        now = self.now()
        shown = hours or limits.hours
        intervals = [Hours.parse(text) for text in shown]
        if intervals and not any(_is_open(interval, now) for interval in intervals):
            raise AdmissionRefused(f"its owner's hours are {', '.join(shown)} (UTC)")
        if limits.charging_only and not self._charging():
            raise AdmissionRefused("its owner lets it work on mains power only")
        if limits.unmetered_only and not _unmetered():
            raise AdmissionRefused("its owner lets it work on unmetered networks only")

    def _use(self, more_rounds: int, more_bytes: int) -> None:
        limits = self.limits
        if limits.rounds_per_day is None and limits.bytes_per_day is None:
            return
        day, rounds, used = self._used(datetime.fromtimestamp(self.now(), UTC).date())
        rounds += more_rounds
        used += more_bytes
        if limits.rounds_per_day is not None and rounds > limits.rounds_per_day:
            raise AdmissionRefused(f"its owner allows {limits.rounds_per_day} rounds a day")
        if limits.bytes_per_day is not None and used > limits.bytes_per_day:
            raise AdmissionRefused(f"its owner allows {limits.bytes_per_day} bytes a day")
        try:
            write_sealed(self._usage, {"day": day, "rounds": rounds, "bytes": used})
        except OSError as error:
            raise AdmissionRefused(f"it cannot record its usage ({error.strerror})") from None

    def _used(self, today: date) -> tuple[str, int, int]:
        """The day that counts, and the rounds and bytes that were used in it.

        A clock that is set back by up to a day gives nothing back: the day it comes from counts
        until it is over. From one that was further ahead there would be no end of it.
        """
        new = today.isoformat(), 0, 0
        try:
            usage = read_sealed(self._usage)
            day = str(usage["day"])
            counts = new[0] <= day <= (today + timedelta(days=1)).isoformat()
            return (day, usage["rounds"], usage["bytes"]) if counts else new
        except FileNotFoundError:
            return new
        except (OSError, DamagedError, LookupError) as error:
            raise AdmissionRefused(
                f"its recorded usage cannot be read ({error}); its owner can remove that file, "
                "which sets the usage of the day to zero"
            ) from None

    def _charging(self) -> bool:
        try:
            supplies = [path.parent for path in self._power.glob("*/type")]
            kinds = {path: (path / "type").read_text().strip() for path in supplies}
            mains = [path for path, kind in kinds.items() if kind in ("Mains", "USB")]
            if any((path / "online").read_text().strip() == "1" for path in mains):
                return True
            # A machine without a battery is on mains even if it lists no mains supply.
            return self._power.is_dir() and "Battery" not in kinds.values()
        except OSError:
            return False


def _megabytes(size: int) -> int:
    """Bytes in MB as `memory_mb` counts them, rounded up.

    >>> _megabytes(3 << 20), _megabytes(1)
    (3, 1)
    """
    return -(-size >> 20)


def _is_open(hours: Hours, now: float) -> bool:
    """Whether a time (Unix seconds) is within the hours."""
    at = datetime.fromtimestamp(now, UTC)
    for day in (at, at - timedelta(days=1)):  # a night belongs to the day on which it begins
        if hours.days and DAYS[day.weekday()] not in hours.days:
            continue
        opens = _at(day, hours.opens)
        closes = _at(day, hours.closes)
        if closes <= opens:
            closes += timedelta(days=1)
        if opens <= at < closes:
            return True
    return False


def _at(day: datetime, time_: str) -> datetime:
    return datetime.combine(day.date(), datetime.strptime(time_, "%H:%M").time(), UTC)


def _unmetered() -> bool:
    """Whether NetworkManager reports an unmetered connection; no reply counts as metered."""
    busctl = shutil.which("busctl")
    if busctl is None:
        return False
    name = "org.freedesktop.NetworkManager"
    command = [busctl, "get-property", name, f"/{name.replace('.', '/')}", name, "Metered"]
    try:
        reply = subprocess.run(
            command, capture_output=True, text=True, timeout=_BUSCTL_SECONDS, check=True
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return False
    return len(reply) == 2 and reply[0] == "u" and reply[1] in map(str, _NOT_METERED)
