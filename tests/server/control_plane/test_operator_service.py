"""A server with a queue of jobs, and operators who use it from elsewhere."""

import asyncio
import contextlib
import errno
import json
import sqlite3

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner
from tests.conftest import TABLE
from tests.server.storage.records import failed_attempt, planned_attempt

from isthmus.errors import AdmissionRefused, UserError
from isthmus.task import Participant
from isthmus.wire import operator_pb2 as pb
from isthmus_clients.device.agent import Agent
from isthmus_server.control_plane import job_runner, operator_service
from isthmus_server.control_plane.operator_commands import OperatorClient, jobs
from isthmus_server.rounds.roster import Roster
from isthmus_server.storage.events import JobEnded, RoundAttemptFailed
from isthmus_server.storage.store import Store


class Device(Agent):
    """A real device that stops in the middle of a round while the gate is shut."""

    def __init__(self, name, tasks, gate):
        super().__init__(Participant(name=name, regime="federated"), None, tasks=tasks)
        self.gate = gate

    async def work(self, request, model, progress):
        if request.WhichOneof("work") == "train_local":
            await self.gate.wait()
        return await super().work(request, model, progress)


@pytest.fixture
async def place(fleet, make_job):
    """A listening server with a queue, an operator, and devices for jobs of three."""
    tasks = fleet.state / "tasks"
    tasks.mkdir()
    (tasks / "task.py").write_text(TABLE + "    pass\n")
    fleet.gate = asyncio.Event()
    await fleet.listen(queue=True)
    fleet.me = await fleet.member("me", kind="operator")
    usual = ("federated.cohort=3", "rounds=2", "strategy.policy=federated", "time.join_seconds=300")
    fleet.job = lambda *more: make_job(*usual, *more)

    async def devices():
        for name in "abc":
            member = await fleet.member(name)
            fleet.dial(member, Device(name, tasks, fleet.gate))
        await fleet.until(lambda: set("abc") <= fleet.link.peers.keys())

    async def ask(method, reply, asked, member=None):
        """As a command does it, in a process of its own."""
        directory = (member or fleet.me).directory
        return await asyncio.to_thread(lambda: OperatorClient(directory).call(method, asked, reply))

    async def submit(job, key="one"):
        asked = pb.SubmitRequest(job=job.model_dump_json(), key=key)
        return (await ask("Submit", pb.SubmitReply, asked)).id

    async def states():
        reply = await ask("Jobs", pb.JobsReply, pb.JobsRequest())
        return {job.id: job.state for job in reply.jobs}

    async def ended(id_):
        async for event in fleet.runner.events(id_, follow=True):
            last = event
        return last.state

    fleet.devices, fleet.ask, fleet.submit = devices, ask, submit
    fleet.states, fleet.ended = states, ended
    return fleet


async def test_the_log_of_a_long_run_is_read_a_few_rounds_at_a_time(place, make_job, monkeypatch):
    """The link has nothing else to do it with: what is read at once, all others wait for."""
    entry = place.runner.queue.submit(make_job(), "me", "long")
    place.runner.queue.mark(entry, "finished")
    read = []
    at_once = Store.ended_since

    def ended_since(store, number, limit):
        read.append(at_once(store, number, limit))
        return read[-1]

    monkeypatch.setattr(Store, "ended_since", ended_since)
    with contextlib.closing(
        Store.create(place.state / "runs" / entry.id, entry.job, place.state)
    ) as store:
        for round_ in range(1, 151):
            store.plan(planned_attempt(round_))
            store.fail(failed_attempt(round_))
    *failed, last = [event async for event in place.runner.events(entry.id, False)]
    assert [event.record.round for event in failed] == list(range(1, 151))
    assert {type(event) for event in failed} == {RoundAttemptFailed}
    assert last == JobEnded(state="finished", reason="")
    assert max(map(len, read)) < 50


