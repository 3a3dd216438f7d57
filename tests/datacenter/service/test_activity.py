"""A rank whose code loops is named with its line within the lease, and may still end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from isthmus.job import with_changes
from isthmus.wire import link_pb2


def test_a_rank_that_keeps_others_waiting_is_named(
    warm_datacenter: Any, make_setup: Any, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    prepared = make_setup("Table", {"release": str(release)}, lease_seconds=4.0, zero_stage=0)
    job = with_changes(prepared.job, {"task.source": "conditional_tasks.py:Looping"})
    warm_datacenter.open("looping", type(prepared)(job))
    notes: list[str] = []

    def note(progress: link_pb2.Progress) -> None:
        if progress.note:
            notes.append(progress.note)
            release.touch()

    train = link_pb2.TrainSteps(run_id="looping", from_step=0, until_step=3)
    request = link_pb2.Request(id="looping", train_steps=train)
    reply, _ = warm_datacenter.run(warm_datacenter.service.work(request, None, note))
    assert reply.trained.steps == 3
    assert not reply.trained.events
    (sentence,) = notes
    assert re.fullmatch(
        r"rank 1 has been at conditional_tasks\.py:\d+ in __getitem__\(\) for [2-9] s, and the "
        r"others wait for it; the stack of each rank is in its log",
        sentence,
    )
