"""Ranks that die, hang, crash or cannot start; commands that are cancelled."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.conftest import random_model

from isthmus.errors import IsthmusError, UserError
from isthmus.wire import link_pb2

REASONS = {
    "kill": "rank 0 was ended by signal 9 (SIGKILL)",
    "stop": "rank 1 did not answer for 5 s and was ended",
}


@pytest.mark.parametrize("fault", REASONS)
def test_the_loss_of_a_rank_in_any_phase_does_not_change_the_result(
    fault: str, warm_datacenter: Any, make_setup: Any, tmp_path: Path, record_property: Any
) -> None:
    blobs = []
    rank = REASONS[fault].split()[1]
    settings = {"dropout": 0.2, "fault": fault, "rank": rank, "once": str(tmp_path / "once")}
    initial = random_model(make_setup("Table").layout, 8)
    # While the model is built, while one is loaded, in a forward pass or while other ranks wait for
    # it between steps, while the result is written, while the checkpoint is written.
    phases = ["model", "load", "forward 5" if fault == "kill" else "2", "store", "save 10"]
    for name, at in (("undisturbed", []), ("disturbed", phases)):
        run_id = f"{name}-{fault}"
        # A stopped rank is lost only after its lease.
        keys = {"zero_stage": 3} if fault == "kill" else {"zero_stage": 2, "lease_seconds": 5.0}
        setup = make_setup("Faulty", {**settings, "at": at}, **keys)
        warm_datacenter.open(run_id, setup)
        first, middle = warm_datacenter.train(run_id, 0, 5, initial, hand_back=True)
        second, blob = warm_datacenter.train(run_id, 5, 10, hand_back=True)
        blobs.append((middle, blob))
    assert blobs[0] == blobs[1]
    events = [*first.events, *second.events]
    assert len(events) == len(phases) - 1  # the first rank was lost when the run was opened
    for event in events:
        assert event.startswith(REASONS[fault])
        assert re.search(r" and was replaced in \d+\.\d s; the group restarted and repeated", event)
    seconds = [each for event in events for each in re.findall(r"in (\d+\.\d) s;", event)]
    record_property("seconds_to_recover", seconds)
    print(f"{fault}: ready again after", ", ".join(f"{each} s" for each in seconds))


def test_a_rank_that_dies_repeatedly_fails_the_request(
    warm_datacenter: Any, make_setup: Any
) -> None:
    sentence = (
        r"failed 4 times in one request; the last time, rank \d ended \(exit code 7\): "
        r"the accelerator is on fire"
    )
    with pytest.raises(IsthmusError, match=sentence):
        warm_datacenter.open("dies", make_setup("Faulty", {"fault": "exit", "at": "model"}))
    warm_datacenter.open("lives", make_setup("Table"))


def test_a_crash_in_native_code_logs_the_python_stack(
    warm_datacenter: Any, make_setup: Any, tmp_path: Path
) -> None:
    once = {"fault": "crash", "at": "model", "rank": "1", "once": str(tmp_path / "once")}
    warm_datacenter.open("crashed", make_setup("Faulty", once))
    logs = [path.read_text() for path in warm_datacenter.service.state.glob("**/stderr.log")]
    assert any("Segmentation fault" in text and "in maybe_fail" in text for text in logs)


def test_a_cancelled_request_stops_the_ranks(warm_datacenter: Any, make_setup: Any) -> None:
    warm_datacenter.open("cancelled", make_setup("Table"))
    train = link_pb2.TrainSteps(run_id="cancelled", from_step=0, until_step=10**6)
    request = link_pb2.Request(id="cancelled", train_steps=train)

    async def cancel_soon() -> None:
        started = asyncio.Event()
        work = asyncio.create_task(
            warm_datacenter.service.work(request, None, lambda progress: started.set())
        )
        await started.wait()
        warm_datacenter.service.cancel(request, "the round is over")
        await work

    # This is the sentence of ranks that stopped themselves and did not have to be killed.
    sentence = r"^stopped before step \d+ because the result is not wanted"
    with pytest.raises(UserError, match=sentence):
        warm_datacenter.run(cancel_soon())
    assert warm_datacenter.train("cancelled", 0, 2)[0].steps == 2


def test_ranks_that_cannot_start_fail_the_request(
    start_datacenter: Any, make_setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    driver = start_datacenter()
    sentence = r"failed 4 times .* rank \d ended \(exit code 1\): .*nosuch0"
    with pytest.raises(IsthmusError, match=sentence):
        driver.open("never", make_setup("Table"))
