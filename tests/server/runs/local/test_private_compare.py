"""`isthmus compare` of a private job with real processes of devices."""

import json
import subprocess

from isthmus_privacy.dp.ledger import LEDGER_FILE, Ledger

JOB = """
name = "table"
rounds = 1

[task]
source = "task.py:Learn"

[strategy]
policy = "federated"

[datacenter]
ranks = 0

[federated]
clients = 3
cohort = 3
quorum = 3
local_steps = 2
batch_size = 4

[privacy]
mechanism = "distributed"
epsilon = 12
delta = 0.01
"""


def test_devices_of_a_comparison_are_charged_for_all_of_its_runs(
    write_task, tmp_path, forked_commands
):
    write_task()
    (tmp_path / "job.toml").write_text(JOB)

    def compare(*arguments):
        command = (
            *("isthmus", "compare", "job.toml", "--vary", "federated.proximal=0,0.5"),
            *("--seeds", "1", "--run-dir", "runs", "--json", "results.json", *arguments),
        )
        return subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=forked_commands.environment(),
        )

    refused = compare()
    assert refused.returncode == 1
    assert "these 2 runs have the same data" in refused.stderr
    assert "only the first 1 fits" in refused.stderr
    assert not list((tmp_path / "runs").glob("*/job.json"))
    done = compare("--set", "privacy.participations=2")
    assert done.returncode == 0, done.stderr
    (total,) = json.loads((tmp_path / "results.json").read_text())["privacy"]
    ledgers = [Ledger.read(path) for path in tmp_path.glob(f"runs/federated*/{LEDGER_FILE}")]
    shared = Ledger.read(tmp_path / "runs/privacy/devices.ledger")
    charges = [entry.charge for each in ledgers for entry in each.entries.values()]
    assert sorted(map(str, charges)) == sorted(str(e.charge) for e in shared.entries.values())
    assert max(each.epsilon("devices", 0.01) for each in ledgers) < total["epsilon"] <= 12
    assert total["epsilon"] == shared.epsilon("devices", 0.01)
    sentence = f"privacy: epsilon {total['epsilon']:.4g} of 12 at delta 0.01 for one device"
    assert sentence in done.stdout
    assert sentence in (tmp_path / "runs/comparison.html").read_text()
    (run, _) = sorted(tmp_path.glob("runs/federated*"))
    told = subprocess.run(
        ("isthmus", "privacy", "ledger", str(run)),
        capture_output=True,
        text=True,
        env=forked_commands.environment(),
    )
    assert f"all runs of the population together: epsilon {total['epsilon']:.4g}" in told.stdout
