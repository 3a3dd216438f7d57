"""A run whose groups are summed apart is killed at any commit, and goes on with the same groups."""

import contextlib
import errno
import itertools

import pytest
from tests.server.deployment import Killed
from tests.server.waiting import wait_until

from isthmus.errors import UserError
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.sealed_database import SealedDatabase
from isthmus_server.transport.device_draws import DeviceDraws

NINE = tuple("abcdefghi")
TWELVE = tuple("abcdefghijkl")
ROBUST = (
    "rounds=1",
    "federated.robust=median",
    "federated.robust_groups=3",
    "federated.robust_minimum=3",
    "federated.cohort=9",
    "federated.quorum=9",
    "federated.local_steps=1",
)
FOUR_GROUPS = (
    *ROBUST,
    "federated.robust_groups=4",
    "federated.cohort=12",
    "federated.quorum=9",
    "federated.clients=0",
    "time.join_seconds=4",
    "time.cohort_seconds=3",
)
WIDEST = 2.0**16
"""Range of a sum whose ranges are unknown."""


class Fault:
    """What ends a server after one of its commits, before the head of its log has it."""

    def __init__(self, monkeypatch, after, error=None):
        """It comes after so many commits: an error of the disk, or without one a kill."""
        self.came = False
        self._is_kill = error is None
        write_head = SealedDatabase.write_head
        transaction = SealedDatabase.transaction
        commits = itertools.count(1)

        def failing_head(database):
            if next(commits) == after:
                self.came = True
                raise error or Killed
            if self.is_dead:
                raise Killed
            write_head(database)

        @contextlib.contextmanager
        def failing_transaction(database):
            if self.is_dead:
                raise Killed
            with transaction(database):
                yield

        monkeypatch.setattr(SealedDatabase, "write_head", failing_head)
        monkeypatch.setattr(SealedDatabase, "transaction", failing_transaction)

    @property
    def is_dead(self):
        """Whether nothing is stored any more."""
        return self.came and self._is_kill


def store_apart(store):
    """Have each group store what it has in a commit of its own."""
    for log in (store.unmaskings, store.ranges):

        async def add(entry, log=log):
            log.add(entry)

        log.together.add = add


def lose_ranges(store):
    """Kill the server when the devices of the first group have unmasked their ranges."""

    async def kill(ranges):
        raise Killed

    store_apart(store)
    store.ranges.together.add = kill


async def run(store, link):
    return await Coordinator(RunParts.of(store, link)).run()


async def connected(deployment, network, names):
    """Connect devices; returns the connection of each."""
    await deployment.start(names=())
    connections = {name: network.dial(deployment.device(name), name) for name in names}
    await wait_until(lambda: set(names) <= deployment.link.peers.keys())
    return connections


def vanish(deployment, connections, name):
    connections[name].cancel()
    deployment.link.disconnect(name, "its battery is empty")


def devices_by_group(store):
    (record,) = read_report(store).rounds
    found = {}
    for receipt in record.receipts:
        found.setdefault(receipt.group, set()).add(receipt.participant)
    return found


DISK = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("kind", "error"), [("robust", None), ("robust", DISK), ("declared", None)]
)
async def test_a_run_that_ends_after_any_commit_has_the_model_of_one_that_does_not(
    deployment, planned, monkeypatch, kind, error
):
    """Its devices remember what they have unmasked, and give no other sum of it."""
    settings = ROBUST
    names = NINE
    if kind == "declared":
        # Two groups: one that is declared, and those without one.
        names = NINE[:6]
        deployment.groups = dict.fromkeys("abc", "north")
        settings = (
            *planned([{"by_group": True}]),
            "federated.groups={minimum=3}",
            "federated.cohort=6",
            "federated.quorum=6",
            "federated.local_steps=1",
        )
    await deployment.start(names=names)
    expected = await run(deployment.create_run("whole", *settings), deployment.link)
    for after in itertools.count(1):
        store = deployment.create_run(f"ended-{after}", *settings)
        store_apart(store)
        with monkeypatch.context() as patched:
            fault = Fault(patched, after, error)
            with contextlib.suppress(Killed, UserError):
                await run(store, deployment.link)
        if not fault.came:
            break
        again = deployment.reopen(store)
        if read_report(again).status == "finished":
            continue
        final = await run(again, deployment.link)
        assert final.model_sha256 == expected.model_sha256, f"after commit {after}"
    assert after > 4


