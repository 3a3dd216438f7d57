"""The history of a device is never begun anew without its owner."""

import json
import re
import shutil

import pytest
from click.testing import CliRunner

from isthmus.errors import UserError
from isthmus.identity import tls
from isthmus.identity.membership import Membership, prepare
from isthmus_clients.commands import client
from isthmus_clients.doctor import doctor_device
from isthmus_clients.training.history_files import begin_history
from isthmus_clients.training.history_log import HistoryLog
from isthmus_privacy.secagg.history import Begun
from isthmus_server.fleet.authority import CertificateAuthority, initialise

ENTRY = Begun("run", 1, 1, 1, 7)


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """The state directory of a device that has joined."""
    folder = tmp_path_factory.mktemp("fleet")
    initialise(folder / "server", ["localhost"])
    authority = CertificateAuthority(folder / "server")
    key, identity = prepare(folder / "phone")
    request, public = tls.signing_request(key), identity.public_key().public_bytes_raw()
    certificate, _ = authority.issue(request, kind="client", name="phone", identity=public)
    Membership.save(
        folder / "phone",
        server="localhost:1",
        authority=authority.certificate,
        enroller=bytes(32),
        key=key,
        certificate=tls.read_certificate(certificate),
    )
    return folder / "phone"


@pytest.fixture
def state(joined, tmp_path):
    return shutil.copytree(joined, tmp_path / "phone")


@pytest.fixture
def written(state):
    """The same after it has begun to take part in a sum."""
    HistoryLog(begin_history(Membership(state))).append(ENTRY)
    return state


def invoke(command, state, *options):
    return CliRunner().invoke(client, [command, "--state", str(state), *options])


@pytest.mark.parametrize("lost", [("history.log", "history.head"), ("history.head",)])
def test_a_device_does_not_start_without_the_history_it_has_begun(written, lost):
    for name in lost:
        (written / name).unlink()
    error = invoke("start", written).exception
    assert isinstance(error, UserError)
    assert re.search(rf"{lost[-1]} (is|are) missing, .* record of the sums", str(error))
    assert f"`isthmus client new-history --state {written}`" in str(error)
    assert not (written / "history.head").exists()


def test_history_lost_before_the_first_sum_is_noticed_too(state):
    (begin_history(Membership(state)).with_suffix(".head")).unlink()
    with pytest.raises(UserError, match="missing"):
        begin_history(Membership(state))


def test_history_is_begun_once(written):
    assert HistoryLog(begin_history(Membership(written))).entries == [ENTRY]


def test_a_crash_before_the_note_that_a_history_was_begun_changes_nothing(state):
    about = (state / "member.json").read_bytes()
    begin_history(Membership(state))
    (state / "member.json").write_bytes(about)
    assert HistoryLog(begin_history(Membership(state))).entries == []
    assert Membership(state).has_history


def test_the_owner_can_begin_a_new_history_after_the_old_one_was_lost(written):
    for name in ("history.log", "history.head"):
        (written / name).unlink()
    result = invoke("new-history", written)
    assert result.output == "phone has a new, empty record of its sums\n"
    assert HistoryLog(begin_history(Membership(written))).entries == []


def test_the_files_of_a_damaged_history_are_kept(written):
    damaged = b"x" + (written / "history.log").read_bytes()
    (written / "history.log").write_bytes(damaged)
    result = invoke("new-history", written)
    assert f"the old one are in {written / 'old-history'}" in result.output
    assert (written / "old-history" / "history.log").read_bytes() == damaged
    assert HistoryLog(begin_history(Membership(written))).entries == []


def test_an_intact_history_is_not_replaced(written):
    before = (written / "history.log").read_bytes()
    error = invoke("new-history", written).exception
    assert isinstance(error, UserError)
    assert "is intact, with 1 entries; nothing was changed" in str(error)
    assert (written / "history.log").read_bytes() == before


def examined(state):
    """What the doctor of a device says about its history."""
    printed = CliRunner().invoke(doctor_device, [str(state), "--json"]).output
    return {each["what"]: each for each in json.loads(printed)}["history"]


def test_the_doctor_of_a_device_that_was_in_no_sum_yet_misses_no_history(state):
    assert examined(state)["level"] == "OK"
    begin_history(Membership(state))  # as each start does
    assert not (state / "history.log").exists()
    assert examined(state)["level"] == "OK"


@pytest.mark.parametrize("lost", ["history.log", "history.head"])
def test_the_doctor_of_a_device_names_the_file_of_its_history_that_is_lost(written, lost):
    assert examined(written)["level"] == "OK"
    (written / lost).unlink()
    found = examined(written)
    assert (found["level"], found["found"].split()[0]) == ("FAIL", str(written / lost))
