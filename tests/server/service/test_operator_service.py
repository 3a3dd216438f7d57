"""The operators' service: submit, list, follow and cancel jobs on a server with a queue."""

import asyncio
import contextlib
import json
import sqlite3
import threading

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner
from tests.server.service.conftest import Device
from tests.server.storage.records import failed_attempt, planned_attempt
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import tls
from isthmus.system.sealed_files import read_sealed, write_sealed
from isthmus.wire import operator_pb2 as pb
from isthmus_server.cli.operators import OperatorClient, jobs
from isthmus_server.cli.server import server
from isthmus_server.rounds.roster import ParticipantRoster
from isthmus_server.runs.jobs import queue as job_queue
from isthmus_server.runs.jobs import runner
from isthmus_server.service import operator_service
from isthmus_server.storage import audit
from isthmus_server.storage.events import JobEnded, RoundAttemptFailed
from isthmus_server.storage.fence import QUEUE
from isthmus_server.storage.store import Store


async def test_the_log_of_a_long_run_is_read_in_small_parts(operated, make_job, monkeypatch):
    """Reading blocks the event loop, which all connections share."""
    entry = operated.runner.queue.submit(make_job(), "me", "long")
    operated.runner.queue.mark(entry, "finished")
    read = []
    at_once = Store.ended_since

    def ended_since(store, number, limit):
        read.append(at_once(store, number, limit))
        return read[-1]

    monkeypatch.setattr(Store, "ended_since", ended_since)
    with contextlib.closing(
        Store.create(operated.state / "runs" / entry.id, entry.job, operated.state)
    ) as store:
        for round_ in range(1, 151):
            store.plan(planned_attempt(round_))
            store.fail(failed_attempt(round_))
    *failed, last = [event async for event in operated.runner.events(entry.id, False)]
    assert [event.record.round for event in failed] == list(range(1, 151))
    assert {type(event) for event in failed} == {RoundAttemptFailed}
    assert last == JobEnded(state="finished", reason="")
    assert max(map(len, read)) < 50


async def test_jobs_run_in_the_order_in_which_they_were_submitted(operated):
    operated.gate.set()
    first = await operated.submit(operated.job(), "one")
    second = await operated.submit(operated.job("name=other"), "two")
    assert (first, second) == ("table-1", "other-2")
    await operated.devices()
    assert [await operated.ended(first), await operated.ended(second)] == ["finished", "finished"]
    reply = await operated.ask("Jobs", pb.JobsReply, pb.JobsRequest())
    assert [(job.round, job.rounds, job.submitted_by) for job in reply.jobs] == [(2, 2, "me")] * 2

    def read():
        return list(
            OperatorClient(operated.me.directory).events(pb.LogsRequest(id=first, follow=True))
        )

    events = await asyncio.to_thread(read)
    assert [event.kind for event in events] == ["committed", "committed", "ended"]
    accepted = json.loads(events[0].data)["record"]["participants"]["accepted"]
    assert accepted == 3


async def test_a_run_that_is_damaged_does_not_hide_the_other_jobs(operated, monkeypatch):
    monkeypatch.setattr(job_queue, "SHORTEST_PAUSE", 300.0)
    id_ = await operated.submit(operated.job("time.join_seconds=0.1"))
    await wait_until(lambda: operated.runner.queue.get(id_).state == "paused")
    for log in (operated.state / "runs" / id_).glob("run.sqlite*"):
        log.write_bytes(b"this is no database, but long enough to look like one" * 100)
    assert await operated.states() == {id_: "paused"}
    sentence = rf"{id_}/run.sqlite is damaged \(file is not a database\); restore it from a backup"
    with pytest.raises(AdmissionRefused, match=sentence):
        await asyncio.to_thread(
            lambda: list(OperatorClient(operated.me.directory).events(pb.LogsRequest(id=id_)))
        )


async def test_queued_and_running_jobs_can_be_cancelled(operated, monkeypatch):
    overs, stop = [], ParticipantRoster.stop

    async def noted(roster, over):
        overs.append(over)
        await stop(roster, over)

    monkeypatch.setattr(ParticipantRoster, "stop", noted)
    await operated.devices()
    running = await operated.submit(operated.job(), "one")
    waiting = await operated.submit(operated.job(), "two")
    last = await operated.submit(operated.job(), "three")
    for id_ in (waiting, running):
        reply = await operated.ask("Cancel", pb.CancelReply, pb.CancelRequest(id=id_))
        assert reply.state == "cancelled"
    operated.gate.set()
    assert await operated.ended(last) == "finished"
    states = await operated.states()
    assert states == {running: "cancelled", waiting: "cancelled", last: "finished"}
    assert overs == [True, True]  # both runs that had begun: nobody goes on with them
    with pytest.raises(AdmissionRefused, match=f"{running} has ended already: cancelled"):
        await operated.ask("Cancel", pb.CancelReply, pb.CancelRequest(id=running))


