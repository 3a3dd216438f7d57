"""A run with secure sums of buffers is killed when all of its devices have unmasked one."""

import contextlib
import dataclasses
import itertools

import pytest
from tests.server.deployment import Killed
from tests.server.rounds.test_killed_groups import Fault, connected, run, store_apart, vanish

from isthmus.errors import UserError
from isthmus.wire import link_pb2
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts

FOUR = tuple("abcd")
BUFFERED = (
    "rounds=1",
    "federated.mode=buffered",
    "federated.secure_aggregation=true",
    "federated.cohort=4",
    "federated.quorum=4",
    "federated.buffer={concurrency=4}",
    "federated.local_steps=1",
    "federated.clients=0",
    "time.join_seconds=4",
    "time.cohort_seconds=2",
)


async def killed_before_merge(store, link):
    """Run until the devices have unmasked their updates, and end before the round is committed."""
    coordinator = Coordinator(RunParts.of(store, link))

    def die(spec, results):
        raise Killed

    coordinator.parts.merger.merge = die
    with pytest.raises(Killed):
        await coordinator.run()


async def test_a_run_that_ends_after_any_commit_fills_the_same_buffer_again(
    deployment, monkeypatch
):
    """There are no other devices, and these give that sum again and no other one."""
    await deployment.start(names=FOUR)
    expected = await run(deployment.create_run("whole", *BUFFERED), deployment.link)
    for after in itertools.count(1):
        store = deployment.create_run(f"ended-{after}", *BUFFERED)
        store_apart(store)
        with monkeypatch.context() as patched:
            fault = Fault(patched, after)
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


async def test_a_device_that_is_missing_from_the_same_buffer_is_named(deployment, network):
    connections = await connected(deployment, network, FOUR)
    store = deployment.create_run("run", *BUFFERED, "federated.quorum=3")
    await killed_before_merge(store, deployment.link)
    (entry,) = store.unmaskings.about(store.run_id, 1, None)
    assert entry.devices == set(FOUR)
    vanish(deployment, connections, "b")
    with pytest.raises(UserError, match="the quorum is 3; it needs b, or others"):
        await run(deployment.reopen(store), deployment.link)


async def test_a_buffer_with_updates_of_an_earlier_round_is_not_filled_again(deployment):
    """The device of such an update would give another one, and the sums would differ by the two."""
    await deployment.start(names=FOUR)
    store = deployment.create_run("run", *BUFFERED)
    add = store.unmaskings.add

    def with_another_start(entry):
        request = link_pb2.Request.FromString(entry.request)
        request.agree.starts.insert(0, link_pb2.BufferedStart(round=0))
        return dataclasses.replace(entry, request=request.SerializeToString())

    store.unmaskings.add = lambda *entries: add(*map(with_another_start, entries))
    await killed_before_merge(store, deployment.link)
    with pytest.raises(UserError, match="it needs other devices, or a job with another seed"):
        await run(deployment.reopen(store), deployment.link)
