"""Several jobs at once: their rounds take turns with four devices and one datacenter.

Each round needs all devices, so that the jobs compete for them, however many there are.
"""

import asyncio

import pytest
from tests.server.deployment import SimulatedDatacenter
from tests.server.scripted_participant import ScriptedParticipant
from tests.server.waiting import wait_until

from isthmus.errors import ParticipantLost, TaskError
from isthmus.wire import link_pb2
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.attempt_log import AttemptLog
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import EventStream, RoundCommitted
from isthmus_server.transport.job_link import JobLink, SharedLink
from isthmus_server.transport.turns import Turns

NAMES = tuple("abcd")
PLAIN = "federated.secure_aggregation=false"
ALL = ("federated.cohort=4", "federated.quorum=4", "datacenter.ranks=1")


class Datacenter:
    """A datacenter that has one run open at a time, and the state of each on its disk."""

    def __init__(self):
        self.runs = {}
        self.open = None
        self.opened = 0

    async def respond(self, participant, request, model):
        kind = request.WhichOneof("work")
        run_id = getattr(request, kind).run_id
        if kind == "open":
            self.open = run_id
            self.opened += 1
        elif run_id != self.open and kind != "close":
            raise TaskError(f"the run {run_id!r} is not open here")
        return await self.runs[run_id].respond(participant, request, model)


@pytest.fixture
async def fleet(deployment, network):
    """Four devices and a datacenter, with helpers to run jobs alone and together."""
    await deployment.start(names=NAMES)
    deployment.datacenter = Datacenter()
    await network.join("dc", deployment.datacenter.respond, role=link_pb2.DATACENTER)
    shared = deployment.shared = SharedLink(deployment.link)

    def coordinator(name, *overrides, share=None, watch=None):
        store = deployment.create_run(name, *ALL, *overrides, "federated.clients=4")
        events = EventStream()
        if watch is not None:
            events.subscribe(watch)
        link = deployment.link if share is None else JobLink(shared, name, share)
        built = Coordinator(RunParts.of(store, link, events))
        deployment.datacenter.runs[store.run_id] = SimulatedDatacenter(built.model.layout)
        return built

    deployment.coordinator = coordinator
    return deployment


async def run(coordinator):
    final = await coordinator.run()
    if isinstance(coordinator.parts.link, JobLink):
        coordinator.parts.link.end()
    return final.model_sha256


KINDS = {
    "secure": ("rounds=3",),
    "plain": (PLAIN, "rounds=3", "seed=2"),
    "hybrid": (
        PLAIN,
        "rounds=4",
        "seed=3",
        "strategy.policy=schedule",
        'strategy.schedule=[{regime="datacenter",rounds=1},{regime="hybrid",rounds=1}]',
    ),
}


async def test_each_job_has_the_bytes_that_it_has_alone_and_a_killed_one_disturbs_nobody(fleet):
    alone = {
        name: await run(fleet.coordinator(f"{name}-alone", *kind)) for name, kind in KINDS.items()
    }
    assert len(set(alone.values())) == 3
    opened = fleet.datacenter.opened

    def kill_in_round_two(event):
        if isinstance(event, RoundCommitted) and event.record.round == 2:
            killed.cancel()

    jobs = {
        name: asyncio.create_task(run(fleet.coordinator(name, *kind, share=share)))
        for share, (name, kind) in enumerate(KINDS.items(), start=1)
    }
    victim = fleet.coordinator("victim", "rounds=9", share=1.0, watch=kill_in_round_two)
    killed = asyncio.create_task(run(victim))
    assert {name: await job for name, job in jobs.items()} == alone
    with pytest.raises(asyncio.CancelledError):
        await killed
    assert len(read_report(victim.store).rounds) == 2
    assert fleet.datacenter.opened > opened + 4  # it changed between the jobs, and was opened again


async def test_jobs_get_devices_in_proportion_to_their_shares(fleet):
    """Within 10 %, when the first of them has done its rounds, each of which counts the same."""
    rounds, used = [], {}
    fleet.shared.turns = Turns(lambda: float(len(rounds)))

    def count(event):
        if isinstance(event, RoundCommitted):
            rounds.append(event)
            if max(each.record.round for each in rounds) == 40 and not used:
                used.update({name: each.parts.link.account.used for name, each in jobs.items()})

    jobs = {}
    for seed, (name, share) in enumerate({"one": 1.0, "two": 2.0, "four": 4.0}.items()):
        job = (PLAIN, f"seed={seed}", "rounds=40", "evaluation.every=40")
        jobs[name] = fleet.coordinator(name, *job, share=share, watch=count)
    tasks = {name: asyncio.create_task(run(each)) for name, each in jobs.items()}
    await tasks["four"]
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    for name, job in jobs.items():
        expected = job.parts.link.account.share / 7
        assert used[name] / sum(used.values()) == pytest.approx(expected, rel=0.1), used


async def test_a_job_that_has_waited_asks_in_a_draw_that_its_devices_still_accept(
    fleet, monkeypatch
):
    """While it waits, devices see later draws of other jobs, and would refuse an earlier one."""
    enrolments = fleet.link.enrolments
    enrolments.requires_tickets = True
    draws, plan = [], AttemptLog.plan

    def note(log, decision, spec):
        draws.append(spec.draw)
        return plan(log, decision, spec)

    monkeypatch.setattr(AttemptLog, "plan", note)
    job = fleet.coordinator("waiting", "rounds=9", share=1.0)
    other = JobLink(fleet.shared, "other", 1.0)
    running = asyncio.create_task(run(job))
    await wait_until(lambda: job.parts.link.account.held)
    async with other.turn(NAMES):
        await wait_until(lambda: fleet.shared.turns.waits_for(job.parts.link.account))
        asked = len(draws)
        later = draws[-1] + 100
        enrolments.draws.ask(NAMES, later)
    await running
    assert 0 < asked < len(draws) == 9
    assert max(draws[:asked]) < later <= min(draws[asked:])


async def test_a_device_that_never_opens_a_run_keeps_no_other_job_waiting(deployment):
    await deployment.start()
    shared = SharedLink(deployment.link)
    hung = asyncio.Event()

    async def hang(participant, request, model):
        hung.set()
        await asyncio.Event().wait()

    deployment.network.dial(ScriptedParticipant(hang), "d")
    await wait_until(lambda: "d" in deployment.link.peers)
    stuck = JobLink(shared, "stuck", 1.0, open_seconds=0.2)
    opening = asyncio.create_task(
        stuck.ask("d", link_pb2.Request(id=stuck.new_id(), open=link_pb2.OpenRun(run_id="stuck")))
    )
    await hung.wait()
    other = JobLink(shared, "other", 1.0)
    async with other.turn(["a", "d"]):
        with pytest.raises(ParticipantLost, match=r"d did not open the run within 0\.2 s"):
            await opening


@pytest.mark.parametrize(("project", "named"), [("one", "the job other"), ("", "a job of another")])
async def test_a_log_names_no_job_of_another_project(deployment, project, named):
    """What a participant works for is in the log of a job that has lost it to another one."""
    await deployment.start()
    shared = SharedLink(deployment.link)
    mine, other = (
        JobLink(shared, name, 1.0, project=of) for name, of in (("mine", project), ("other", "one"))
    )
    request = link_pb2.Request(id=mine.new_id(), train_local=link_pb2.TrainLocal(run_id="mine"))
    async with other.turn(["a"]), mine.turn(["b"]):
        with pytest.raises(ParticipantLost, match=f"^a works for {named}"):
            await mine.ask("a", request)
