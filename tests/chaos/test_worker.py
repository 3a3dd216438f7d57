"""In a process under faults, writes fail and the clock jumps as its control block says."""

import contextlib
import errno
import json
import sqlite3
import sys
import time

import pytest
from tests import forked

from isthmus.system.private_files import write_private_file
from isthmus_chaos import control_block, worker
from isthmus_server.storage.checkpoints import replacing


def in_a_process(folder, block, do, pipe):
    """Run `do(folder, control)` as a program of the deployment, and send what it returns."""
    worker.install()
    sys.argv = ["isthmus", str(block), str(folder), "--version"]
    with contextlib.suppress(SystemExit):
        worker.run()
    pipe.send(json.dumps(do(folder, control_block.ControlBlock(block))))


@pytest.fixture
def under_faults(tmp_path):
    def run(do):
        folder = tmp_path / "state"
        folder.mkdir()
        ours, theirs = forked.context().Pipe(duplex=False)
        arguments = (folder, tmp_path / "block", do, theirs)
        process = forked.context().Process(target=in_a_process, args=arguments)
        process.start()
        theirs.close()
        result = json.loads(ours.recv())
        process.join()
        return result

    return run


def attempt(work):
    """The errno, or SQLite's name, of the error that `work` raises; 0 for none."""
    try:
        work()
    except OSError as error:
        return error.errno
    except sqlite3.Error as error:
        return error.sqlite_errorname
    return 0


def fail_in_every_way(folder, control):
    def checkpoint():
        with replacing(folder / "model") as file:
            file.write(bytes(100_000))

    db = sqlite3.connect(folder / "log.sqlite", isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("CREATE TABLE rows (value TEXT)")
    results = {}
    for fault in (
        control_block.NO_FAULT,
        control_block.FULL_DISK,
        control_block.IO_ERROR,
        control_block.TORN_WRITE,
        control_block.NO_FAULT,
    ):
        control.disk = fault
        insert = [attempt(lambda: db.execute("INSERT INTO rows VALUES ('x')")) for _ in range(2)]
        results.setdefault(str(fault), []).append(
            [
                attempt(checkpoint),
                attempt(lambda: write_private_file(folder / "key", b"secret")),
                attempt(lambda: (folder.parent / "elsewhere").write_text("x")),
                *insert,
            ]
        )
    torn = (folder / "model.tmp").exists()
    count = db.execute("SELECT COUNT(*) FROM rows").fetchone()[0]
    hits = control.hits
    return {"results": results, "rows": count, "torn": torn, "hits": hits}


def test_writes_in_the_folder_fail_while_the_fault_lasts(under_faults):
    found = under_faults(fail_in_every_way)
    good = [0, 0, 0, 0, 0]
    broken = [errno.EIO, errno.EIO, 0, "SQLITE_IOERR_WRITE", "SQLITE_IOERR_WRITE"]
    full = [errno.ENOSPC, errno.ENOSPC, 0, "SQLITE_FULL", "SQLITE_FULL"]
    assert found["results"] == {
        str(control_block.NO_FAULT): [good, good],
        str(control_block.FULL_DISK): [full],
        str(control_block.IO_ERROR): [broken],
        str(control_block.TORN_WRITE): [broken],
    }
    assert found["rows"] == 4
    assert found["hits"] >= 12


def jump(folder, control):
    before = time.time()
    control.clock_offset = -3600.0
    return {"moved": time.time() - before, "steady": time.monotonic() > 0}


def test_the_clock_jumps(under_faults):
    assert under_faults(jump)["moved"] == pytest.approx(-3600, abs=60)
