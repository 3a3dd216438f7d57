"""`isthmus runs verify` checks what devices of secure rounds have signed."""

import base64
import json

import pytest

from isthmus.errors import DamagedError, UserError
from isthmus_server.read.transcript import Transcript
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.recovery import verify


@pytest.fixture
async def signed(deployment):
    """The run directory of a secure run, and the lines of its signed sums."""
    deployment.honest = False
    await deployment.start()
    deployment.faults["a"][(2, 1)] = "the battery is empty"
    store = deployment.create_run("run", "rounds=2")
    await Coordinator(RunParts.of(store, deployment.link)).run()
    path = store.directory / "signed-sums.jsonl"
    return store.directory, path, [json.loads(line) for line in path.read_text().splitlines()]


def finding(directory):
    (found,) = [each for each in verify(directory) if "signed" in each.checked]
    return found


def write(path, lines):
    path.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))


def flipped(line, key, at):
    data = bytearray(base64.b64decode(line[key]))
    data[at] ^= 1
    return {**line, key: base64.b64encode(data).decode()}


async def test_intact_sums_are_counted(signed):
    directory, path, lines = signed
    whole = "sums with valid signatures, of 2 of 2 committed rounds with devices"
    count = sum("roster" in line for line in lines)
    assert finding(directory).checked == f"signed-sums.jsonl: {count} {whole}"
    path.unlink()
    assert not [each for each in verify(directory) if "signed" in each.checked]


async def test_a_file_that_was_cut_is_damage(signed):
    directory, path, lines = signed
    write(path, lines[:-1])
    assert "it has no sum of round 2, and one of an earlier round" in finding(directory).damage
    write(path, lines)
    path.write_bytes(path.read_bytes()[:-30])  # as a crash would leave it before the commit
    assert "it has no sum of round 2, and one of an earlier round" in finding(directory).damage


@pytest.mark.parametrize("job", ["another", "\ud800"])
async def test_another_job_than_devices_have_opened_is_damage(signed, job):
    directory, path, lines = signed
    write(path, [{"job": job}, *lines[1:]])
    assert "its devices have opened another job than those" in finding(directory).damage


@pytest.mark.parametrize("config", ["", "AAAA", "€€", "\ud800"])
async def test_what_cannot_be_read_is_named_by_the_transcript(signed, deployment, config):
    _, path, lines = signed
    store = deployment.reopen(deployment._stores[0])
    store.reopen()  # under way: sums that its log does not have are left out
    write(path, [{**line, "config": config} if "roster" in line else line for line in lines])
    with pytest.raises(DamagedError, match=r"a sum of .*signed-sums\.jsonl has no configuration"):
        list(Transcript(store).lines())
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"signed-sums\.jsonl"):
        list(Transcript(store).lines())


@pytest.mark.parametrize(
    ("key", "at", "reason"),
    [
        ("roster", -1, "has not signed its configuration"),
        ("roster", 150, "is not of its authority"),
        ("signatures", -1, "of its survivors is not valid"),
        ("survivors", -1, "fewer than 3 devices are in it"),
        ("survivors", 40, "its survivors are of another roster"),
        ("purpose", -1, "its purpose is not the one that the devices have signed"),
        ("config", -20, "has not signed its configuration"),
    ],
)
async def test_a_changed_message_is_damage(signed, key, at, reason):
    directory, path, lines = signed
    at_sum = next(number for number, line in enumerate(lines) if "roster" in line)
    lines[at_sum] = flipped(lines[at_sum], key, at)
    write(path, lines)
    damage = finding(directory).damage
    assert reason in damage
    assert "sum 1 of" in damage


async def test_a_sum_that_is_there_twice_or_not_in_the_log_is_damage(signed):
    directory, path, lines = signed
    write(path, [*lines, lines[-1]])
    assert "it was there before" in finding(directory).damage
    path.write_text("{}\n")
    assert "line 1 of" in finding(directory).damage


async def test_a_sum_of_others_than_the_record_accepts_is_damage(signed, deployment):
    directory, *_ = signed
    store = deployment.reopen(deployment._stores[0])
    (text,) = store.log.connection.execute(
        "SELECT record FROM attempts WHERE round=1 AND state='committed'"
    ).fetchone()
    record = json.loads(text)
    record["receipts"][0]["status"] = "rejected"
    store.log.connection.execute(
        "UPDATE attempts SET record=? WHERE round=1 AND state='committed'", (json.dumps(record),)
    )
    store.log.write_head()
    store.close()
    assert "have signed the sum of round 1 are not those" in finding(directory).damage
