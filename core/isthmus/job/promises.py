"""What a job promises to the owners of devices, and what it needs of them.

There are three levels of protection, in the words of docs/threat-model.md. `isthmus job check`, the
report and the console all show what `level_of` returns.

>>> from isthmus.job import parse_job
>>> text = 'name = "a"' + chr(10) + '[task]' + chr(10) + 'source = "task.py:A"'
>>> level_of(parse_job(text)).name
'a curious server, without noise'
>>> level_of(parse_job(text, ["federated.secure_aggregation=false"])).name
'nothing claimed'
>>> needs_of(parse_job(text, ['federated.weights="coarse"', "evaluation.devices=8"]))
['weights = "exact" or "coarse"', 'counts = "exact"', 'clients_min = 5']
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

from isthmus.job.schema import Job

Deployment = Literal["separate", "one", "local"]
"""Who runs the authority that enrols devices: a person apart from the server's; the server itself;
or nobody, because the devices are processes of the server's user."""

DEPLOYMENTS: tuple[Deployment, ...] = ("separate", "one", "local")
"""From the one in which most is claimed to the one in which least is."""

CURIOUS = "a curious server, without noise"
LYING = "a lying server, with noise"
NOTHING = "nothing claimed"


_COUNTED = 10
"""The honest devices that owners' `clients_min` asks for unless they set it."""
_COLLUDE = 10
"""One in so many devices of a sum, or a part of so many, counts as colluding with the server."""


@dataclasses.dataclass(frozen=True)
class PrivacyLevel:
    """What is claimed of a run's devices against its server."""

    name: str
    """`CURIOUS`, `LYING` or `NOTHING`."""
    claim: str
    """In words, with the condition if one is not known."""

    @property
    def sentence(self) -> str:
        """Both in a line."""
        return f"{self.name}: {self.claim}"


def level_of(job: Job, deployment: Deployment | None = None) -> PrivacyLevel | None:
    """The level of a job; None if it asks nothing of devices.

    Args:
        job: the job.
        deployment: of the server that runs it; None if that is not known.
    """
    if job.strategy.policy == "datacenter" and not _asks_devices(job):
        return None
    if deployment == "local":
        return PrivacyLevel(
            NOTHING, "the devices are processes of the server's own user, who can read their data"
        )
    if job.federated.privacy is not None:
        return PrivacyLevel(
            LYING,
            "each device trains with noise of its own, so whatever the server does in this job, "
            "what it learns of one example of a device stays within the epsilon of "
            "[federated.privacy]; owners who set examples_epsilon refuse jobs without",
        )
    if not job.federated.secure_aggregation:
        return PrivacyLevel(
            NOTHING,
            "the server receives what each device sends (federated.secure_aggregation = false)",
        )
    sums = f"sums of at least {job.federated.smallest_sum} devices' updates, and no single one"
    curious = f"a server that follows the protocol learns {sums}"
    if job.devices_add_noise:
        noisy = (
            "each device adds noise inside the secure sum, so whatever the server does in this "
            "job, what it learns of one device stays within the epsilon of [privacy]; owners who "
            "set noise or epsilon refuse sums without"
        )
        if deployment == "separate":
            return PrivacyLevel(LYING, noisy)
        if deployment == "one":
            return PrivacyLevel(
                CURIOUS,
                f"{curious}, with noise; but it enrols devices itself, and if it lies it can "
                "enrol false ones that leave their noise out",
            )
        return PrivacyLevel(
            LYING,
            "if another person than the server's runs the authority (`isthmus authority`), "
            f"{noisy}; else only a server that follows the protocol is covered",
        )
    added = ""
    if job.privacy is not None:
        added = ", and is trusted to add the noise of [privacy], which is for everybody else"
    return PrivacyLevel(
        CURIOUS,
        f"{curious}{added}; one that lies can craft models whose sums show single examples, which "
        'only noise of the devices bounds ([privacy] mechanism = "distributed")',
    )


def _asks_devices(job: Job) -> bool:
    return bool(job.evaluation.devices or job.statistics.collect)


def weakest(deployments: Iterable[Deployment]) -> Deployment | None:
    """The one of a run's deployments in which least is claimed; None without any.

    >>> weakest(["separate", "one"])
    'one'
    """
    return max(deployments, key=DEPLOYMENTS.index, default=None)


def needs_of(job: Job) -> list[str]:
    """What owners must have in their `policy.toml` for their devices to take part in all of it.

    Without limits on noise, and without `clients_min` of jobs with groups, whose sizes vary.
    """
    federated = job.federated
    needs = []
    if not federated.secure_aggregation:
        needs.append("secure_aggregation = false")
    elif federated.mode == "buffered":
        needs.append("buffered = true")
    kept = (federated.compression, federated.control_variates)
    if job.exchange.has_personal or any(each is not None for each in kept):
        needs.append("personal_mb")
    kinds = {"exact": '"exact"', "coarse": '"exact" or "coarse"'}
    if federated.app is not None:
        needs.append('weights = "exact"')
    elif federated.weights in kinds:
        needs.append(f"weights = {kinds[federated.weights]}")
    if job.statistics.collect:
        needs.append('counts = "exact" or "same-devices"')
    elif job.evaluation.devices and not job.devices_add_noise:
        also = ' or "same-devices"' if job.evaluation.same_devices else ""
        needs.append(f'counts = "exact"{also}')
    if (honest := _honest_devices(job)) < _COUNTED:
        needs.append(f"clients_min = {honest}")
    return needs


def _honest_devices(job: Job) -> float:
    """Devices that count as honest in the smallest secure sum; infinity without such sums.

    Devices that `isthmus run` starts have no certificates and count none.

    >>> from isthmus.job import parse_job
    >>> text = 'name = "a"' + chr(10) + '[task]' + chr(10) + 'source = "task.py:A"'
    >>> _honest_devices(parse_job(text, ["federated.cohort=15"]))
    10
    """
    federated = job.federated
    if not federated.secure_aggregation or federated.clients:
        return math.inf
    sums = []
    if job.strategy.policy != "datacenter" and federated.least_in_group is None:
        sums.append(federated)
    if job.evaluation.devices:
        sums.append(job.evaluation.on_devices(federated))
    return min((each.needed - -(-each.cohort // _COLLUDE) for each in sums), default=math.inf)
