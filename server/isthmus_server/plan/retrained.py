"""Train the alternatives of a what-if in simulation, and say how far their estimates were off.

What is trained is the run's own job under another policy, from the run's seed and so from its first
model, with the run's devices. The run's own policy is trained too: by how much that misses what the
run reached is what simulation, and chance, leave open.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.errors import UserError
from isthmus.job import Job, with_changes
from isthmus_server.plan.replayed_policy import with_policy
from isthmus_server.plan.round_log import RoundLog
from isthmus_server.plan.simulated_log import TrainTrial, refuse_private, simulated_log, train_trial
from isthmus_server.plan.what_if import Alternative, Trained, WhatIf
from isthmus_server.read.report.measurements import measured
from isthmus_server.storage.records import Receipt
from isthmus_server.storage.run_description import is_simulated
from isthmus_server.storage.store import Store

OPTION = "--replay"
_NINETIETH = 1.2816
"""The ninetieth percentile of the standard normal distribution."""


def retrained(
    store: Store,
    found: WhatIf,
    policies: Sequence[str] = (),
    on_trained: Callable[[str], None] = lambda line: None,
) -> WhatIf:
    """The what-if of a run with what its alternatives reach in simulation.

    Args:
        store: of the run.
        found: what its log says.
        policies: that are trained; empty for all.
        on_trained: is told each policy that was trained, a line.

    Raises:
        UserError: the run cannot be trained here, with what is missing.
    """
    unknown = [name for name in policies if name not in {a.policy for a in found.alternatives}]
    if unknown:
        known = ", ".join(each.policy for each in found.alternatives)
        raise UserError(
            f"--policies names {unknown[0]!r}, and other policies of this run are {known}"
        )
    log = RoundLog.of(store)
    _check_there(log.job, store.base)
    refuse_private(log.job, OPTION)
    job = simulated_job(log, is_simulated(store.directory))
    train = train_trial(OPTION)
    with tempfile.TemporaryDirectory(prefix="isthmus-replay-") as scratch:
        own = simulated_log(train, job, store.base, Path(scratch), log.rounds[-1].record.round)
        _check_same_data(log, own)
        again = _trained(own, found.metric)
        if again is None:
            raise UserError(
                f"{OPTION} has trained the run again, and no round had {found.metric}: the task in "
                f"{store.base} is another now"
            )
        on_trained(f"{found.policy}, as in the run: {again.text}")
        others = []
        for each in found.alternatives:
            if policies and each.policy not in policies:
                others.append(each)
                continue
            other = _alternative(train, job, each, found.metric, store.base, Path(scratch))
            on_trained(f"{each.policy}: {other.text}")
            others.append(other)
    return dataclasses.replace(found, alternatives=others, again=again)


def simulated_job(log: RoundLog, simulated: bool) -> Job:
    """The job of a run as its simulation trains it, with the devices that the run had.

    Args:
        log: of the run.
        simulated: whether its participants were; the job then says all. Of real ones the log has
            the speeds, but for devices with secure sums, which do not tell their steps.

    Raises:
        UserError: data of its participants cannot be here.
    """
    job = log.job
    if simulated:
        return job
    clients = job.federated.clients
    own = {f"client-{index}" for index in range(clients)}
    receipts = [receipt for each in log.rounds for receipt in each.record.receipts]
    asked = [each for each in receipts if each.regime == "federated"]
    devices = {each.participant for each in asked}
    datacenters = {
        name for each in log.rounds for name in each.planned.decision.observation.datacenter_names
    }
    if devices - own:
        raise UserError(
            f"{OPTION} trains on this machine, and the data of {min(devices - own)} are not here; "
            f"leave {OPTION} out"
        )
    if len(datacenters) > 1 or (datacenters and not job.datacenter.ranks):
        raise UserError(
            f"{OPTION} trains on this machine, and the data of {', '.join(sorted(datacenters))} "
            f"are not here; leave {OPTION} out"
        )
    figures = {each.name: each for each in measured([each.record for each in log.rounds])}
    changes: dict[str, Any] = {}
    if clients:
        changes["simulation.clients"] = clients
    step = figures.get("step of a device")
    if step is not None:
        changes["simulation.step_seconds"] = step.median
        spread = math.log(step.high / step.low) / (2 * _NINETIETH) if step.low > 0 else 0.0
        changes["simulation.speed_spread"] = min(spread, 3.0)
    step = figures.get("step of a datacenter")
    if step is not None:
        changes["simulation.datacenter_step_seconds"] = step.median
    if asked:  # one that came too late was not lost: it was one of too many
        lost = sum(each.status == "dropped" and not each.late for each in asked)
        changes["simulation.dropout"] = lost / len(asked)
    return with_changes(job, changes)


def _check_there(job: Job, base: Path) -> None:
    """Refuse a run whose task or data are not on this machine.

    Raises:
        UserError: with what is missing.
    """
    where = job.task.source.rpartition(":")[0]
    if where.endswith(".py") and not (base / where).is_file():
        raise UserError(
            f"{OPTION} trains the run's task, and {base / where} is not there; put it back, or "
            f"leave {OPTION} out"
        )
    data = job.task.data_in(base)
    if data is not None and not data.exists():
        raise UserError(
            f"{OPTION} trains on the run's data, and {data} is not there; put it back, or leave "
            f"{OPTION} out"
        )


def _check_same_data(log: RoundLog, own: RoundLog) -> None:
    """Refuse data that are not those of the run, as far as the numbers of examples show it.

    Raises:
        UserError: with the first device that has others.
    """
    if log.job.federated.mode == "buffered":
        return  # weights of updates are not the numbers of examples
    before = _examples(log)
    now = _examples(own)
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            raise UserError(
                f"{name} has {now[name]} examples here, and had {before[name]} in the run; "
                f"{OPTION} needs the run's own data"
            )


def _examples(log: RoundLog) -> Mapping[str, int]:
    """Examples of each device whose update was taken, where the log has them."""
    receipts: list[Receipt] = [r for each in log.rounds for r in each.record.receipts]
    return {
        each.participant: each.examples
        for each in receipts
        if each.regime == "federated" and each.status == "accepted" and each.examples
    }


def _alternative(
    train: TrainTrial, job: Job, each: Alternative, metric: str, base: Path, scratch: Path
) -> Alternative:
    """An alternative with what it reaches in simulation, or why it cannot be trained."""
    try:
        log = simulated_log(train, with_policy(job, each.policy), base, scratch, job.rounds)
    except UserError as error:
        return dataclasses.replace(each, untrained=str(error))
    found = _trained(log, metric)
    if found is None:
        return dataclasses.replace(each, untrained=f"no round of it had a value of {metric}")
    return dataclasses.replace(each, trained=found)


def _trained(log: RoundLog, metric: str) -> Trained | None:
    """What a simulated run has reached; None if no round was evaluated."""
    value = log.delivered(metric)
    if value is None:
        return None
    return Trained(
        value=value,
        rounds=len(log.rounds),
        price=log.spent,
        seconds=sum(each.record.seconds for each in log.rounds),
    )
