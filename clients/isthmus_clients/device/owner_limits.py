"""What the owner of a device allows, whatever a server asks for: `policy.toml` beside its keys.

>>> policy = parse('jobs = ["keyboard-*"]', "policy.toml")
>>> policy.jobs
('keyboard-*',)

A refusal is a sentence that the server is told. What has been used today is written down before
it is used, so that a crash never gives any of it back.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from isthmus.errors import AdmissionRefused, JobError, UserError
from isthmus.job import Job
from isthmus.job.section import DAYS, Hours, Section, sentences
from isthmus.system.private_files import write_private_file

_BUSCTL_SECONDS = 2.0
_NOT_METERED = (2, 4)
"""NetworkManager's NM_METERED_NO and NM_METERED_GUESS_NO."""


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""32 bytes in hexadecimal."""


class Privacy(Section):
    """The least that this device insists on."""

    secure_aggregation: bool = True
    """Never let an update, or scores, out that are not masked."""
    clients_min: Annotated[int, Field(ge=2)] = 3
    """Never take part in a sum that could be of fewer devices."""


class Policy(Section):
    """The owner's limits; everything left out is allowed."""

    jobs: tuple[str, ...] = ("*",)
    """Names of jobs, in which * stands for anything."""
    digests: tuple[Digest, ...] = ()
    """Of the only tasks that are loaded, as `isthmus task show` prints them. None:
    all that are installed."""
    authors: tuple[Digest, ...] = ()
    """Public keys of those whose packages may be fetched from the server."""
    hours: tuple[str, ...] = ()
    """When it works, in UTC: 22:00-06:00, or sat,sun 08:00-18:00; several add up."""
    charging_only: bool = False
    """Only on mains power."""
    unmetered_only: bool = False
    """Only where NetworkManager says that the connection is not metered."""
    rounds_per_day: Annotated[int, Field(ge=1)] | None = None
    """Requests to train, or to score, in one day (UTC)."""
    bytes_per_day: Annotated[int, Field(ge=1)] | None = None
    """Of models that come and updates that go, in one day (UTC)."""
    cpu_percent: Annotated[int, Field(ge=1)] | None = None
    """Of one core; see `isthmus_clients.device.resource_limits`."""
    memory_mb: Annotated[int, Field(ge=128)] | None = None
    """Of the process; see `isthmus_clients.device.resource_limits`."""
    privacy: Privacy = Privacy()
    """The least that this device insists on."""

    @field_validator("hours")
    @classmethod
    def _are_hours(cls, hours: tuple[str, ...]) -> tuple[str, ...]:
        for one in hours:
            try:
                Hours.parse(one)
            except JobError as error:
                raise ValueError(str(error)) from None
        return hours


def parse(text: str, origin: str) -> Policy:
    """Read a policy file's text.

    Raises:
        UserError: with the key that makes no sense.
    """
    try:
        return Policy.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{origin} is not valid TOML: {error}") from None
    except ValidationError as error:
        raise UserError(f"{origin}: {'; '.join(sentences(error, Policy))}") from None


