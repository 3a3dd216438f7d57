"""The service with real elastic ranks, asked as the link asks it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.datacenter.conftest import Driver

import isthmus_datacenter.service.service
from isthmus.errors import IsthmusError, UpdateError, UserError
from isthmus.task.scoring import build_model, evaluate
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_datacenter.service.messages import Command
from isthmus_datacenter.service.rank_group import RankGroup
from isthmus_datacenter.service.service import DatacenterService

STEPS = 6


def seeded(layout: TensorLayout, seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return bytes(layout.encode(0.1 * torch.randn(layout.size, generator=generator)))


def test_a_run_from_its_first_step(warm: Any, setup: Any, vector: Any) -> None:
    made = setup("Table", {"dropout": 0.2})
    assert warm.open("first", made) == 50
    start = warm.export("first", 0)
    assert start == bytes(made.layout.encode(made.layout.gather(build_model(made.task, 5))))

    trained, blob = warm.train("first", 0, STEPS, evaluate=True, hand_back=True)
    assert (trained.steps, trained.examples) == (STEPS, STEPS * 2 * 4)
    assert trained.seconds > 0
    assert trained.profile["examples_per_second"] > 0
    assert 0 <= trained.profile["reading_share"] < 1
    assert "mfu" not in trained.profile  # nothing is known of this processor
    assert not trained.events
    assert 0 < trained.training["loss"] < 3
    assert warm.export("first", STEPS) == blob
    model = build_model(made.task, 0)
    made.layout.scatter(vector(blob, made.layout), model)
    held_out = made.task.eval_data()
    alone = evaluate(made.task, model, held_out, range(23), 8, torch.device("cpu")).result()
    assert dict(trained.evaluation) == pytest.approx(alone, abs=1e-6)

    quiet, nothing = warm.train("first", STEPS, 2 * STEPS)
    assert nothing is None
    assert not quiet.HasField("result")
    assert not quiet.evaluation
    assert not list((warm.service.state / "exchange").iterdir())


def test_a_model_that_comes_is_the_model(warm: Any, setup: Any) -> None:
    made = setup("Table", zero_stage=3)
    warm.open("comes", made)
    sent = seeded(made.layout, 3)
    assert warm.train("comes", 0, 0, sent, hand_back=True)[1] == sent
    # Trained from there, whatever was trained before it came.
    _, first = warm.train("comes", 0, STEPS, sent, hand_back=True)
    warm.train("comes", STEPS, STEPS + 3)
    _, again = warm.train("comes", 0, STEPS, sent, hand_back=True)
    assert again == first != sent


def test_a_model_that_comes_resets_or_keeps_the_optimizer(warm: Any, setup: Any) -> None:
    found = {}
    for rule in ("reset", "keep"):
        made = setup("Table", optimizer_on_load=rule)
        warm.open(f"on-load-{rule}", made)
        warm.train(f"on-load-{rule}", 0, STEPS)
        sent = seeded(made.layout, 4)
        _, blob = warm.train(f"on-load-{rule}", STEPS, 2 * STEPS, sent, hand_back=True)
        found[rule] = blob
    assert found["reset"] != found["keep"]


def test_an_attempt_that_did_not_count_leaves_no_trace(warm: Any, setup: Any) -> None:
    made = setup("Table", {"dropout": 0.2})
    warm.open("lineage", made)
    warm.train("lineage", 0, 4)
    _, once = warm.train("lineage", 4, 8, hand_back=True)
    warm.train("lineage", 4, 8, seeded(made.layout, 6))
    _, twice = warm.train("lineage", 4, 8, hand_back=True)
    assert twice == once
    warm.train("lineage", 8, 12)
    kept = sorted(path.name for path in (warm.service.state / "lineage").glob("step-*"))
    assert kept == ["step-12", "step-8"]
    assert len(list((warm.service.state / "lineage").glob("data-*"))) == 2
    with pytest.raises(UserError, match="no checkpoint of step 4 "):
        warm.train("lineage", 4, 8)
    assert warm.export("lineage", 8) == once


def test_a_new_run_starts_clean(warm: Any, setup: Any) -> None:
    blobs = []
    for run_id in ("clean-a", "clean-b"):
        warm.open(run_id, setup("Table"))
        blobs.append(warm.train(run_id, 0, STEPS, hand_back=True)[1])
    assert blobs[0] == blobs[1]
    with pytest.raises(UserError, match="'clean-a' is not open"):
        warm.train("clean-a", STEPS, STEPS + 1)
    warm.ask(close=link_pb2.CloseRun(run_id="clean-b"))
    with pytest.raises(UserError, match="'clean-b' is not open"):
        warm.export("clean-b", STEPS)


def test_checkpoints_are_kept_until_nobody_goes_on_with_a_run(warm: Any, setup: Any) -> None:
    directory = warm.service.state / "ends"
    for over in (False, True):
        warm.open("ends", setup("Table"))
        warm.train("ends", 0, 1)
        warm.ask(close=link_pb2.CloseRun(run_id="ends", finished=over))
        assert directory.exists() != over


def test_another_model_than_the_servers_is_refused(warm: Any, setup: Any) -> None:
    made = setup("Table")
    with pytest.raises(
        UserError, match=r"the datacenter's model is not the server's: .* is here and not"
    ):
        warm.ask(open=made.opening("other", setup("Language").layout))
    warm.open("other", made)
    with pytest.raises(UpdateError, match="this is not a safetensors header"):
        warm.train("other", 0, 1, bytes(made.layout.nbytes))
    assert not list((warm.service.state / "exchange").iterdir())
    with pytest.raises(UserError, match="cannot name a directory"):
        warm.ask(open=made.opening("../elsewhere"))


@pytest.fixture(name="opened")
def opened_(
    setup: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DatacenterService, int]]:
    """A service whose ranks are never started, with a run open; bytes of its model."""

    async def execute(group: RankGroup, command: Command) -> tuple[dict[str, Any], list[str]]:
        return {"examples": 50, "note": ""}, []

    service = DatacenterService("own", 1, tmp_path / "state")
    made = setup("Table")
    request = link_pb2.Request(id="open", open=made.opening("run"))
    with monkeypatch.context() as patch:
        patch.setattr(RankGroup, "execute", execute)
        asyncio.run(service.work(request, None, lambda progress: None))
    yield service, made.layout.nbytes
    service.close()


def asking(run_id: str = "run") -> link_pb2.Request:
    return link_pb2.Request(id="one", train_steps=link_pb2.TrainSteps(run_id=run_id))


def test_room_is_made_for_exactly_one_model_of_the_open_run(
    opened: tuple[DatacenterService, int],
) -> None:
    service, nbytes = opened
    for size in (5, nbytes + 1, 1 << 50):
        with pytest.raises(UpdateError, match=f"a model of {size} bytes was announced where"):
            service.buffer(asking(), size)
    with pytest.raises(UserError, match="'other' is not open"):
        service.buffer(asking("other"), nbytes)
    package = link_pb2.OpenRun(run_id="run")
    assert service.buffer(link_pb2.Request(id="two", open=package), 1 << 50) is None
    assert not list((service.state / "exchange").iterdir())
    assert len(service.buffer(asking(), nbytes)) == nbytes
    (file,) = (service.state / "exchange").iterdir()
    assert file.stat().st_blocks * 512 >= nbytes  # on the disk, and not only promised
    service.acknowledged(asking(), False, "cancelled before its model was here")
    assert not list((service.state / "exchange").iterdir())


def test_a_model_that_the_disk_has_no_room_for_leaves_nothing(
    opened: tuple[DatacenterService, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("isthmus_datacenter.service.transfer_files.os.posix_fallocate", full)
    service, nbytes = opened
    with pytest.raises(OSError, match="No space"):
        service.buffer(asking(), nbytes)
    back = link_pb2.TrainSteps(run_id="run", until_step=1, hand_back=True)
    request = link_pb2.Request(id="two", train_steps=back)
    with pytest.raises(UserError, match=r"^the state directory .* cannot be used: .*No space left"):
        asyncio.run(service.work(request, None, lambda progress: None))
    assert not list((service.state / "exchange").iterdir())


def test_a_model_of_another_frozen_base_is_not_opened(warm: Any, setup: Any) -> None:
    work = setup("Table").opening("adapted")
    work.frozen["0.weight"].values.append(1.0)
    sentence = (
        "^the datacenter's model is not the server's: parameter '0.weight' is frozen there and not"
    )
    with pytest.raises(UserError, match=sentence):
        warm.ask(open=work)


def test_a_gradient_is_taken_at_a_model(opened: tuple[DatacenterService, int]) -> None:
    work = link_pb2.MeanGradient(run_id="run", until_step=1)
    request = link_pb2.Request(id="one", mean_gradient=work)
    with pytest.raises(UpdateError, match="without the model to take it at"):
        asyncio.run(opened[0].work(request, None, lambda progress: None))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"what": "loss"}, r"loss is not finite \(nan\)"),
        ({"what": "model", "step": STEPS}, "model is not finite"),  # too late for any loss
    ],
)
def test_what_is_not_finite_on_one_rank(
    settings: dict[str, Any], sentence: str, warm: Any, setup: Any
) -> None:
    warm.open("diverges", setup("Diverging", {"rank": "1", **settings}))
    ranks = warm.processes()
    with pytest.raises(UserError, match=f"^the {sentence} between steps 0 and 6; lower the learni"):
        warm.train("diverges", 0, STEPS)
    # Everybody knew, so nobody had to be restarted.
    warm.open("sane", setup("Table"))
    warm.train("sane", 0, 1)
    assert warm.processes() == ranks


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"at": "model"}, r"model\(\) failed at .*tasks.py:\d+: ValueError: the shelf is empty"),
        ({"at": "model", "rank": "1"}, r"model\(\) failed at .*: the shelf is empty"),
        ({"at": "data"}, r"local_data\(\) failed at .*: the shelf is empty"),
    ],
)
def test_a_task_that_cannot_be_opened(
    settings: dict[str, str], sentence: str, warm: Any, setup: Any
) -> None:
    warm.open("whole", setup("Table"))
    ranks = warm.processes()
    with pytest.raises(UserError, match=sentence):
        warm.open("broken", setup("Faulty", {"fault": "raise", **settings}))
    warm.open("repaired", setup("Table"))
    assert warm.processes() == ranks


@pytest.mark.parametrize(
    ("settings", "pipeline", "what"),
    [
        ({"at": "3"}, 1, r"loss\(\)"),
        ({"at": "3", "rank": "1"}, 1, r"loss\(\)"),
        ({"at": "backward 3", "rank": "1"}, 1, "the backward pass"),
        ({"at": "step 3", "rank": "0"}, 1, "the optimizer's step"),
        ({"at": "forward 10", "rank": "0"}, 2, "a pass through the pipeline"),
    ],
)
def test_a_task_that_raises_while_it_trains(
    settings: dict[str, str], pipeline: int, what: str, warm: Any, setup: Any
) -> None:
    made = setup("Faulty", {"fault": "raise", **settings}, pipeline_parallel=pipeline)
    warm.open("raises", made)
    with pytest.raises(
        UserError, match=rf"{what} failed at .*tasks.py:\d+: .*: the shelf is empty"
    ):
        warm.train("raises", 0, STEPS)
    warm.open("goes-on", setup("Table"))
    assert warm.train("goes-on", 0, STEPS)[0].steps == STEPS


LOST = {
    "kill": "rank 0 died (signal 9)",
    "stop": "rank 1 did not answer for 5 s and was ended",
}


@pytest.mark.parametrize("fault", LOST)
def test_a_rank_that_is_lost_in_any_phase_changes_nothing(
    fault: str, warm: Any, setup: Any, tmp_path: Path, record_property: Any
) -> None:
    blobs = []
    rank = LOST[fault].split()[1]
    settings = {"dropout": 0.2, "fault": fault, "rank": rank, "once": str(tmp_path / "once")}
    sent = seeded(setup("Table").layout, 8)
    # While the model is set up; while one comes, in a forward pass or between its own steps, while
    # others wait for it, while the result is handed over, while the checkpoint is written.
    phases = ["model", "load", "forward 5" if fault == "kill" else "2", "store", "save 10"]
    for name, at in (("undisturbed", []), ("disturbed", phases)):
        run_id = f"{name}-{fault}"
        more = {"zero_stage": 3} if fault == "kill" else {"zero_stage": 2, "lease_seconds": 5.0}
        made = setup("Faulty", {**settings, "at": at}, **more)
        warm.open(run_id, made)
        first, begun = warm.train(run_id, 0, 5, sent, hand_back=True)
        second, blob = warm.train(run_id, 5, 10, hand_back=True)
        blobs.append((begun, blob))
    assert blobs[0] == blobs[1]
    told = [*first.events, *second.events]
    assert len(told) == len(phases) - 1  # the first rank was lost when the run was opened
    for event in told:
        assert event.startswith(LOST[fault])
        assert re.search(r" and was replaced in \d+\.\d s; the group restarted and repeated", event)
    seconds = [each for event in told for each in re.findall(r"in (\d+\.\d) s;", event)]
    record_property("seconds_to_recover", seconds)
    print(f"{fault}: ready again after", ", ".join(f"{each} s" for each in seconds))


def test_a_rank_that_dies_again_and_again(warm: Any, setup: Any) -> None:
    sentence = (
        r"failed 4 times in one request; the last time, rank \d ended \(exit code 7\): "
        r"the accelerator is on fire"
    )
    with pytest.raises(IsthmusError, match=sentence):
        warm.open("dies", setup("Faulty", {"fault": "exit", "at": "model"}))
    warm.open("lives", setup("Table"))


def test_a_crash_in_native_code_leaves_the_stack_of_python_in_the_log(
    warm: Any, setup: Any, tmp_path: Path
) -> None:
    once = {"fault": "crash", "at": "model", "rank": "1", "once": str(tmp_path / "once")}
    warm.open("crashed", setup("Faulty", once))
    logs = [path.read_text() for path in warm.service.state.glob("**/stderr.log")]
    assert any("Segmentation fault" in text and "in maybe_fail" in text for text in logs)


def test_a_result_nobody_wants(warm: Any, setup: Any) -> None:
    warm.open("unwanted", setup("Table"))
    train = link_pb2.TrainSteps(run_id="unwanted", from_step=0, until_step=10**6)
    request = link_pb2.Request(id="cancelled", train_steps=train)

    async def cancel_soon() -> None:
        begun = asyncio.Event()
        work = asyncio.create_task(warm.service.work(request, None, lambda progress: begun.set()))
        await begun.wait()
        warm.service.cancel(request, "the round is over")
        await work

    # The ranks' own words: they stopped, and had not to be ended.
    with pytest.raises(UserError, match=r"^stopped before step \d+ because the result is not want"):
        warm.run(cancel_soon())
    assert warm.train("unwanted", 0, 2)[0].steps == 2


def test_a_state_directory_has_one_service(warm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isthmus_datacenter.service.service, "LOCK_SECONDS", 0.0)
    with pytest.raises(UserError, match="another datacenter service uses the state directory"):
        DatacenterService("second", 2, warm.service.state)


def test_a_server_elsewhere_names_only_tasks_that_the_owner_put_there(
    setup: Any, tmp_path: Path
) -> None:
    (tmp_path / "tasks").mkdir()
    # Its ranks are never started: nothing reaches them.
    driver = Driver(DatacenterService("own", 1, tmp_path / "state", tasks=tmp_path / "tasks"))
    with pytest.raises(IsthmusError, match=r"is not a file in .*tasks, where this machine keeps"):
        driver.open("run", setup("Table"))
    driver.close()