async def test_jobs_run_in_the_order_in_which_they_were_submitted(place):
    place.gate.set()
    first = await place.submit(place.job(), "one")
    second = await place.submit(place.job("name=other"), "two")
    assert (first, second) == ("table-1", "other-2")
    await place.devices()
    assert [await place.ended(first), await place.ended(second)] == ["finished", "finished"]
    reply = await place.ask("Jobs", pb.JobsReply, pb.JobsRequest())
    assert [(job.round, job.rounds, job.submitted_by) for job in reply.jobs] == [(2, 2, "me")] * 2

    def read():
        return list(
            OperatorClient(place.me.directory).events(pb.LogsRequest(id=first, follow=True))
        )

    events = await asyncio.to_thread(read)
    assert [event.kind for event in events] == ["committed", "committed", "ended"]
    accepted = json.loads(events[0].data)["record"]["participants"]["accepted"]
    assert accepted == 3


async def test_a_job_that_fails_says_why_and_the_next_one_runs(place):
    place.gate.set()
    await place.devices()
    failing = await place.submit(place.job("federated.cohort=9", "time.join_seconds=0.5"), "one")
    second = await place.submit(place.job(), "two")
    assert await place.ended(failing) == "failed"
    assert await place.ended(second) == "finished"
    reply = await place.ask("Jobs", pb.JobsReply, pb.JobsRequest())
    assert "edge clients are ready and a federated round needs 7" in reply.jobs[0].reason


async def test_a_run_that_is_damaged_does_not_hide_the_other_jobs(place):
    id_ = await place.submit(place.job("time.join_seconds=0.1"))
    assert await place.ended(id_) == "failed"
    for log in (place.state / "runs" / id_).glob("run.sqlite*"):
        log.write_bytes(b"this is no database, but long enough to look like one" * 100)
    assert await place.states() == {id_: "failed"}
    with pytest.raises(
        AdmissionRefused, match=f"the run in .*{id_} cannot be read: file is not a database"
    ):
        await asyncio.to_thread(
            lambda: list(OperatorClient(place.me.directory).events(pb.LogsRequest(id=id_)))
        )


@pytest.mark.parametrize(
    "full",
    [OSError(errno.ENOSPC, "No space left on device"), sqlite3.OperationalError("full")],
    ids=["file", "database"],
)
async def test_a_run_goes_on_when_the_disk_has_room_again(place, monkeypatch, full):
    if isinstance(full, sqlite3.Error):
        full.sqlite_errorcode = sqlite3.SQLITE_FULL
    tried, commit = [], Store.commit

    def commit_if_there_is_room(store, record, state):
        tried.append(record.round)
        if tried.count(2) in (1, 2):
            raise full
        commit(store, record, state)

    monkeypatch.setattr(Store, "commit", commit_if_there_is_room)
    monkeypatch.setattr(job_runner, "_FULL_SECONDS", 0.01)
    place.gate.set()
    await place.devices()
    id_ = await place.submit(place.job())
    assert await place.ended(id_) == "finished"
    assert tried == [1, 2, 2, 2]


async def test_a_job_that_waits_and_one_that_runs_can_be_cancelled(place, monkeypatch):
    overs, stop = [], Roster.stop

    async def noted(roster, over):
        overs.append(over)
        await stop(roster, over)

    monkeypatch.setattr(Roster, "stop", noted)
    await place.devices()
    running = await place.submit(place.job(), "one")
    waiting = await place.submit(place.job(), "two")
    last = await place.submit(place.job(), "three")
    for id_ in (waiting, running):
        reply = await place.ask("Cancel", pb.CancelReply, pb.CancelRequest(id=id_))
        assert reply.state == "cancelled"
    place.gate.set()
    assert await place.ended(last) == "finished"
    states = await place.states()
    assert states == {running: "cancelled", waiting: "cancelled", last: "finished"}
    assert overs == [True, True]  # both runs that had begun: nobody goes on with them
    with pytest.raises(AdmissionRefused, match=f"{running} has ended already: cancelled"):
        await place.ask("Cancel", pb.CancelReply, pb.CancelRequest(id=running))


async def test_of_the_jobs_that_have_ended_the_latest_are_listed(place):
    ids = [await place.submit(place.job(), str(number)) for number in range(5)]
    for id_ in ids[:4]:
        await place.ask("Cancel", pb.CancelReply, pb.CancelRequest(id=id_))
    listed = {}
    for ended in (None, 0, 2, 1000):
        reply = await place.ask("Jobs", pb.JobsReply, pb.JobsRequest(ended=ended))
        listed[ended] = [job.id for job in reply.jobs]
    assert listed == {None: ids, 0: ids[4:], 2: ids[2:], 1000: ids}


