"""A lock is held by one process, and others can see whether it is."""

import contextlib
import subprocess
import sys

import pytest

from isthmus.errors import UserError
from isthmus.system.file_lock import file_lock, is_locked

HOLD = """
import sys
from pathlib import Path
from isthmus.system.file_lock import file_lock
with file_lock(Path(sys.argv[1]), "taken"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_seen_and_ends_with_its_process(tmp_path):
    path = tmp_path / "lock"
    assert not is_locked(path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        assert is_locked(path)
        with pytest.raises(UserError, match=r"^taken$"), file_lock(path, "taken"):
            pass
        holder.kill()
    assert not is_locked(path)
    with file_lock(path, "taken"):
        assert is_locked(path)


def earlier(signature):
    return signature == "one"


def test_a_lock_is_taken_from_a_holder_that_may_be_followed(tmp_path):
    """A holder may still run: what it has locked is in no folder any more."""
    path = tmp_path / "lock"
    with file_lock(path, "taken", signature="one"):
        with pytest.raises(UserError, match=r"^taken$"), file_lock(path, "taken"):
            pass
        with file_lock(path, "taken", signature="two", follows=earlier):
            with (
                pytest.raises(UserError, match=r"^taken$"),
                file_lock(path, "taken", signature="three", follows=earlier),
            ):
                pass
            assert is_locked(path)
        assert not is_locked(path)


def test_who_has_not_signed_is_not_followed(tmp_path):
    """A command that uses the file after a server has not its signature."""
    path = tmp_path / "lock"
    with file_lock(path, "taken", signature="one"):
        pass
    with (
        file_lock(path, "taken"),
        pytest.raises(UserError, match=r"^taken$"),
        file_lock(path, "taken", signature="two", follows=earlier),
    ):
        pass


def test_the_lock_of_another_follower_stays_in_its_place(tmp_path):
    """It has followed the same holder, after its signature was read here."""
    path = tmp_path / "lock"
    with contextlib.ExitStack() as stack:
        stack.enter_context(file_lock(path, "taken", signature="one"))

        def at_last(signature):
            if not earlier(signature):
                return False
            stack.enter_context(file_lock(path, "taken", signature="two", follows=earlier))
            return True

        with (
            pytest.raises(UserError, match=r"^taken$"),
            file_lock(path, "taken", signature="three", follows=at_last),
        ):
            pass
        assert path.read_text() == "two"
        assert is_locked(path)
