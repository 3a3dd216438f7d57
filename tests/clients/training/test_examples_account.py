"""The account of a device's examples: what is charged stays charged, and budgets are kept."""

import os
import signal
import subprocess
import sys

import pytest

from isthmus.errors import PeerMisbehaved, UpdateError
from isthmus.job.federated import FederatedSection
from isthmus.job.privacy import FederatedPrivacy
from isthmus_clients.training.examples_account import ExamplesAccount, spent_of
from isthmus_privacy.dp.ledger import LedgerDamaged
from isthmus_privacy.dp_sgd.device_examples import DeviceExamplesPlan

BUDGET = r"^this device has trained 3 times in this run, and once more would exceed the 3 particip"
OWNERS = r"training of all runs would exceed an epsilon of .* \(\[privacy\] examples_epsilon"


def plan_of(participations=3, examples=64, **privacy):
    table = FederatedPrivacy(epsilon=5, delta=1e-3, participations=participations, **privacy)
    settings = FederatedSection(batch_size=16, local_steps=10, privacy=table)
    return DeviceExamplesPlan.of(settings, rounds=9, examples=examples)


@pytest.fixture(params=["on disk", "in memory"])
def account(request, tmp_path):
    return ExamplesAccount(tmp_path / "state" if request.param == "on disk" else None)


def test_no_more_participations_than_the_noise_is_made_for(account):
    plan = plan_of()
    for attempt in range(1, 4):  # of one round: each is charged
        account.charge(plan, "run", 1, attempt)
    with pytest.raises(PeerMisbehaved, match=BUDGET) as refused:
        account.charge(plan, "run", 2, 1)
    assert refused.value.code == "examples-asked-too-often"
    account.charge(plan, "another run", 1, 1)  # has a budget of its own


def test_another_number_of_examples_is_added_up(account):
    """As where data were added while a run goes on."""
    noise = plan_of(1).multiplier
    account.charge(plan_of(2, noise=noise), "run", 1, 1)
    with pytest.raises(PeerMisbehaved, match="trained 1 times in this run") as refused:
        account.charge(plan_of(2, examples=66, noise=noise), "run", 2, 1)
    assert refused.value.code == "examples-beyond-the-jobs-budget"


@pytest.mark.parametrize("other", [{"participations": 4}, {"noise": 9.0}])
def test_a_run_has_one_budget(account, other):
    """The server opens the run again, with another job."""
    account.charge(plan_of(), "run", 1, 1)
    with pytest.raises(PeerMisbehaved, match="for a job with another budget") as refused:
        account.charge(plan_of(**other), "run", 1, 2)
    assert refused.value.code == "examples-of-another-job"
    account.charge(plan_of(), "run", 1, 2)


def test_the_owners_limit_is_for_all_runs_together(tmp_path):
    account = ExamplesAccount(tmp_path, epsilon=6, delta=1e-3)
    for run in ("a", "b"):
        account.charge(plan_of(), run, 1, 1)
    with pytest.raises(PeerMisbehaved, match=OWNERS) as refused:
        charge_many(account)
    assert refused.value.code == "examples-beyond-the-owners-limit"
    together, runs = spent_of(tmp_path, 1e-3)
    assert runs["a"][0] == 1
    assert 3 < len(runs) < 20
    assert 5 < together <= 6


def charge_many(account):
    for number in range(20):
        account.charge(plan_of(), f"run {number}", 1, 1)


KILLED = """
import os, signal
from pathlib import Path
from tests.clients.training.test_examples_account import plan_of
from isthmus_clients.training.examples_account import ExamplesAccount

ExamplesAccount(Path({path!r})).charge(plan_of(), "run", 1, 1)
os.kill(os.getpid(), signal.SIGKILL)  # before it trains
"""


def test_a_kill_between_charge_and_training_gives_nothing_back(tmp_path):
    for count in (1, 2, 3):
        killed = subprocess.run(
            [sys.executable, "-c", KILLED.format(path=str(tmp_path))], env=os.environ, check=False
        )
        assert killed.returncode == -signal.SIGKILL
        assert spent_of(tmp_path, 1e-3)[1]["run"][0] == count
    with pytest.raises(PeerMisbehaved, match=BUDGET):
        ExamplesAccount(tmp_path).charge(plan_of(), "run", 1, 4)


@pytest.mark.parametrize("damage", ["cut", "edited", "lost", "headless"])
def test_a_ledger_that_is_not_the_one_that_was_written_is_refused(tmp_path, damage):
    account = ExamplesAccount(tmp_path)
    account.charge(plan_of(), "run", 1, 1)
    account.charge(plan_of(), "run", 2, 1)
    account._ledger.close()
    ledger, head = tmp_path / "examples.ledger", tmp_path / "examples.head"
    lines = ledger.read_bytes().splitlines(keepends=True)
    match damage:
        case "cut":
            ledger.write_bytes(lines[0])
        case "edited":
            ledger.write_bytes(ledger.read_bytes().replace(b'"steps":10', b'"steps":1'))
        case "lost":
            ledger.unlink()
        case "headless":
            head.unlink()
    with pytest.raises(UpdateError, match=r"^this device cannot record what training costs its ex"):
        ExamplesAccount(tmp_path).charge(plan_of(), "run", 3, 1)
    with pytest.raises(LedgerDamaged):
        spent_of(tmp_path, 1e-3)[1]


def test_a_charge_that_cannot_be_written_is_a_refusal_without_paths(tmp_path):
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(UpdateError, match=r"its own log says why$") as refused:
        ExamplesAccount(tmp_path / "state").charge(plan_of(), "run", 1, 1)
    assert str(tmp_path) not in str(refused.value)


def test_two_processes_do_not_use_one_ledger(tmp_path):
    first, second = ExamplesAccount(tmp_path), ExamplesAccount(tmp_path)
    first.charge(plan_of(), "run", 1, 1)
    with pytest.raises(UpdateError):
        second.charge(plan_of(), "run", 1, 2)
    first.charge(plan_of(), "run", 1, 2)