@pytest.mark.parametrize(
    ("more", "said"),
    [([], "nothing has been submitted yet"), (["--ended", "0"], "no job runs or waits")],
)
async def test_an_empty_list_of_jobs_says_of_what(place, more, said):
    words = ["--state", str(place.me.directory), *more]
    shown = await asyncio.to_thread(CliRunner().invoke, jobs, words)
    assert shown.output.strip() == said


async def test_who_was_told_that_a_job_is_cancelled_is_right_whatever_happens_next(place):
    await place.devices()
    running = await place.submit(place.job())
    await place.until(lambda: place.runner._running is not None)
    place.runner.cancel(running)
    assert place.runner.queue.get(running).state == "cancelled"  # before its run has been ended
    with pytest.raises(AdmissionRefused, match=f"{running} has ended already: cancelled"):
        place.runner.cancel(running)
    serving = place.guests[0]
    serving.cancel()
    await asyncio.wait([serving])
    assert serving.cancelled()


async def test_the_queue_and_the_run_survive_the_server(place, tmp_path):
    await place.devices()
    first = await place.submit(place.job("rounds=1"), "one")
    second = await place.submit(place.job("rounds=1"), "two")
    await place.until(lambda: place.runner.queue.get(first).state == "running")
    await place.close()  # all of it, as when the process is told to stop
    place.guests.clear()

    place.stack = contextlib.AsyncExitStack()
    await place.listen(queue=True)
    assert place.runner.queue.get(first).state == "running"
    assert place.runner.queue.get(second).state == "queued"
    place.gate.set()
    await place.until(lambda: place.runner._running is not None)
    for name in "xyz":
        member = await place.member(name)
        place.dial(member, Device(name, place.state / "tasks", place.gate))
    assert [await place.ended(first), await place.ended(second)] == ["finished", "finished"]


async def test_a_submission_that_is_sent_again_counts_once(place):
    ids = {await place.submit(place.job(), "same") for _ in range(3)}
    assert ids == {"table-1"}
    assert len(await place.states()) == 1


async def test_a_command_whose_answer_is_lost_queues_its_job_once(place, monkeypatch):
    real, lost = place.runner.submit, []

    def submit(*asked):
        entry = real(*asked)
        if len(lost) < 1:
            lost.append(entry.id)
            raise AdmissionRefused("lost on the way")
        return entry

    async def lose(context, error):
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    monkeypatch.setattr(place.runner, "submit", submit)
    monkeypatch.setattr("isthmus_server.control_plane.operator_service._refuse", lose)
    server = await asyncio.to_thread(OperatorClient, place.me.directory)
    assert await asyncio.to_thread(server.submit, place.job()) == lost[0] == "table-1"
    assert len(await place.states()) == 1


async def test_a_submission_that_nobody_answers_says_that_it_may_have_come(place, monkeypatch):
    monkeypatch.setattr("isthmus_server.control_plane.operator_commands._RETRY_SECONDS", 0.1)
    server = await asyncio.to_thread(OperatorClient, place.me.directory)
    await place.close()
    sentence = (
        r"^the server at .* did not answer in time; it may have the job: see `isthmus jobs` be"
    )
    with pytest.raises(AdmissionRefused, match=sentence):
        await asyncio.to_thread(server.submit, place.job())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("task.source=../task.py:Learn", "is not a file in .* its owner allows; put it there$"),
        ("task.source=statistics:Learn", "is not a file in"),
        ("task.data=../../secrets", "is not below"),
        ("federated.clients=8", "add --set federated.clients=0"),
        ("strategy.policy=nope", "strategy.policy='nope' is not known; there are adaptive, "),
        ("strategy.settings={a=1}", "unknown key strategy.settings.a"),
        ("strategy.policy=sys:exit", "strategy.policy='sys:exit' is not a file beside the task"),
        ("strategy.policy=policies.mine:Mine", "is not a file beside the task"),
        (
            "federated={secure_aggregation=false,flower={strategy={name='FedAvg',"
            "inner={name='antigravity:Fly'}}}}",
            "federated.flower.strategy.inner.name='antigravity:Fly' is not a file beside",
        ),
        ("time.lease_seconds=30", "one lease for all jobs: add --set time.lease_seconds=10"),
    ],
)
async def test_a_job_that_could_not_run_here_is_refused_when_it_is_submitted(
    place, change, sentence
):
    with pytest.raises(AdmissionRefused, match=sentence):
        await place.submit(place.job(change))
    assert await place.states() == {}