def load(path: Path) -> Policy:
    """The policy in a file; without one, nothing but the defaults is asked for.

    Raises:
        UserError: it cannot be read. A device without the limits its owner wrote must not start.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return Policy()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


class Guard:
    """Holds a device to its owner's policy.

    Guarantees:
      * what cannot be told (is it charging? is the network metered?) counts as a no;
      * what was used today survives the process, and is written before it is used.
    """

    def __init__(
        self,
        policy: Policy,
        usage: Path,
        *,
        now: Callable[[], float] = time.time,
        power: Path = Path("/sys/class/power_supply"),
    ) -> None:
        """`usage` is the file for what was used today; `power` is where Linux shows supplies."""
        self.policy = policy
        self.now = now
        self._usage = usage
        self._power = power

    def check_job(self, job: Job) -> None:
        """Refuse to open a run of a job.

        Raises:
            AdmissionRefused: its owner does not allow it.
        """
        if not any(fnmatch.fnmatchcase(job.name, pattern) for pattern in self.policy.jobs):
            allowed = ", ".join(self.policy.jobs) or "none"
            raise AdmissionRefused(
                f"its owner does not allow the job {job.name!r}; allowed: {allowed}"
            )
        if not job.federated.secure_aggregation:
            self.check_plain()

    def check_plain(self) -> None:
        """Refuse to let anything out that is not masked.

        Raises:
            AdmissionRefused: its owner insists on secure aggregation.
        """
        if self.policy.privacy.secure_aggregation:
            raise AdmissionRefused("its owner insists on secure aggregation, and this is without")

    def check_work(self, size: int) -> None:
        """Refuse a round, or note that it takes place: `size` bytes come, and as many go.

        Raises:
            AdmissionRefused: not now, or not today any more.
        """
        self._check_now()
        self._use(1, 2 * size)

    def check_fetch(self, size: int) -> None:
        """Refuse that `size` bytes of code come, or note it.

        Raises:
            AdmissionRefused: not now, or not today any more.
        """
        self._check_now()
        self._use(0, size)

    def _check_now(self) -> None:
        policy, now = self.policy, self.now()
        hours = [Hours.parse(one) for one in policy.hours]
        if hours and not any(_is_open(one, now) for one in hours):
            raise AdmissionRefused(f"its owner's hours are {', '.join(policy.hours)} (UTC)")
        if policy.charging_only and not self._charging():
            raise AdmissionRefused("its owner lets it work on mains power only")
        if policy.unmetered_only and not _unmetered():
            raise AdmissionRefused("its owner lets it work on unmetered networks only")

    def _use(self, more_rounds: int, more_bytes: int) -> None:
        policy = self.policy
        if policy.rounds_per_day is None and policy.bytes_per_day is None:
            return
        today = datetime.fromtimestamp(self.now(), UTC).date().isoformat()
        rounds, used = self._used(today)
        rounds, used = rounds + more_rounds, used + more_bytes
        if policy.rounds_per_day is not None and rounds > policy.rounds_per_day:
            raise AdmissionRefused(f"its owner allows {policy.rounds_per_day} rounds a day")
        if policy.bytes_per_day is not None and used > policy.bytes_per_day:
            raise AdmissionRefused(f"its owner allows {policy.bytes_per_day} bytes a day")
        said = json.dumps({"day": today, "rounds": rounds, "bytes": used})
        try:
            write_private_file(self._usage, said.encode())
        except OSError as error:
            raise AdmissionRefused(
                f"it cannot write down what it used ({error.strerror})"
            ) from None

    def _used(self, today: str) -> tuple[int, int]:
        try:
            kept = json.loads(self._usage.read_text())
            return (kept["rounds"], kept["bytes"]) if kept["day"] == today else (0, 0)
        except FileNotFoundError:
            return 0, 0
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise AdmissionRefused(f"what it used today cannot be read ({error})") from None

    def _charging(self) -> bool:
        try:
            supplies = [path.parent for path in self._power.glob("*/type")]
            kinds = {path: (path / "type").read_text().strip() for path in supplies}
            mains = [path for path, kind in kinds.items() if kind in ("Mains", "USB")]
            if any((path / "online").read_text().strip() == "1" for path in mains):
                return True
            # A machine without a battery is on mains, whether it says so or not.
            return self._power.is_dir() and "Battery" not in kinds.values()
        except OSError:
            return False


def _is_open(hours: Hours, now: float) -> bool:
    """Whether hours are open at a time (unix seconds)."""
    at = datetime.fromtimestamp(now, UTC)
    for day in (at, at - timedelta(days=1)):  # a night belongs to the day on which it begins
        if hours.days and DAYS[day.weekday()] not in hours.days:
            continue
        opens, closes = _at(day, hours.opens), _at(day, hours.closes)
        if closes <= opens:
            closes += timedelta(days=1)
        if opens <= at < closes:
            return True
    return False


def _at(day: datetime, time_: str) -> datetime:
    return datetime.combine(day.date(), datetime.strptime(time_, "%H:%M").time(), UTC)


def _unmetered() -> bool:
    """What NetworkManager says of the connection; no answer is a no."""
    busctl = shutil.which("busctl")
    if busctl is None:
        return False
    name = "org.freedesktop.NetworkManager"
    asked = [busctl, "get-property", name, f"/{name.replace('.', '/')}", name, "Metered"]
    try:
        said = subprocess.run(
            asked, capture_output=True, text=True, timeout=_BUSCTL_SECONDS, check=True
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return False
    return len(said) == 2 and said[0] == "u" and said[1] in map(str, _NOT_METERED)
