"""Whatever a job does, and whenever an operator cancels it, the queue goes on."""

import asyncio
import contextlib
import errno
import threading

from tests.server.waiting import wait_until

from isthmus.errors import UserError
from isthmus_server.runs.jobs import queue as job_queue
from isthmus_server.runs.jobs.queue import JobQueue
from isthmus_server.runs.jobs.running import RunningJob
from isthmus_server.storage.store import Store


async def test_a_job_that_is_cancelled_when_it_begins_does_not_run(operated, monkeypatch):
    """It was marked as running afterwards, and ran to its end."""
    reading, cancelled, last_round = asyncio.Event(), threading.Event(), Store.last_round
    loop = asyncio.get_running_loop()

    def last_round_while_it_is_cancelled(store):
        loop.call_soon_threadsafe(reading.set)
        assert cancelled.wait(30)
        return last_round(store)

    id_ = await operated.submit(operated.job("time.join_seconds=0.05"))
    queue, runner = operated.runner.queue, operated.runner
    await wait_until(lambda: queue.get(id_).state == "paused")
    monkeypatch.setattr(Store, "last_round", last_round_while_it_is_cancelled)
    runner.resume(id_)
    await reading.wait()
    assert runner.cancel(id_) == "cancelled"
    cancelled.set()
    operated.gate.set()
    await operated.devices()
    assert await operated.ended(await operated.submit(operated.job(), "two")) == "finished"
    assert queue.get(id_).state == "cancelled"


async def test_an_error_that_no_file_can_store_ends_only_its_job(operated, monkeypatch):
    train = RunningJob.train

    async def train_or_fail(job, *arguments):
        if job.entry.number == 1:
            raise UserError("no data-\udcff.csv")  # as Python decodes the name of a file
        return await train(job, *arguments)

    monkeypatch.setattr(RunningJob, "train", train_or_fail)
    id_ = await operated.submit(operated.job())
    queue = operated.runner.queue
    await wait_until(lambda: queue.get(id_).state == "failed")
    assert r"no data-\udcff.csv" in queue.get(id_).reason
    operated.gate.set()
    await operated.devices()
    assert await operated.ended(await operated.submit(operated.job(), "two")) == "finished"
    assert id_ in await operated.states()


async def test_a_run_on_a_failing_disk_does_not_stop_the_queue(operated, monkeypatch):
    """Only its own job waits until its directory can be read again."""
    monkeypatch.setattr(job_queue, "SHORTEST_PAUSE", 300.0)
    open_store = Store.open

    def open_if_it_can_be_read(directory, **options):
        if directory.name == id_:
            raise OSError(errno.EIO, "Input/output error", str(directory))
        return open_store(directory, **options)

    id_ = await operated.submit(operated.job("time.join_seconds=0.05"))
    queue = operated.runner.queue
    await wait_until(lambda: queue.get(id_).state == "paused")
    monkeypatch.setattr(Store, "open", open_if_it_can_be_read)
    monkeypatch.setattr(Store, "open_to_continue", open_if_it_can_be_read)
    operated.gate.set()
    await operated.devices()
    operated.runner.resume(id_)
    assert await operated.ended(await operated.submit(operated.job(), "two")) == "finished"
    assert queue.get(id_).state == "paused"
    assert "Input/output error" in queue.get(id_).reason
    assert id_ in await operated.states()


def test_a_job_from_the_future_waits_no_longer_than_the_others(tmp_path, make_job, monkeypatch):
    """Jobs that never go on took turns in front of it until the clock had come so far again."""
    now = 1e9
    monkeypatch.setattr(job_queue.time, "time", lambda: now)
    with contextlib.closing(JobQueue(tmp_path)) as queue:
        now += 86400 * 365  # wrong for a while
        queue.submit(make_job(), "me", "one")
        queue.pause(queue.submit(make_job(), "me", "two"), "no devices", progressed=False)
        now = 1e9
        for key in ("three", "four"):
            queue.submit(make_job(), "me", key)
        ran = []
        while len(ran) < 8:
            entry = queue.next()
            ran.append(entry.number)
            queue.mark(entry, "running")
            now += 600  # each waits so long before it is paused
            queue.pause(entry, "no devices", progressed=False)
        assert set(ran) == {1, 2, 3, 4}