async def test_a_run_whose_groups_ranges_were_lost_sums_the_same_ones_again(deployment):
    """Devices have unmasked them, and the server does not have them."""
    await deployment.start(names=TWELVE)
    settings = (*FOUR_GROUPS, "federated.quorum=12", "time.join_seconds=60")
    expected = await run(deployment.create_run("whole", *settings), deployment.link)
    store = deployment.create_run("killed", *settings)
    lose_ranges(store)
    with pytest.raises(Killed):
        await run(store, deployment.link)
    assert store.unmaskings.entries
    again = deployment.reopen(store)
    final = await run(again, deployment.link)
    assert final.model_sha256 == expected.model_sha256


async def test_a_device_that_does_not_come_back_to_the_ranges_of_its_group_ends_no_run(
    deployment, network
):
    """The others are divided anew; those that have unmasked ranges are summed without any."""
    connections = await connected(deployment, network, TWELVE)
    store = deployment.create_run("run", *FOUR_GROUPS)
    lose_ranges(store)
    with pytest.raises(Killed):
        await run(store, deployment.link)
    lost = min(store.unmaskings.entries[0].devices)
    vanish(deployment, connections, lost)
    again = deployment.reopen(store)
    await run(again, deployment.link)
    (record,) = read_report(again).rounds
    assert record.participants.accepted >= 9
    assert record.training["federated"]["range"] == WIDEST
    assert lost not in {receipt.participant for receipt in record.receipts}


async def test_a_round_goes_on_without_a_group_that_has_unmasked_and_is_not_all_back(
    deployment, network
):
    """No device of the others is in another sum than before."""
    connections = await connected(deployment, network, TWELVE)
    store = deployment.create_run("run", *FOUR_GROUPS)
    again = await deployment.run_until_killed_at_merge(store)
    unmasked = again.unmaskings.about(again.run_id, 1, None)
    groups = {entry.group: set(entry.devices) for entry in unmasked}
    assert len(groups) == 4
    left, devices = groups.popitem()
    vanish(deployment, connections, min(devices))
    await run(again, deployment.link)
    assert devices_by_group(again) == groups
    assert left not in groups


async def test_too_few_groups_that_are_all_back_name_the_devices_that_are_missing(
    deployment, network
):
    connections = await connected(deployment, network, TWELVE)
    store = deployment.create_run("run", *FOUR_GROUPS, "federated.quorum=10")
    again = await deployment.run_until_killed_at_merge(store)
    lost = min(again.unmaskings.entries[-1].devices)
    vanish(deployment, connections, lost)
    with pytest.raises(Exception, match=f"the quorum is 10; it needs {lost}, or others"):
        await run(again, deployment.link)


async def test_random_groups_of_a_lottery_are_those_of_their_draw_after_a_restart(deployment):
    """The new process knows no draw that devices have accepted; another has other groups."""
    await deployment.start(names=TWELVE)
    deployment.link.enrolments.requires_tickets = True
    store = deployment.create_run(
        "run", *FOUR_GROUPS, "federated.robust_groups=3", "time.join_seconds=60"
    )
    lose_ranges(store)
    with pytest.raises(Killed):
        await run(store, deployment.link)
    deployment.link.enrolments.draws = DeviceDraws()
    again = deployment.reopen(store)
    await run(again, deployment.link)
    first, second = (attempt.planned for attempt in again.logged_attempts())
    assert (second.draw, second.invited) == (first.draw, first.invited)
    (record,) = read_report(again).rounds
    assert record.training["federated"]["range"] < WIDEST


async def test_devices_that_do_not_divide_evenly_are_in_fewer_and_larger_groups(deployment):
    """In as many groups as the job has, some would be too small, and their devices left out."""
    await deployment.start(names=TWELVE[:11])
    store = deployment.create_run("run", *FOUR_GROUPS)
    await run(store, deployment.link)
    sizes = {name: len(devices) for name, devices in devices_by_group(store).items()}
    assert sizes == {"random-1-of-3": 4, "random-2-of-3": 4, "random-3-of-3": 3}
