"""Secure aggregation on a device: the history of rounds and its file."""

import json
import stat

import pytest

from isthmus.errors import PeerMisbehaved, UpdateError, UserError
from isthmus_clients.training.secure import Credentials, SecureParticipation
from isthmus_privacy.secagg import Authority, History, RoundConfig, SigningKey

SEED = bytes(range(32))
AUTHORITY = Authority(bytes(32))


def device(history_file):
    """Credentials of a device after a start of its process."""
    credentials = Credentials(SEED, history_file)
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
    )
    about = (run, round_, attempt)
    return SecureParticipation(about, config.to_bytes(), bytes(32), bytes(32), (), credentials)


def test_a_round_cannot_be_repeated_by_having_the_device_restart(tmp_path):
    history_file = tmp_path / "rounds.json"
    propose(device(history_file))
    with pytest.raises(PeerMisbehaved, match="round 1 attempt 1 of run 'run' is not after round 1"):
        propose(device(history_file))
    propose(device(history_file), attempt=2)
    with pytest.raises(PeerMisbehaved, match="is not after round 1 attempt 2"):
        propose(device(history_file))


def test_only_the_owner_can_read_the_history(tmp_path):
    propose(device(tmp_path / "rounds.json"))
    assert stat.S_IMODE((tmp_path / "rounds.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"draw": 0}', '{"draw": 0, "runs": {"run": {"last": null}}}']
)
def test_a_history_that_cannot_be_read_stops_the_device(tmp_path, damage):
    (tmp_path / "rounds.json").write_text(damage)
    with pytest.raises(UserError, match=r"records which rounds this device was in, and cannot be"):
        device(tmp_path / "rounds.json")


def test_a_device_that_cannot_write_its_history_does_not_continue(tmp_path):
    credentials = device(tmp_path / "missing" / "rounds.json")
    with pytest.raises(UpdateError, match="cannot record which rounds it was in"):
        propose(credentials)


def test_the_file_holds_the_whole_history(tmp_path):
    credentials = device(tmp_path / "rounds.json")
    propose(credentials)
    written = json.loads((tmp_path / "rounds.json").read_text())
    assert History(written).state() == credentials.history.state() != {}


def test_the_file_does_not_grow_with_the_number_of_ended_runs(tmp_path):
    """After months of jobs, an ended run is one line, which refuses to continue it."""
    credentials, sizes = device(tmp_path / "rounds.json"), []
    cohort = frozenset(f"device-{number:04}" for number in range(100))
    for run in range(20):
        config = propose(credentials, run=f"run-{run:02}").config
        for _ in range(40):
            credentials.history.note_unmasked(config, cohort)
        sizes.append(len(json.dumps(credentials.history.state())))
    assert sizes[0] > 32 * 100 * len("device-0000")
    assert sizes[19] - sizes[9] < 10 * 100
    with pytest.raises(PeerMisbehaved, match="of run 'run-00' is not after its end: this device"):
        propose(device(tmp_path / "rounds.json"), round_=2, run="run-00")
