"""Jobs that cannot go on are paused and tried again; the queue goes on."""

import asyncio
import contextlib
import errno
import sqlite3
import time

import grpc
import pytest
from tests.server.deployment import SimulatedDatacenter
from tests.server.rounds.results import LAYOUT
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused, StorageError
from isthmus.wire import operator_pb2 as pb
from isthmus_server.runs.jobs import queue as job_queue
from isthmus_server.runs.jobs import runner
from isthmus_server.runs.jobs.queue import JobQueue
from isthmus_server.storage.events import JobPaused, RoundCommitted, WaitingForParticipants
from isthmus_server.storage.fence import KeptTakeover, Takeover
from isthmus_server.storage.sealed_database import SealedDatabase
from isthmus_server.storage.store import Store
from isthmus_server.transport.peer import ParticipantListener


class Joined(ParticipantListener):
    """Lists the participants that have joined."""

    def __init__(self):
        self.names = []

    def joined(self, peer):
        self.names.append(peer.name)


async def test_a_job_that_cannot_go_on_is_paused_and_the_next_one_runs(operated, monkeypatch):
    # The next job may take longer than the usual pause of some seconds.
    monkeypatch.setattr(job_queue, "SHORTEST_PAUSE", 300.0)
    operated.gate.set()
    await operated.devices()
    waiting = ("federated.cohort=4", "federated.quorum=4", "time.join_seconds=4", "name=big")
    paused = await operated.submit(operated.job(*waiting), "one")
    second = await operated.submit(operated.job(), "two")
    assert await operated.ended(second) == "finished"
    reply = await operated.ask("Jobs", pb.JobsReply, pb.JobsRequest())
    first = reply.jobs[0]
    assert (first.state, first.round) == ("paused", 0)
    assert "a federated round needs 4 devices (federated.quorum); ready: 3" in first.reason
    assert 0 < first.next_try - time.time() <= 300
    (event,) = [event async for event in operated.runner.events(paused, follow=False)]
    assert isinstance(event, JobPaused)

    await operated.dial_device("d")
    assert await operated.ended(paused) == "finished"
    with pytest.raises(AdmissionRefused, match="is neither paused nor failed: it is fin"):
        await operated.ask("Resume", pb.ResumeReply, pb.ResumeRequest(id=paused))


async def test_a_returning_device_ends_a_pause_early_once(operated, monkeypatch):
    monkeypatch.setattr(job_queue, "SHORTEST_PAUSE", 300.0)
    operated.gate.set()
    await operated.dial_device("a")
    await wait_until(lambda: "a" in operated.link.peers)
    # Long enough for a device to be ready on a busy machine.
    id_ = await operated.submit(operated.job("time.join_seconds=3"))
    queue = operated.runner.queue

    def pauses():
        entry = queue.get(id_)
        return entry.pauses if entry.state == "paused" else 0

    await wait_until(lambda: pauses() == 1)
    joined = Joined()
    operated.link.listeners.attach(joined)
    operated.link.disconnect("a", "it was there before", grpc.StatusCode.UNAVAILABLE)
    await wait_until(lambda: joined.names == ["a"])
    assert not operated.runner._woken.is_set()
    await operated.dial_device("b")  # still too few: the next pause is longer
    await wait_until(lambda: pauses() == 2)
    assert queue.get(id_).next_try - time.time() > 400
    operated.link.disconnect("b", "it comes and goes", grpc.StatusCode.UNAVAILABLE)
    await wait_until(lambda: joined.names == ["a", "b", "b"])
    assert not operated.runner._woken.is_set()
    assert pauses() == 2
    await operated.dial_device("c")
    await wait_until(lambda: queue.get(id_).state != "paused" or pauses() == 3)


async def test_a_running_job_says_what_it_waits_for(operated):
    await operated.dial_device("a")
    id_ = await operated.submit(operated.job())
    events = operated.runner.events(id_, follow=True)
    assert isinstance(await anext(events), WaitingForParticipants)
    second = asyncio.create_task(anext(events))
    await wait_until(lambda: [job.waits.ready for job in operated.runner._running.values()] == [1])
    (job,) = (await operated.ask("Jobs", pb.JobsReply, pb.JobsRequest())).jobs
    assert (job.state, job.round) == ("running", 0)
    assert "waiting for 3 devices" in job.reason
    assert "ready: 1 of " in job.reason
    operated.gate.set()
    for name in "bc":
        await operated.dial_device(name)
    assert isinstance(await second, RoundCommitted)  # who came meanwhile is not in the log
    await wait_until(lambda: operated.runner.queue.get(id_).state == "finished")
    (job,) = (await operated.ask("Jobs", pb.JobsReply, pb.JobsRequest())).jobs
    assert job.reason in ("", "all rounds are done")


