"""Secure aggregation on a device: the history of rounds and its file."""

import shutil
import stat
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.errors import PeerMisbehaved, UpdateError
from isthmus_clients.device.owner_limits import parse
from isthmus_clients.device.secure_sessions import SecureSessions
from isthmus_clients.training.history_files import EMPTY, head_of, write_head
from isthmus_clients.training.secure import SecureParticipation
from isthmus_privacy.crypto.keys import SigningKey
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.identity import Authority

SEED = bytes(range(32))
AUTHORITY = Authority(bytes(32))


def device(history_file, privacy=None):
    """Credentials of a device after a start of its process, with the owner's requirements."""
    if history_file.parent.exists() and not head_of(history_file).exists():
        write_head(history_file, EMPTY)
    identity = Ed25519PrivateKey.from_private_bytes(SEED)
    credentials = SecureSessions("a", identity, history_file, privacy, threads=1)._enrolled()
    enrolment = AUTHORITY.enrol("a", SigningKey(SEED).public, not_after=2**40)
    credentials.welcomed(AUTHORITY.public, enrolment.to_bytes())
    return credentials


def propose(credentials, round_=1, attempt=1, run="run"):
    """Propose a configuration to a device."""
    config = RoundConfig(
        run_id=run,
        round=round_,
        attempt=attempt,
        model_hash=bytes(32),
        purpose=bytes(32),
        size=8,
        clients_max=5,
        draw=int(time.time()),
    )
    about = (run, round_, attempt)
    return SecureParticipation(about, config.to_bytes(), bytes(32), bytes(32), (), credentials)


def test_a_round_cannot_be_repeated_by_having_the_device_restart(tmp_path):
    history_file = tmp_path / "history.log"
    propose(device(history_file))
    with pytest.raises(PeerMisbehaved, match="round 1 attempt 1 of run 'run' is not after round 1"):
        propose(device(history_file))
    propose(device(history_file), attempt=2)
    with pytest.raises(PeerMisbehaved, match="is not after round 1 attempt 2"):
        propose(device(history_file))


def test_only_the_owner_can_read_the_history(tmp_path):
    propose(device(tmp_path / "history.log"))
    for name in ("history.log", "history.head"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_device_that_cannot_write_its_history_does_not_continue(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    credentials = device(state / "history.log")
    shutil.rmtree(state)
    with pytest.raises(UpdateError, match="cannot record which sums it was in"):
        propose(credentials)
    assert credentials.history.participations() == 0


def test_participations_are_counted_for_each_run_and_in_total(tmp_path):
    for run, attempt in (("a", 1), ("b", 1), ("a", 2)):
        propose(device(tmp_path / "history.log"), run=run, attempt=attempt)
    history = device(tmp_path / "history.log").history
    assert [history.participations(run) for run in ("a", "b", "c", None)] == [2, 1, 0, 3]


@pytest.mark.parametrize(
    ("limits", "runs", "sentence"),
    [
        ("participations_per_run = 2", "aab", "has taken part in 2 attempts of run 'a', its own"),
        ("participations = 3", "abc", "has taken part in 3 attempts of all runs, its own limit"),
    ],
)
def test_the_owner_limits_participations_also_across_restarts(tmp_path, limits, runs, sentence):
    privacy = parse(
        f"[privacy]\nclients_min = 2\nselection_slack = 1000\n{limits}", "policy.toml"
    ).privacy
    for number, run in enumerate(runs):
        propose(device(tmp_path / "history.log", privacy), run=run, attempt=number)
    with pytest.raises(PeerMisbehaved, match=sentence) as caught:
        propose(device(tmp_path / "history.log", privacy), run="a", attempt=9)
    assert caught.value.code.startswith("participation-limit")
    history = device(tmp_path / "history.log").history
    assert history.participations() == 3  # a refused attempt is not counted
