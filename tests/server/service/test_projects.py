"""Projects of a server: whose jobs a participant works for, and which ones an operator sees."""

import asyncio
import contextlib

import pytest
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused, UserError
from isthmus.identity import tls
from isthmus.wire import operator_pb2 as pb
from isthmus_server.cli.operators import OperatorClient
from isthmus_server.read.report.report import read_report
from isthmus_server.runs.jobs.projects import FILE, Projects
from isthmus_server.service.operator_service import ObservedServer
from isthmus_server.storage.store import Store

TABLE = """
[vision]
participants = ["a", "b"]
operators = ["me"]

[speech]
participants = ["c"]
operators = ["bob"]
"""


def read(folder, text):
    (folder / FILE).write_text(text)
    return Projects.load(folder)


def test_participants_of_no_project_work_for_all_jobs(tmp_path):
    projects = read(tmp_path, '[vision]\nparticipants = ["phone-*"]\n[speech]')
    assert [projects.may_work("phone-1", each) for each in ("vision", "speech", "")] == [
        *(True, False),
        False,
    ]
    assert all(projects.may_work("tablet", each) for each in ("vision", "speech", ""))
    assert not Projects.load(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[vision", "is not valid TOML"),
        (
            "[vision]\nparticipant = ['a']",
            "unknown key vision.participant;",
        ),
        ("[vision]\nparticipants = 'a'", r"vision\.participants"),
        ("['vi sion']", "vi sion"),
    ],
)
def test_an_invalid_file_is_refused_with_the_key(text, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        read(tmp_path, text)


@pytest.mark.parametrize("at_once", [1, 2])
async def test_a_job_is_trained_by_its_project_and_seen_by_its_operators(operated, at_once):
    runner, registry = operated.runner, operated.server.members.registry
    runner.projects = read(operated.state, TABLE)
    runner._at_once = at_once
    operated.gate.set()
    await operated.devices()
    await operated.dial_device("tablet")  # of no project
    await wait_until(lambda: "tablet" in operated.link.peers)
    id_ = await operated.submit(operated.job())
    assert await operated.ended(id_) == "finished"
    with contextlib.closing(Store.open(runner.runs / id_)) as store:
        rounds = read_report(store).rounds
    taken = {receipt.participant for each in rounds for receipt in each.receipts}
    assert taken == {"a", "b", "tablet"}

    async def ask(method, member, reply, request):
        return await operated.ask(method, reply, request, member)

    for name, ids in (("bob", []), ("root", [id_])):
        member = await operated.member(name, kind="operator")
        jobs = await ask("Jobs", member, pb.JobsReply, pb.JobsRequest())
        assert [(job.id, job.project) for job in jobs.jobs] == [(each, "vision") for each in ids]
        subject = tls.subject_of(member.certificate)
        registry.check(subject)
        seen = ObservedServer(operated.server, runner).registered(subject)
        if ids:
            await seen
            continue
        with pytest.raises(
            AdmissionRefused, match="is an operator of projects, and this shows all"
        ):
            await seen
        for method, reply, request in (
            ("Cancel", pb.CancelReply, pb.CancelRequest(id=id_)),
            ("Pause", pb.PauseReply, pb.PauseRequest(id=id_)),
            ("Resume", pb.ResumeReply, pb.ResumeRequest(id=id_)),
        ):
            with pytest.raises(AdmissionRefused, match=f"there is no job '{id_}'"):
                await ask(method, member, reply, request)
        text = operated.job().model_dump_json()
        for project, sentence in (
            ("vision", "there is no project 'vision' for 'bob'"),
            ("x", "'x'"),
        ):
            request = pb.SubmitRequest(job=text, key=project, project=project)
            with pytest.raises(AdmissionRefused, match=sentence):
                await ask("Submit", member, pb.SubmitReply, request)


async def test_a_job_of_another_project_is_not_named(operated):
    """A device of no project works for one of them, and the other waits for it."""
    runner = operated.runner
    runner.projects = read(operated.state, TABLE)
    runner._at_once = 2
    bob, root = [await operated.member(name, kind="operator") for name in ("bob", "root")]
    await operated.devices()
    await operated.dial_device("tablet")
    await wait_until(lambda: "tablet" in operated.link.peers)
    first = await operated.submit(operated.job())
    await wait_until(lambda: runner._shared.turns.holder("tablet"))
    asked = pb.SubmitRequest(
        job=operated.job("federated.cohort=2").model_dump_json(), key="b", project="speech"
    )
    second = (await operated.ask("Submit", pb.SubmitReply, asked, bob)).id

    async def reason(member):
        jobs = (await operated.ask("Jobs", pb.JobsReply, pb.JobsRequest(), member)).jobs
        return {job.id: job.reason for job in jobs}[second]

    await wait_until(lambda: second in runner.waiting() and "turn" in runner.waiting()[second])
    waiting = "waiting for its turn: its participants work for "
    assert await reason(bob) == f"{waiting}jobs of other projects"
    assert await reason(root) == f"{waiting}{first}"
    operated.gate.set()
    assert await operated.ended(first) == await operated.ended(second) == "finished"


async def test_logs_and_results_of_other_projects_are_refused(operated):
    operated.runner.projects = read(operated.state, TABLE)
    id_ = await operated.submit(operated.job())
    bob = await operated.member("bob", kind="operator")

    def read_logs():
        return list(OperatorClient(bob.directory).events(pb.LogsRequest(id=id_)))

    def fetch():
        OperatorClient(bob.directory).fetch(id_, "report", operated.folder / "report", 1 << 20)

    for call in (read_logs, fetch):
        with pytest.raises(AdmissionRefused, match=f"there is no job '{id_}'"):
            await asyncio.to_thread(call)