async def test_a_failed_job_goes_on_when_its_damage_is_repaired(operated):
    """A rollback of its run said that the run continues, and nothing could continue it."""
    operated.gate.set()
    id_ = await operated.submit(operated.job("time.join_seconds=3", "rounds=1"))
    await wait_until(lambda: operated.runner.queue.get(id_).state == "paused")
    about = operated.runner.runs / id_ / "job.json"
    whole = about.read_bytes()
    about.write_bytes(whole[:-20])
    await operated.ask("Resume", pb.ResumeReply, pb.ResumeRequest(id=id_))
    await wait_until(lambda: operated.runner.queue.get(id_).state == "failed")
    about.write_bytes(whole)
    await operated.devices()
    reply = await operated.ask("Resume", pb.ResumeReply, pb.ResumeRequest(id=id_))
    assert reply.state == "paused"
    assert await operated.ended(id_) == "finished"


async def test_a_cancelled_run_is_not_continued_by_an_older_copy_of_the_queue(operated):
    id_ = await operated.submit(operated.job())
    await wait_until((operated.runner.runs / id_ / "run.sqlite").exists)
    entry = operated.runner.queue.get(id_)
    operated.runner.cancel(id_)
    await wait_until(lambda: not operated.runner._running)
    operated.runner.queue.mark(entry, "running")
    operated.runner._woken.set()
    assert await operated.ended(id_) == "failed"
    assert "was cancelled, which the queue" in operated.runner.queue.get(id_).reason


async def test_a_paused_job_survives_the_server_and_can_be_cancelled(operated, monkeypatch):
    monkeypatch.setattr(job_queue, "SHORTEST_PAUSE", 300.0)
    id_ = await operated.submit(operated.job("time.join_seconds=0.05"))
    await wait_until(lambda: operated.runner.queue.get(id_).state == "paused")
    before = operated.runner.queue.get(id_)
    await operated.close()
    operated.connections.clear()

    operated.stack = contextlib.AsyncExitStack()
    await operated.listen(queue=True)
    after = operated.runner.queue.get(id_)
    assert (after.state, after.next_try, after.pauses) == ("paused", before.next_try, 1)
    assert operated.runner.cancel(id_) == "cancelled"
    assert operated.runner.queue.get(id_).state == "cancelled"
    with contextlib.closing(Store.open(operated.runner.runs / id_)) as store:
        assert store.status()[0] == "cancelled"  # so that it can be pruned


@pytest.mark.parametrize("killed", [False, True], ids=["recorded", "killed before"])
async def test_a_takeover_is_in_the_runs_that_were_taken_over_and_in_no_later_one(operated, killed):
    """Also if the standby was killed before it wrote that to them: the next server does."""
    operated.gate.set()
    await operated.devices()
    waits = ("federated.cohort=4", "federated.quorum=4", "time.join_seconds=2")
    earlier = await operated.submit(operated.job(*waits, "name=earlier"), "one")
    queue = operated.runner.queue
    await wait_until(lambda: queue.get(earlier).state == "paused")
    operated.runner.leave()
    await wait_until(lambda: not operated.runner._running)
    # The clock of the first machine is an hour ahead, and that of the second behind.
    ahead = Takeover(time.time() + 3600, "process 1 on a", "process 0 on c", "was gone")
    takeover = Takeover(time.time() - 3600, "process 2 on b", "process 1 on a", "was gone")
    before_all = KeptTakeover(ahead, frozenset())
    took = {"takeover": takeover, "earlier": [before_all]}
    if killed:
        took = {"earlier": [before_all, KeptTakeover(takeover, frozenset({earlier}))]}
    observers = operated.runner.observers
    again = runner.JobRunner(operated.link, operated.state, observers, **took)
    with contextlib.closing(again.queue):
        running = asyncio.create_task(again.run())
        later = again.submit(operated.job(*waits, "name=later"), "me", "two", 1.0).id
        await wait_until(lambda: queue.get(later).state == "paused")
        await operated.dial_device("d")  # both begin once more, and end
        await wait_until(lambda: {queue.get(id_).state for id_ in (earlier, later)} == {"finished"})
        again.leave()
        await running
    recorded = {}
    for id_ in (earlier, later):
        with contextlib.closing(Store.open(again.runs / id_)) as store:
            recorded[id_] = [event.by for event in store.events("taken_over")]
    assert recorded == {earlier: ["process 2 on b"], later: []}