async def test_what_operators_and_commands_do_is_in_the_audit_log(operated, monkeypatch):
    monkeypatch.setattr(audit, "local_user", lambda: "user root")
    run = CliRunner().invoke
    state = str(operated.state)
    assert run(server, ["token", "create", state, "--name", "phone-0"]).exit_code == 0
    id_ = await operated.submit(operated.job())
    await operated.ask("Cancel", pb.CancelReply, pb.CancelRequest(id=id_))
    assert run(server, ["revoke", state, "me"]).exit_code == 0
    found = [(entry.by, entry.action, entry.details) for entry in audit.read(operated.state)]
    for _, _, details in found[:3]:
        assert len(details.pop("token")) == 64
    for _, _, details in (found[0], found[2]):
        assert details.pop("expires").endswith(" UTC")
    identity = operated.me.identity_public.hex()
    run_id = operated.runner.queue.get(id_).run_id
    assert found[0][1:] == ("token", {"name": "me", "kind": "operator"})
    assert found[1:] == [
        ("me", "join", {"kind": "operator", "identity": identity}),
        ("user root", "token", {"name": "phone-0", "kind": "client"}),
        ("operator me", "submit", {"job": id_, "run": run_id, "share": "1"}),
        ("operator me", "cancel", {"job": id_}),
        ("user root", "revoke", {"name": "me"}),
    ]
    printed = run(server, ["audit", state]).output
    assert f" UTC  operator me  submit  job={id_} run={run_id} share=1\n" in printed
    assert "6 records, unbroken; the last one is " in printed


async def test_the_latest_ended_jobs_are_listed(operated):
    ids = [await operated.submit(operated.job(), str(number)) for number in range(5)]
    for id_ in ids[:4]:
        await operated.ask("Cancel", pb.CancelReply, pb.CancelRequest(id=id_))
    listed = {}
    for ended in (None, 0, 2, 1000):
        reply = await operated.ask("Jobs", pb.JobsReply, pb.JobsRequest(ended=ended))
        listed[ended] = [job.id for job in reply.jobs]
    assert listed == {None: ids, 0: ids[4:], 2: ids[2:], 1000: ids}


@pytest.mark.parametrize(
    ("more", "said"),
    [([], "nothing has been submitted yet"), (["--ended", "0"], "no job is running or queued")],
)
async def test_an_empty_list_of_jobs_has_an_explanation(operated, more, said):
    words = ["--state", str(operated.me.directory), *more]
    shown = await asyncio.to_thread(CliRunner().invoke, jobs, words)
    assert shown.output.strip() == said


async def test_a_confirmed_cancellation_survives_later_events(operated):
    await operated.devices()
    running = await operated.submit(operated.job())
    await wait_until(lambda: operated.runner._running)
    operated.runner.cancel(running)
    assert operated.runner.queue.get(running).state == "cancelled"  # before its run has been ended
    with pytest.raises(AdmissionRefused, match=f"{running} has ended already: cancelled"):
        operated.runner.cancel(running)
    serving = operated.connections[0]
    serving.cancel()
    await asyncio.wait([serving])
    assert serving.cancelled()


async def test_the_queue_and_the_run_survive_the_server(operated, tmp_path):
    await operated.devices()
    first = await operated.submit(operated.job("rounds=1"), "one")
    second = await operated.submit(operated.job("rounds=1"), "two")
    await wait_until(lambda: operated.runner.queue.get(first).state == "running")
    await operated.close()  # all of it, as when the process is told to stop
    operated.connections.clear()

    operated.stack = contextlib.AsyncExitStack()
    await operated.listen(queue=True)
    assert operated.runner.queue.get(first).state == "running"
    assert operated.runner.queue.get(second).state == "queued"
    operated.gate.set()
    await wait_until(lambda: operated.runner._running)
    for name in "xyz":
        member = await operated.member(name)
        operated.dial(member, Device(name, operated.state / "tasks", operated.gate))
    assert [await operated.ended(first), await operated.ended(second)] == ["finished", "finished"]


