"""Whole runs: what is reported, reproducibility, budgets, evaluation and custom policies."""

import hashlib
import json


async def test_a_federated_run_from_start_to_end(deployment, tmp_path):
    await deployment.start()
    report, final = await deployment.run("run", "federated.local_epochs=3")
    assert report["status"] == "finished"
    assert report["reason"] == "all rounds are done"
    assert [row["round"] for row in report["rounds"]] == [1, 2, 3]
    for row in report["rounds"]:
        assert (row["regime"], row["attempt"]) == ("federated", 1)
        assert row["participants"] == {
            "invited": 3,
            "started": 3,
            "sent": 3,
            "accepted": 3,
            "rejected": 0,
            "dropped": 0,
        }
        assert [receipt["participant"] for receipt in row["receipts"]] == list(deployment.names)
        assert row["cost"]["price"] == 3.0
    losses = [row["metrics"]["loss"] for row in report["rounds"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert report["final"] == final.to_json()
    assert final.metrics == report["rounds"][-1]["metrics"]
    written = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert final.model_sha256 == hashlib.sha256(written).hexdigest()
    assert final.model_sha256 == report["rounds"][-1]["model_sha256"]


async def test_the_report_has_the_documented_keys(deployment):
    await deployment.start()
    report, _ = await deployment.run("run", "rounds=1")
    assert json.loads(json.dumps(report)) == report
    assert {"run_id", "job", "status", "rounds", "final"} <= report.keys()
    assert {"metrics", "model_sha256", "model_path"} <= report["final"].keys()
    (row,) = report["rounds"]
    assert {
        "round",
        "attempt",
        "regime",
        "reason",
        "seconds",
        "participants",
        "receipts",
        "metrics",
        "cost",
        "epsilon",
        "model_sha256",
    } <= row.keys()
    assert {"invited", "started", "sent", "accepted", "rejected", "dropped"} == row[
        "participants"
    ].keys()
    kinds = [event["kind"] for event in report["events"]]
    assert sorted(kinds) == ["joined"] * 3 + ["ready"] * 3 + ["served"]


async def test_the_same_seed_and_participants_give_the_same_bytes(deployment):
    await deployment.start()
    shas = [
        (await deployment.run(name, "rounds=2", f"seed={seed}"))[1].model_sha256
        for name, seed in (("one", 1), ("again", 1), ("other", 2))
    ]
    assert shas[0] == shas[1]
    assert shas[0] != shas[2]


async def test_a_budget_ends_the_run_before_it_is_overdrawn(deployment):
    await deployment.start()
    report, _ = await deployment.run("run", "budget=7.5")
    assert report["reason"] == (
        "the budget of 7.5 is used up: 6 is spent and a federated round costs 3"
    )
    assert len(report["rounds"]) == 2


async def test_failed_attempts_do_not_overdraw_the_budget(deployment):
    await deployment.start()
    deployment.faults["b"][2, 1] = "no power"
    report, _ = await deployment.run("run", "budget=8")
    assert report["reason"] == (
        "the budget of 8 is used up: 6 is spent and a federated round costs 3"
    )
    assert (len(report["rounds"]), len(report["failed_attempts"])) == (1, 1)


async def test_a_budget_below_one_round_still_gives_a_model(deployment):
    await deployment.start()
    report, final = await deployment.run("run", "budget=0.5")
    assert report["rounds"] == []
    assert final.metrics.keys() == {"accuracy", "loss"}


async def test_the_model_is_evaluated_every_n_rounds_and_in_the_last(deployment):
    await deployment.start()
    report, _ = await deployment.run("run", "evaluation.every=2")
    assert [bool(row["metrics"]) for row in report["rounds"]] == [False, True, True]


async def test_a_policy_may_be_in_the_folder_of_the_task(deployment, tmp_path):
    await deployment.start()
    (tmp_path / "policy_beside_the_task.py").write_text(
        "from isthmus_server.strategy import Plan\n"
        "class Mine:\n"
        "    def __init__(self, strategy): pass\n"
        "    def plan(self, seen):\n"
        "        turns = seen.state.get('turns', 0) + 1\n"
        "        return Plan('federated', f'turn {turns}', {'turns': turns})\n"
    )
    report, _ = await deployment.run(
        "run", "strategy.policy=policy_beside_the_task:Mine", "rounds=2"
    )
    assert [row["reason"] for row in report["rounds"]] == ["turn 1", "turn 2"]
