"""The control store: a program that can reach its port, and has not the key, commands nobody."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.datacenter.conftest import wait_until
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from isthmus.errors import UserError
from isthmus.job import with_changes, write_job
from isthmus_datacenter.messages import Command
from isthmus_datacenter.service.control_store import ControlStore
from isthmus_datacenter.service.signed_store import (
    MAX_VALUE_BYTES,
    ForgedValueError,
    SignedStore,
    new_key,
    read_key_file,
    write_key_file,
)

KEY = new_key()


@pytest.fixture(name="inner")
def inner_() -> Any:
    return HashStore()


def test_a_value_is_read_with_the_key_that_it_was_written_with(inner: Any) -> None:
    store = SignedStore(inner, KEY)
    store.set("text", "value")
    store.set("bytes", bytes(range(256)))
    assert store.get("text") == b"value"
    assert store.multi_get(["text", "bytes"]) == [b"value", bytes(range(256))]
    with pytest.raises(ForgedValueError, match="not signed with this datacenter's key"):
        SignedStore(inner, new_key()).get("text")


def test_a_value_is_of_its_key_only(inner: Any) -> None:
    """What was signed for one command is not one for another."""
    store = SignedStore(inner, KEY)
    store.set("command/1.0/7", "value")
    inner.set("command/1.0/8", inner.get("command/1.0/7"))
    with pytest.raises(ForgedValueError):
        store.get("command/1.0/8")


@pytest.mark.parametrize("forged", [b"", b"value", b"x" * 32, b"x" * 1000])
def test_what_is_not_signed_is_refused(inner: Any, forged: bytes) -> None:
    inner.set("key", forged)
    store = SignedStore(inner, KEY)
    with pytest.raises(ForgedValueError):
        store.get("key")
    with pytest.raises(ForgedValueError):
        store.multi_get(["key"])
    with pytest.raises(ForgedValueError):
        store.compare_set("key", "other", "mine")


def test_the_first_of_two_values_stands(inner: Any) -> None:
    store = SignedStore(inner, KEY)
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "", "second") == b"first"
    assert store.compare_set("key", "first", "third") == b"third"


def test_a_value_has_a_maximum(inner: Any) -> None:
    with pytest.raises(ValueError, match="too long"):
        SignedStore(inner, KEY).set("key", bytes(MAX_VALUE_BYTES + 1))


def test_agents_have_different_numbers() -> None:
    service = ControlStore.host(KEY)
    agent = ControlStore.connect(KEY, "127.0.0.1", service.port)
    assert [agent.claim_node(5, 2), service.claim_node(5, 2), service.claim_node(6, 2)] == [0, 1, 0]


def test_a_key_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "state" / "control.key"
    with pytest.raises(FileNotFoundError):
        read_key_file(path)
    key = write_key_file(path)
    assert read_key_file(path) == key
    key = write_key_file(path)
    assert read_key_file(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        read_key_file(path)
    path.chmod(0o600)
    path.write_text("0" * 63)
    with pytest.raises(UserError, match="not a key of the control store"):
        read_key_file(path)


class _Marks:
    """A pickle that makes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_another_user_cannot_command_ranks(
    start_datacenter: Any, make_setup: Any, tmp_path: Path
) -> None:
    """Written into every value and where the next command is awaited; and the group goes on."""
    mark = tmp_path / "executed"
    code = tmp_path / "forged.py"
    code.write_text(f"open({str(mark)!r}, 'w').close()\n")
    driver = start_datacenter()
    setup = make_setup("Table", {"dropout": 0.2})
    driver.open("run", setup)
    first = driver.train("run", 0, 2, hand_back=True)
    store = TCPStore("127.0.0.1", driver.service.group._store.port, is_master=False)
    job = with_changes(setup.job, {"task.source": f"{code}:Task"})
    opened = Command(op="open", run_id="forged", job=write_job(job), base=str(tmp_path))
    forged = json.dumps(dataclasses.asdict(opened))
    # What PyTorch's own rendezvous reads from its store is a pickle.
    poisoned = pickle.dumps(_Marks(mark))
    keys = store.list_keys()
    incarnation = next(key for key in keys if key.startswith("ready/")).split("/")[1]
    for key in keys:
        store.set(key, poisoned)  # type: ignore[arg-type]
    for number in range(10):
        store.set(f"command/{incarnation}/{number}", forged)
    wait_until(lambda: b"not signed" in _logs(driver.service.group.state))
    assert driver.train("run", 0, 2, hand_back=True)[1] == first[1]
    assert not mark.exists()


def _logs(state: Path) -> bytes:
    return b"".join(path.read_bytes() for path in (state / "logs").rglob("*.log"))


def test_the_key_is_in_no_argument_and_no_environment(
    warm_datacenter: Any, make_setup: Any
) -> None:
    driver = warm_datacenter
    driver.open("key", make_setup("Table", {"dropout": 0.2}))
    key = driver.service.group._key.hex().encode()
    assert len(driver.rank_pids()) == 2
    for pid in driver.rank_pids().values():
        for name in ("cmdline", "environ"):
            assert key not in Path(f"/proc/{pid}/{name}").read_bytes()
