import json
import stat

import pytest

from isthmus.errors import PeerMisbehaved, UpdateError, UserError
from isthmus_clients.training.secure import Credentials, SecureParticipation
from isthmus_privacy.secagg import Authority, History, RoundConfig, SigningKey

SEED = bytes(range(32))
AUTHORITY = Authority(bytes(32))


def device(memory):
    """A device as it is after its process has started."""
    credentials = Credentials(SEED, memory)
    enrolment = AUTHORITY.enrol("a", SigningKey(SEED).public, not_after=2**40)
    credentials.welcomed(AUTHORITY.public, enrolment.to_bytes())
    return credentials


def agree(credentials, round_=1, attempt=1, run="run"):
    """Have a device look at what a server proposes."""
    config = RoundConfig(
        run_id=run, round=round_, attempt=attempt, model_hash=bytes(32), size=8, clients_max=5
    )
    return SecureParticipation((run, round_, attempt), config.to_bytes(), bytes(32), credentials)


def test_a_round_cannot_be_repeated_by_having_the_device_restart(tmp_path):
    memory = tmp_path / "rounds.json"
    agree(device(memory))
    with pytest.raises(PeerMisbehaved, match="round 1 attempt 1 of run 'run' is not after round 1"):
        agree(device(memory))
    agree(device(memory), attempt=2)
    with pytest.raises(PeerMisbehaved, match="is not after round 1 attempt 2"):
        agree(device(memory))


def test_the_history_is_the_owner_s_alone(tmp_path):
    agree(device(tmp_path / "rounds.json"))
    assert stat.S_IMODE((tmp_path / "rounds.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"run": 1}', '{"run": {"last": null}}'])
def test_a_history_that_cannot_be_read_stops_the_device(tmp_path, damage):
    (tmp_path / "rounds.json").write_text(damage)
    with pytest.raises(UserError, match=r"says which rounds this device was in, and cannot be"):
        device(tmp_path / "rounds.json")


def test_a_device_that_cannot_write_down_its_history_does_not_go_on(tmp_path):
    credentials = device(tmp_path / "gone" / "rounds.json")
    with pytest.raises(UpdateError, match="cannot write down which rounds it was in"):
        agree(credentials)


def test_what_was_written_is_what_is_known(tmp_path):
    credentials = device(tmp_path / "rounds.json")
    agree(credentials)
    written = json.loads((tmp_path / "rounds.json").read_text())
    assert History(written).state() == credentials.history.state() != {}


def test_what_is_written_with_each_round_does_not_grow_with_the_runs_that_are_over(tmp_path):
    """Months of jobs, one after another: of those before there is a line, and it says no."""
    credentials, sizes = device(tmp_path / "rounds.json"), []
    cohort = frozenset(f"device-{number:04}" for number in range(100))
    for run in range(20):
        config = agree(credentials, run=f"run-{run:02}").config
        for _ in range(40):
            credentials.history.note_unmasked(config, cohort)
        sizes.append(len(json.dumps(credentials.history.state())))
    assert sizes[0] > 32 * 100 * len("device-0000")
    assert sizes[19] - sizes[9] < 10 * 100
    with pytest.raises(PeerMisbehaved, match="of run 'run-00' is not after its end: this device"):
        agree(device(tmp_path / "rounds.json"), round_=2, run="run-00")