async def test_a_job_that_cannot_be_read_is_refused(place):
    too_long = place.job().model_dump_json() + " " * operator_service.MAX_JOB
    for asked in (
        pb.SubmitRequest(job="{", key="one"),
        pb.SubmitRequest(job=place.job().model_dump_json()),
        pb.SubmitRequest(job='{"name": "later", "from_the_future": 1}', key="one"),
        pb.SubmitRequest(job=too_long, key="one"),
    ):
        with pytest.raises(
            AdmissionRefused, match=r"cannot be read here|needs a key|is larger than 65536"
        ):
            await place.ask("Submit", pb.SubmitReply, asked)


@pytest.mark.parametrize("kind", ["client", "datacenter"])
async def test_a_participant_does_not_act_as_an_operator(place, kind):
    other = await place.member("other", kind=kind)
    with pytest.raises(UserError, match=f"is the membership of a {kind}, not an operator's"):
        OperatorClient(other.directory)
    (other.directory / "member.json").write_text(
        (other.directory / "member.json").read_text().replace(f'"{kind}"', '"operator"')
    )
    for method, asked in (
        ("Submit", pb.SubmitRequest(job=place.job().model_dump_json(), key="one")),
        ("Jobs", pb.JobsRequest()),
        ("Cancel", pb.CancelRequest(id="table-1")),
        ("Renew", pb.RenewRequest()),
    ):
        with pytest.raises(AdmissionRefused, match=f"'other' is a {kind}, not an operator"):
            await place.ask(method, pb.SubmitReply, asked, other)
    with pytest.raises(AdmissionRefused, match=f"'other' is a {kind}, not an operator"):
        await asyncio.to_thread(
            lambda: list(OperatorClient(other.directory).events(pb.LogsRequest(id="table-1")))
        )


@pytest.mark.parametrize("method", ["Submit", "Logs"])
async def test_a_call_without_a_request_is_not_waited_for(place, monkeypatch, method):
    monkeypatch.setattr(operator_service, "HELLO_SECONDS", 0.1)
    said = {}
    for member in (place.me, await place.member("phone-0")):
        credentials = member.channel_credentials()
        async with grpc.aio.secure_channel(place.address, credentials) as channel:
            call = channel.stream_unary(f"/{operator_service.SERVICE}/{method}")()
            async with asyncio.timeout(100):
                said[member.name] = (await call.code(), await call.details())
    assert said == {
        "me": (grpc.StatusCode.FAILED_PRECONDITION, "a call without a request"),
        "phone-0": (
            grpc.StatusCode.PERMISSION_DENIED,
            "'phone-0' is a client, not an operator",
        ),
    }


async def test_an_operator_who_is_revoked_is_not_heard_any_more(place):
    await place.submit(place.job())
    following = asyncio.to_thread(
        lambda: list(
            OperatorClient(place.me.directory).events(pb.LogsRequest(id="table-1", follow=True))
        )
    )
    following = asyncio.create_task(following)
    place.registry().revoke("me")
    with pytest.raises(AdmissionRefused, match="'me' has been revoked"):
        await place.states()
    with pytest.raises(AdmissionRefused, match="'me' has been revoked"):
        await following


async def test_who_follows_a_log_is_told_that_the_server_was_stopped(place):
    id_ = await place.submit(place.job())
    asked = pb.LogsRequest(id=id_, follow=True)
    following = asyncio.create_task(
        asyncio.to_thread(lambda: list(OperatorClient(place.me.directory).events(asked)))
    )
    await place.until(lambda: place.control._calls)
    await place.close()
    with pytest.raises(AdmissionRefused, match=r"localhost:\d+ is not there now: it was stopped$"):
        await following


async def test_an_operator_s_certificate_is_renewed_when_a_command_is_typed(place, monkeypatch):
    before = place.me.certificate.serial_number
    await place.states()
    monkeypatch.setattr("isthmus.identity.membership.RENEW_AT", 0.0)
    server = await asyncio.to_thread(OperatorClient, place.me.directory)
    assert server.member.certificate.serial_number != before
    assert await place.states() == {}
