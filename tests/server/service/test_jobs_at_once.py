"""A server that runs several jobs at once, over real TLS."""

import asyncio
import contextlib

import pytest
from tests.server.waiting import wait_until

from isthmus.errors import AdmissionRefused
from isthmus.wire import operator_pb2 as pb
from isthmus_server.runs.jobs.runner import JobRunner
from isthmus_server.storage.events import RoundCommitted


@pytest.fixture
def two_at_once(operated):
    operated.runner._at_once = 2
    return operated


async def test_an_operator_pauses_one_of_two_jobs_and_resumes_it(two_at_once):
    operated = two_at_once
    await operated.devices()
    first = await operated.submit(operated.job("rounds=2"), "one")
    second = await operated.submit(operated.job("rounds=2", "seed=2"), "two")
    queue = operated.runner.queue

    def waits(id_):
        return operated.runner.waiting_for(queue.get(id_), "me")

    await wait_until(lambda: any("waiting for its turn" in waits(id_) for id_ in (first, second)))
    held = await operated.ask("Pause", pb.PauseReply, pb.PauseRequest(id=second))
    assert held.state == "held"
    with pytest.raises(AdmissionRefused, match=f"{second} is held"):
        await operated.ask("Pause", pb.PauseReply, pb.PauseRequest(id=second))
    operated.gate.set()
    assert await operated.ended(first) == "finished"
    await wait_until(lambda: not operated.runner._running)
    assert (queue.get(second).state, queue.get(second).reason) == ("held", "paused by me")
    await operated.ask("Resume", pb.ResumeReply, pb.ResumeRequest(id=second))
    assert await operated.ended(second) == "finished"


async def test_after_a_restart_all_running_jobs_continue(two_at_once):
    operated = two_at_once
    operated.gate.set()
    await operated.devices()
    ids = [
        await operated.submit(operated.job("rounds=30", f"seed={seed}"), str(seed))
        for seed in range(2)
    ]
    queue = operated.runner.queue
    for id_ in ids:
        async for event in operated.runner.events(id_, follow=True):
            if isinstance(event, RoundCommitted):
                break
    operated.runner.leave()
    await wait_until(lambda: not operated.runner._running)
    assert [queue.get(id_).state for id_ in ids] == ["running", "running"]
    again = JobRunner(operated.link, operated.state, operated.runner.observers, at_once=2)
    with contextlib.closing(again.queue):
        running = asyncio.create_task(again.run())
        await wait_until(lambda: {again.queue.get(id_).state for id_ in ids} == {"finished"})
        again.leave()
        await running


async def test_a_share_that_is_none_is_refused(operated):
    asked = pb.SubmitRequest(job=operated.job().model_dump_json(), key="one", share=-1.0)
    with pytest.raises(AdmissionRefused, match="a share of -1 is not possible"):
        await operated.ask("Submit", pb.SubmitReply, asked)