def test_pauses_grow_up_to_a_limit_and_begin_anew_after_progress(tmp_path, make_job):
    with contextlib.closing(JobQueue(tmp_path)) as queue:
        entry = queue.submit(make_job(), "me", "one")
        pauses = []
        for _ in range(12):
            entry = queue.pause(entry, "no devices", progressed=False)
            pauses.append(entry.next_try - time.time())
        assert pauses[0] < 5 < pauses[2] < 20 < pauses[-1] <= 600
        assert queue.next() is None
        assert 0 < queue.seconds_until_due() <= 600
        assert queue.pause(entry, "no devices", progressed=True).next_try - time.time() <= 5
        queue.resume(entry)
        assert queue.next().id == entry.id


def test_jobs_that_never_go_on_do_not_starve_later_ones(tmp_path, make_job, monkeypatch):
    now = 1e9
    monkeypatch.setattr(job_queue.time, "time", lambda: now)
    with contextlib.closing(JobQueue(tmp_path)) as queue:
        for key in ("one", "two", "three"):
            queue.submit(make_job(), "me", key)
        ran = []
        while 3 not in ran:
            entry = queue.next()
            ran.append(entry.number)
            queue.mark(entry, "running")
            now += 600  # each waits so long before it is paused
            queue.pause(entry, "no devices", progressed=False)
        assert ran == [1, 2, 3]


def test_a_paused_job_is_due_if_the_clock_was_set_back(tmp_path, make_job, monkeypatch):
    now = 1e9
    monkeypatch.setattr(job_queue.time, "time", lambda: now)
    with contextlib.closing(JobQueue(tmp_path)) as queue:
        queue.pause(queue.submit(make_job(), "me", "one"), "no devices", progressed=False)
        assert queue.next() is None
        now -= 86400
        assert queue.next().number == 1


async def test_a_job_goes_on_when_its_datacenter_can_store_again(operated, monkeypatch):
    monkeypatch.setattr(job_queue, "SHORTEST_PAUSE", 0.01)
    datacenter = SimulatedDatacenter(LAYOUT)
    full = [StorageError("rank 1 could not write a checkpoint: No space left on device")] * 5

    async def respond(participant, request, model):
        if request.WhichOneof("work") == "train_steps" and full:
            raise full.pop()
        return await datacenter.respond(participant, request, model)

    await operated.join("dc", respond, kind="datacenter")
    job = operated.job("strategy.policy=datacenter", "attempts=2")
    id_ = await operated.submit(job)
    reasons = set()
    async for event in operated.runner.events(id_, follow=True):
        if isinstance(event, JobPaused):
            reasons.add(event.reason)
    assert event.state == "finished"
    assert {reason.partition(": ")[2] for reason in reasons} <= {
        "dc: rank 1 could not write a checkpoint: No space left on device"
    }
    assert operated.runner.queue.get(id_).pauses == 2


@pytest.mark.parametrize(
    "full",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EIO, "Input/output error"),
        sqlite3.OperationalError("full"),
    ],
    ids=["full", "failing", "database"],
)
async def test_a_run_continues_when_the_disk_has_space_again(operated, monkeypatch, full):
    if isinstance(full, sqlite3.Error):
        full.sqlite_errorcode = sqlite3.SQLITE_FULL
    tried, commit = [], Store.commit

    def commit_if_there_is_room(store, record, state):
        tried.append(record.round)
        if tried.count(2) in (1, 2):
            raise full
        commit(store, record, state)

    monkeypatch.setattr(Store, "commit", commit_if_there_is_room)
    monkeypatch.setattr(job_queue, "SHORTEST_PAUSE", 0.01)
    operated.gate.set()
    await operated.devices()
    id_ = await operated.submit(operated.job())
    assert await operated.ended(id_) == "finished"
    assert tried == [1, 2, 2, 2]


async def test_a_queue_on_a_failing_disk_is_tried_again(operated, monkeypatch):
    failures, write_head, mark = [], SealedDatabase.write_head, JobQueue.mark

    def write_head_or_fail(database):
        if database is operated.runner.queue._log and len(failures) < 3:
            failures.append("head")
            raise OSError(errno.EIO, "Input/output error")
        write_head(database)

    def mark_or_fail(queue, *arguments):
        if len(failures) < 2:
            failures.append("mark")
            raise OSError(errno.EIO, "Input/output error")
        mark(queue, *arguments)

    monkeypatch.setattr(runner, "_QUEUE_SECONDS", 0.01)
    monkeypatch.setattr(SealedDatabase, "write_head", write_head_or_fail)
    monkeypatch.setattr(JobQueue, "mark", mark_or_fail)
    operated.gate.set()
    await operated.devices()
    assert await operated.ended(await operated.submit(operated.job())) == "finished"
    assert failures == ["head", "mark", "head"]
