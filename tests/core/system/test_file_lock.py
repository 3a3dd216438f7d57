"""A lock is held by one process, and others can see whether it is."""

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
