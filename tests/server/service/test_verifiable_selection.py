"""A lying server that composes the cohort itself, and devices as processes of their own."""

import asyncio
import contextlib
import os
import time

import pytest
from tests import forked
from tests.conftest import TABLE
from tests.server.service.conftest import Fleet
from tests.server.waiting import wait_until

from isthmus_privacy.secagg import client_messages
from isthmus_privacy.secagg.lottery import MILLION, largest_share, ticket
from isthmus_server.fleet.members import Members
from isthmus_server.read.report.report import read_report
from isthmus_server.regimes.reasons import UNREACHABLE
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.rounds.ticket_selection import TicketLottery, TicketSelection
from isthmus_server.storage.events import RoundAttemptFailed
from isthmus_server.storage.store import Store

NAMES = ["mallory", "oscar", "victim"]
ENROLLED = 1000


@pytest.fixture
async def devices(fleet: Fleet, monkeypatch):
    """Three devices, each a process with its owner's limits, of a fleet of a thousand."""
    monkeypatch.setattr(Members, "population", lambda self: ENROLLED)
    await fleet.listen()
    processes = []
    with contextlib.ExitStack() as stack:
        for name in NAMES:
            member = await fleet.member(name)
            member.tasks.mkdir()
            (member.tasks / "task.py").write_text(TABLE + "    pass\n")
            (member.directory / "policy.toml").write_text("[privacy]\nclients_min = 2\n")
            log = stack.enter_context((fleet.folder / f"{name}.log").open("w"))
            words = ["client", "start", "--state", str(member.directory)]
            processes.append(forked.start_into(log.fileno(), words, fleet.folder, os.environ))
        await wait_until(lambda: set(NAMES) <= fleet.link.peers.keys())
        yield fleet
        for process in processes:
            process.terminate()
            process.join(30)


async def attempts(fleet, make_job, lies):
    """Attempts at a secure round on the three devices: why each failed, and their reasons.

    The first is honest. Before each further one a lie is told. All are of one run, for which each
    device starts one process.
    """
    (fleet.folder / "task.py").write_text(TABLE + "    pass\n")
    job = make_job(
        "strategy.policy=federated",
        "federated.secure_aggregation=true",
        "federated.cohort=3",
        "rounds=1",
    )
    remaining = list(lies)
    with contextlib.closing(Store.create(fleet.folder / "run", job, fleet.folder)) as store:
        coordinator = Coordinator(RunParts.of(store, fleet.link))

        def lie_or_end(event):
            if not isinstance(event, RoundAttemptFailed):
                return
            if remaining:
                remaining.pop(0)()
            else:
                coordinator.drain.request()

        coordinator.events.subscribe(lie_or_end)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(coordinator.run())
        failures = read_report(store).to_json()["failed_attempts"]
    return [
        (failure["error"], {row["participant"]: row["reason"] for row in failure["receipts"]})
        for failure in failures
    ]


async def test_a_cohort_that_the_server_composed_is_refused(devices, make_job, monkeypatch):
    allowed = largest_share(10, 3, ENROLLED)
    now = int(time.time()) + 100
    lotteries = {name: devices.link.enrolments.current[name].lottery for name in NAMES}
    chosen = next(  # the victim is eligible, and those who collude are not
        draw
        for draw in range(now, now + 10_000)
        if {n for n in NAMES if ticket(lotteries[n], draw) * MILLION < allowed} == {"victim"}
    )

    def lie(selected_ppm, draw):
        monkeypatch.setattr(
            TicketLottery,
            "select",
            lambda self, round_, available, **rest: TicketSelection(NAMES, draw, selected_ppm),
        )

    def compose():
        lie(allowed, chosen)
        monkeypatch.setattr(client_messages, "is_selected", lambda *anything: True)

    lies = [lambda: lie(MILLION, now), compose, lambda: lie(allowed, chosen - 1)]
    honest, wide, composed, earlier = await attempts(devices, make_job, lies)

    assert "of 3 available devices, " in honest[0]
    assert f"from {allowed} millionths of them for a sum over 3" in honest[0]
    assert honest[1] == {}
    refused = "1000000 millionths of 1000 enrolled devices may be"
    assert all(refused in reason for reason in given(wide[1]))
    sentence = (
        f"the ticket of 'mallory' is above the share of {allowed} millionths in draw {chosen}"
    )
    assert given(composed[1]) == {sentence}
    before = f"is before that of {chosen}, in which this device"
    assert all(before in reason for reason in given(earlier[1]))


def given(receipts):
    """The reasons that devices gave; those that were asked last may not have replied in time."""
    assert sorted(receipts) == NAMES
    reasons = set(receipts.values()) - {UNREACHABLE}
    assert reasons
    return reasons