async def test_a_repeated_submission_is_queued_once(operated):
    ids = {await operated.submit(operated.job(), "same") for _ in range(3)}
    assert ids == {"table-1"}
    assert len(await operated.states()) == 1


async def test_a_command_with_a_lost_reply_queues_its_job_once(operated, monkeypatch):
    real, lost = operated.runner.submit, []

    def submit(*asked):
        entry = real(*asked)
        if len(lost) < 1:
            lost.append(entry.id)
            raise AdmissionRefused("lost on the way")
        return entry

    async def lose(context, error):
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    monkeypatch.setattr(operated.runner, "submit", submit)
    monkeypatch.setattr("isthmus_server.service.operator_service._refuse", lose)
    server = await asyncio.to_thread(OperatorClient, operated.me.directory)
    assert await asyncio.to_thread(server.submit, operated.job()) == lost[0] == "table-1"
    assert len(await operated.states()) == 1


async def test_a_submission_without_a_reply_may_have_been_queued(operated, monkeypatch):
    monkeypatch.setattr("isthmus_server.cli.operators._RETRY_SECONDS", 0.1)
    server = await asyncio.to_thread(OperatorClient, operated.me.directory)
    await operated.close()
    sentence = (
        r"^the server at .* did not answer in time; it may have the job: see `isthmus jobs` be"
    )
    with pytest.raises(AdmissionRefused, match=sentence):
        await asyncio.to_thread(server.submit, operated.job())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("task.source=../task.py:Learn", "is not a file in .* its owner allows; put it there$"),
        ("task.source=statistics:Learn", "is not a file in"),
        (
            "task.data=../../secrets",
            "is not below .*; put the data there, and name it from there on",
        ),
        (f"model={{start='../weights',sha256='{'0' * 64}'}}", "model.start='../weights' is not be"),
        ("federated.clients=8", "add --set federated.clients=0"),
        ("strategy.policy=nope", "strategy.policy='nope' is unknown; choose one of adaptive, "),
        ("strategy.settings={a=1}", "unknown key strategy.settings.a"),
        ("strategy.policy=sys:exit", "strategy.policy='sys:exit' is not in the task's folder"),
        ("strategy.policy=policies.mine:Mine", "is not in the task's folder"),
        (
            "federated={secure_aggregation=false,flower={strategy={name='FedAvg',"
            "inner={name='antigravity:Fly'}}}}",
            "federated.flower.strategy.inner.name='antigravity:Fly' is not in the task's",
        ),
        ("time.lease_seconds=30", "one lease for all jobs: add --set time.lease_seconds=10"),
        (
            "privacy={mechanism='gaussian',epsilon=8,delta=1e-5,noise=0.1}",
            "privacy.noise=0.1 is too little",
        ),
    ],
)
async def test_a_job_that_cannot_run_on_the_server_is_refused_at_submission(
    operated, change, sentence
):
    with pytest.raises(AdmissionRefused, match=sentence):
        await operated.submit(operated.job(change))
    assert await operated.states() == {}


async def test_a_job_that_cannot_be_read_is_refused(operated):
    too_long = operated.job().model_dump_json() + " " * operator_service.MAX_JOB
    for asked in (
        pb.SubmitRequest(job="{", key="one"),
        pb.SubmitRequest(job=operated.job().model_dump_json()),
        pb.SubmitRequest(job='{"name": "later", "from_the_future": 1}', key="one"),
        pb.SubmitRequest(job=too_long, key="one"),
    ):
        with pytest.raises(
            AdmissionRefused, match=r"cannot read the job|needs a key|is larger than 65536"
        ):
            await operated.ask("Submit", pb.SubmitReply, asked)


@pytest.mark.parametrize("kind", ["client", "datacenter"])
async def test_a_participant_cannot_act_as_an_operator(operated, kind):
    other = await operated.member("other", kind=kind)
    with pytest.raises(UserError, match=f"is the membership of a {kind}, not an operator's"):
        OperatorClient(other.directory)
    about = other.directory / "member.json"
    write_sealed(about, {**read_sealed(about), "kind": "operator"})
    for method, asked in (
        ("Submit", pb.SubmitRequest(job=operated.job().model_dump_json(), key="one")),
        ("Jobs", pb.JobsRequest()),
        ("Cancel", pb.CancelRequest(id="table-1")),
        ("Renew", pb.RenewRequest()),
    ):
        with pytest.raises(AdmissionRefused, match=f"'other' is a {kind}, not an operator"):
            await operated.ask(method, pb.SubmitReply, asked, other)
    with pytest.raises(AdmissionRefused, match=f"'other' is a {kind}, not an operator"):
        await asyncio.to_thread(
            lambda: list(OperatorClient(other.directory).events(pb.LogsRequest(id="table-1")))
        )


