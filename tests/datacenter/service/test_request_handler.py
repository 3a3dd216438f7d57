"""Requests to a service with real ranks: runs, models, training, gradients and refusals."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.datacenter.conftest import DatacenterDriver, random_model

from isthmus.errors import IsthmusError, UpdateError, UserError
from isthmus.job import with_changes
from isthmus.task.scoring import build_model, evaluate
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_datacenter.service.service import DatacenterService

STEPS = 6


def test_a_run_trains_exports_and_evaluates_from_step_0(
    warm_datacenter: Any, make_setup: Any, decode: Any
) -> None:
    setup = make_setup("Table", {"dropout": 0.2})
    assert warm_datacenter.open("first", setup) == 50
    start = warm_datacenter.export("first", 0)
    assert start == bytes(setup.layout.encode(setup.layout.gather(build_model(setup.task, 5))))

    trained, blob = warm_datacenter.train("first", 0, STEPS, evaluate=True, hand_back=True)
    assert (trained.steps, trained.examples) == (STEPS, STEPS * 2 * 4)
    assert trained.seconds > 0
    assert trained.profile["examples_per_second"] > 0
    assert 0 <= trained.profile["reading_share"] < 1
    assert "mfu" not in trained.profile  # the peak of this processor is unknown
    assert not trained.events
    assert 0 < trained.training["loss"] < 3
    assert warm_datacenter.export("first", STEPS) == blob
    model = build_model(setup.task, 0)
    setup.layout.scatter(decode(blob, setup.layout), model)
    held_out = setup.task.eval_data()
    expected = evaluate(setup.task, model, held_out, range(23), 8, torch.device("cpu")).result()
    assert dict(trained.evaluation) == pytest.approx(expected, abs=1e-6)

    trained, blob = warm_datacenter.train("first", STEPS, 2 * STEPS)
    assert blob is None
    assert not trained.HasField("result")
    assert not trained.evaluation
    assert not list((warm_datacenter.service.state / "exchange").iterdir())
    for folder in ("exchange", "first"):
        assert (warm_datacenter.service.state / folder).stat().st_mode & 0o777 == 0o700


def test_a_model_that_came_is_kept_until_the_ranks_have_another(
    warm_datacenter: Any, make_setup: Any
) -> None:
    setup = make_setup("Table")
    warm_datacenter.open("kept", setup)
    model = random_model(setup.layout, 3)
    gradient = link_pb2.MeanGradient(
        run_id="kept", until_step=STEPS, model=describe(model), round=1, attempt=1
    )
    warm_datacenter.ask(model, mean_gradient=gradient)
    handler = warm_datacenter.service._handler
    train = link_pb2.TrainSteps(run_id="kept", until_step=STEPS, model=describe(model))
    again = link_pb2.Request(train_steps=train)
    assert bytes(handler.held_model(again)) == model
    trained = warm_datacenter.train("kept", 0, STEPS, model, hand_back=True)[1]
    assert bytes(handler.held_model(again)) == model
    train.model.CopyFrom(describe(trained))
    assert handler.held_model(link_pb2.Request(train_steps=train)) is None
    warm_datacenter.train("kept", STEPS, 2 * STEPS)
    assert handler.held_model(again) is None
    assert not list((warm_datacenter.service.state / "exchange").iterdir())


def test_training_starts_from_the_model_of_the_request(
    warm_datacenter: Any, make_setup: Any
) -> None:
    setup = make_setup("Table", zero_stage=3)
    warm_datacenter.open("from-model", setup)
    model = random_model(setup.layout, 3)
    assert warm_datacenter.train("from-model", 0, 0, model, hand_back=True)[1] == model
    # Training before the request has no effect.
    _, first = warm_datacenter.train("from-model", 0, STEPS, model, hand_back=True)
    warm_datacenter.train("from-model", STEPS, STEPS + 3)
    _, again = warm_datacenter.train("from-model", 0, STEPS, model, hand_back=True)
    assert again == first != model


def test_loading_a_model_resets_or_keeps_the_optimizer(
    warm_datacenter: Any, make_setup: Any
) -> None:
    results = {}
    for rule in ("reset", "keep"):
        setup = make_setup("Table", optimizer_on_load=rule)
        warm_datacenter.open(f"on-load-{rule}", setup)
        warm_datacenter.train(f"on-load-{rule}", 0, STEPS)
        model = random_model(setup.layout, 4)
        _, results[rule] = warm_datacenter.train(
            f"on-load-{rule}", STEPS, 2 * STEPS, model, hand_back=True
        )
    assert results["reset"] != results["keep"]


def test_a_discarded_attempt_does_not_change_later_training(
    warm_datacenter: Any, make_setup: Any
) -> None:
    setup = make_setup("Table", {"dropout": 0.2})
    warm_datacenter.open("lineage", setup)
    warm_datacenter.train("lineage", 0, 4)
    _, once = warm_datacenter.train("lineage", 4, 8, hand_back=True)
    warm_datacenter.train("lineage", 4, 8, random_model(setup.layout, 6))
    _, twice = warm_datacenter.train("lineage", 4, 8, hand_back=True)
    assert twice == once
    warm_datacenter.train("lineage", 8, 12)
    kept = sorted(path.name for path in (warm_datacenter.service.state / "lineage").glob("step-*"))
    assert kept == ["step-12", "step-8"]
    assert len(list((warm_datacenter.service.state / "lineage").glob("data-*"))) == 2
    with pytest.raises(UserError, match="no checkpoint of step 4 "):
        warm_datacenter.train("lineage", 4, 8)
    assert warm_datacenter.export("lineage", 8) == once


def test_a_new_run_starts_from_the_seed(warm_datacenter: Any, make_setup: Any) -> None:
    blobs = []
    for run_id in ("clean-a", "clean-b"):
        warm_datacenter.open(run_id, make_setup("Table"))
        blobs.append(warm_datacenter.train(run_id, 0, STEPS, hand_back=True)[1])
    assert blobs[0] == blobs[1]
    with pytest.raises(UserError, match="'clean-a' is not open"):
        warm_datacenter.train("clean-a", STEPS, STEPS + 1)
    warm_datacenter.ask(close=link_pb2.CloseRun(run_id="clean-b"))
    with pytest.raises(UserError, match="'clean-b' is not open"):
        warm_datacenter.export("clean-b", STEPS)


def test_checkpoints_are_deleted_when_a_run_is_finished(
    warm_datacenter: Any, make_setup: Any
) -> None:
    directory = warm_datacenter.service.state / "ends"
    for finished in (False, True):
        warm_datacenter.open("ends", make_setup("Table"))
        warm_datacenter.train("ends", 0, 1)
        warm_datacenter.ask(close=link_pb2.CloseRun(run_id="ends", finished=finished))
        assert directory.exists() != finished


def test_a_model_that_differs_from_the_servers_is_refused(
    warm_datacenter: Any, make_setup: Any
) -> None:
    setup = make_setup("Table")
    with pytest.raises(
        UserError, match=r"the datacenter's model is not the server's: .* is here and not"
    ):
        warm_datacenter.ask(open=setup.open_request("other", make_setup("Language").layout))
    warm_datacenter.open("other", setup)
    with pytest.raises(UpdateError, match="this is not a safetensors header"):
        warm_datacenter.train("other", 0, 1, bytes(setup.layout.nbytes))
    assert not list((warm_datacenter.service.state / "exchange").iterdir())
    with pytest.raises(UserError, match="cannot name a directory"):
        warm_datacenter.ask(open=setup.open_request("../elsewhere"))


def test_a_run_with_other_frozen_parameters_is_refused(
    warm_datacenter: Any, make_setup: Any
) -> None:
    open_ = make_setup("Table").open_request("adapted")
    open_.frozen["0.weight"].values.append(1.0)
    sentence = (
        "^the datacenter's model is not the server's: parameter '0.weight' is frozen there and not"
    )
    with pytest.raises(UserError, match=sentence):
        warm_datacenter.ask(open=open_)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"what": "loss"}, r"loss is not finite \(nan\)"),
        ({"what": "model", "step": STEPS}, "model is not finite"),  # after the last loss
    ],
)
def test_a_loss_or_model_that_is_not_finite_on_one_rank_fails_without_a_restart(
    settings: dict[str, Any], sentence: str, warm_datacenter: Any, make_setup: Any
) -> None:
    warm_datacenter.open("diverges", make_setup("Diverging", {"rank": "1", **settings}))
    pids = warm_datacenter.rank_pids()
    with pytest.raises(
        UserError, match=f"^the {sentence} between steps 0 and 6; lower the learning rate"
    ):
        warm_datacenter.train("diverges", 0, STEPS)
    # All ranks agreed on the failure, so none was restarted.
    warm_datacenter.open("sane", make_setup("Table"))
    warm_datacenter.train("sane", 0, 1)
    assert warm_datacenter.rank_pids() == pids


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"at": "model"}, r"model\(\) failed at .*tasks.py:\d+: ValueError: the shelf is empty"),
        ({"at": "model", "rank": "1"}, r"model\(\) failed at .*: the shelf is empty"),
        ({"at": "data"}, r"local_data\(\) failed at .*: the shelf is empty"),
    ],
)
def test_a_task_that_raises_on_opening_fails_the_request_without_a_restart(
    settings: dict[str, str], sentence: str, warm_datacenter: Any, make_setup: Any
) -> None:
    warm_datacenter.open("whole", make_setup("Table"))
    pids = warm_datacenter.rank_pids()
    with pytest.raises(UserError, match=sentence):
        warm_datacenter.open("broken", make_setup("Faulty", {"fault": "raise", **settings}))
    warm_datacenter.open("repaired", make_setup("Table"))
    assert warm_datacenter.rank_pids() == pids


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
def test_a_task_that_raises_in_training_fails_the_request(
    settings: dict[str, str], pipeline: int, what: str, warm_datacenter: Any, make_setup: Any
) -> None:
    setup = make_setup("Faulty", {"fault": "raise", **settings}, pipeline_parallel=pipeline)
    warm_datacenter.open("raises", setup)
    with pytest.raises(
        UserError, match=rf"{what} failed at .*tasks.py:\d+: .*: the shelf is empty"
    ):
        warm_datacenter.train("raises", 0, STEPS)
    warm_datacenter.open("goes-on", make_setup("Table"))
    assert warm_datacenter.train("goes-on", 0, STEPS)[0].steps == STEPS


def test_a_remote_server_can_open_only_installed_tasks(make_setup: Any, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    # Its ranks are never started, because no command is sent to them.
    driver = DatacenterDriver(
        DatacenterService("own", 1, tmp_path / "state", tasks=tmp_path / "tasks")
    )
    with pytest.raises(IsthmusError, match=r"is not a file in .*tasks, where this machine keeps"):
        driver.open("run", make_setup("Table"))
    (tmp_path / "tasks/tasks.py").touch()
    setup = make_setup("Table")
    start = {"model.start": "/weights", "model.sha256": "0" * 64}
    setup = dataclasses.replace(setup, job=with_changes(setup.job, start))
    with pytest.raises(IsthmusError, match=r"model.start='/weights' is not below .*tasks, where"):
        driver.open("run", setup)
    driver.close()


def test_progress_is_reported_during_requests(warm_datacenter: Any, make_setup: Any) -> None:
    reports: list[link_pb2.Progress] = []
    setup = make_setup("Table", layout="auto")
    opening = link_pb2.Request(id="live-open", open=setup.open_request("live"))
    warm_datacenter.run(warm_datacenter.service.work(opening, None, reports.append))
    reason = r"layout: zero_stage=0: 3\.11e\+02 parameters take 0\.0 GiB .* on each of 2 ranks"
    assert [bool(re.fullmatch(reason, each.note)) for each in reports] == [True]

    train = link_pb2.TrainSteps(run_id="live", from_step=0, until_step=10**6)
    request = link_pb2.Request(id="live-train", train_steps=train)

    async def cancel_after_two_reports() -> None:
        enough = asyncio.Event()

        def receive(progress: link_pb2.Progress) -> None:
            reports.append(progress)
            if len(reports) == 3:
                enough.set()

        work = asyncio.create_task(warm_datacenter.service.work(request, None, receive))
        await enough.wait()
        warm_datacenter.service.cancel(request, "the test has enough reports")
        await asyncio.gather(work, return_exceptions=True)

    warm_datacenter.run(cancel_after_two_reports())
    first, second = reports[1:3]
    assert 0 < first.steps < second.steps < first.total_steps == 10**6
    assert 0 < second.loss < 3
    # An example is a unit here, and a step takes eight.
    assert second.examples_per_second == pytest.approx(second.units_per_second)
    assert second.examples_per_second > 0