@pytest.mark.parametrize("method", ["Submit", "Logs"])
async def test_a_call_without_a_request_is_ended(operated, monkeypatch, method):
    monkeypatch.setattr(operator_service, "HELLO_SECONDS", 0.1)
    said = {}
    for member in (operated.me, await operated.member("phone-0")):
        credentials = member.channel_credentials()
        async with grpc.aio.secure_channel(operated.address, credentials) as channel:
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


async def test_a_revoked_operator_is_refused(operated):
    await operated.submit(operated.job())
    following = asyncio.to_thread(
        lambda: list(
            OperatorClient(operated.me.directory).events(pb.LogsRequest(id="table-1", follow=True))
        )
    )
    following = asyncio.create_task(following)
    operated.registry().revoke("me")
    with pytest.raises(AdmissionRefused, match="'me' has been revoked"):
        await operated.states()
    with pytest.raises(AdmissionRefused, match="'me' has been revoked"):
        await following


async def test_following_a_log_ends_with_an_error_when_the_server_stops(operated):
    id_ = await operated.submit(operated.job())
    asked = pb.LogsRequest(id=id_, follow=True)
    following = asyncio.create_task(
        asyncio.to_thread(lambda: list(OperatorClient(operated.me.directory).events(asked)))
    )
    await wait_until(lambda: operated.control._calls)
    await operated.close()
    with pytest.raises(AdmissionRefused, match=r"localhost:\d+ cannot be reached: it was stopped$"):
        await following


async def test_a_server_that_is_down_has_the_sentence_of_every_command(operated):
    await operated.close()
    sentence = r"nothing listens there \(connection refused\); check that the server runs, and the "
    with pytest.raises(AdmissionRefused, match=sentence + "firewalls between$"):
        await operated.states()


async def test_an_operator_s_certificate_is_renewed_by_the_next_command(operated, monkeypatch):
    before = operated.me.certificate.serial_number
    await operated.states()
    monkeypatch.setattr("isthmus.identity.membership.RENEW_AT", 0.0)
    server = await asyncio.to_thread(OperatorClient, operated.me.directory)
    assert server.member.certificate.serial_number != before
    assert await operated.states() == {}


async def test_a_check_that_takes_long_keeps_nobody_waiting(operated, monkeypatch):
    """The noise of a privacy budget may take half a minute of the processor."""
    begun = threading.Event()
    goes_on = threading.Event()

    def slow(*arguments):
        begun.set()
        assert goes_on.wait(50)

    monkeypatch.setattr(runner, "check_job", slow)
    submitting = asyncio.create_task(operated.submit(operated.job()))
    try:
        await asyncio.to_thread(begun.wait)
        assert await operated.states() == {}
    finally:
        goes_on.set()
    assert await submitting == "table-1"


async def test_an_action_is_recorded_though_its_caller_is_gone(operated, monkeypatch):
    record = audit.record
    begun = threading.Event()
    goes_on = threading.Event()

    def slow(*arguments, **details):
        begun.set()
        assert goes_on.wait(50)
        record(*arguments, **details)

    monkeypatch.setattr(audit, "record", slow)
    service = operator_service.OperatorService(operated.server.members, operated.runner)
    subject = tls.Subject("operator", "me", bytes(32), "01", 0.0)
    recording = asyncio.create_task(service._record("cancel", subject, job="table-1"))
    await asyncio.to_thread(begun.wait)
    recording.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await recording
    *_, entry = audit.read(operated.server.members.directory)
    assert (entry.action, entry.details["job"]) == ("cancel", "table-1")


async def test_a_server_that_has_been_replaced_tells_an_operator_so(operated):
    """A balancer may still pass calls on to it in the moment before it ends."""
    with contextlib.closing(sqlite3.connect(operated.state / QUEUE)) as queue:
        queue.execute("PRAGMA application_id=7")
    with pytest.raises(
        AdmissionRefused, match="cannot be reached: another server has taken over from this one"
    ):
        await operated.submit(operated.job(), "one")
    with contextlib.closing(sqlite3.connect(operated.state / QUEUE)) as queue:
        assert queue.execute("SELECT COUNT(*) FROM jobs").fetchone() == (0,)
