import os
import sys
import time

import pytest
from harness.processes import Tree, free_port, memory, reset_peak, started, wait_for_port

BURN = "import time\nwhile time.process_time() < 0.5: pass"


def python(code):
    return [sys.executable, "-S", "-c", code]


def until(condition):
    end = time.monotonic() + 100.0  # only a hang is that long
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_child_that_burned_and_was_waited_for_counts(tmp_path):
    code = f"""
import subprocess, sys, time
subprocess.run([sys.executable, "-S", "-c", {BURN!r}])
print("waited", flush=True)
time.sleep(600)
"""
    with started(python(code), tmp_path / "log") as program:
        until(lambda: "waited" in program.log.read_text())
        assert len(program.tree.pids()) == 1
        assert 0.5 <= program.tree.cpu_seconds() < 2.0


def test_a_zombie_counts_once(tmp_path):
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", {BURN!r}], stdout=subprocess.PIPE)
child.stdout.read()
time.sleep(0.1)
print("dead", flush=True)
time.sleep(600)
"""
    with started(python(code), tmp_path / "log") as program:
        until(lambda: "dead" in program.log.read_text())
        assert len(program.tree.pids()) == 2
        assert 0.5 <= program.tree.cpu_seconds() < 2.0


def test_grandchildren_in_another_session_are_in_the_tree_and_die_with_it(tmp_path):
    grandchild = "import os, time; os.setsid(); print('there', flush=True); time.sleep(600)"
    code = f"""
import subprocess, sys
subprocess.run([sys.executable, "-S", "-c", {grandchild!r}])
"""
    with started(python(code), tmp_path / "log") as program:
        until(lambda: "there" in program.log.read_text())
        pids = program.tree.pids()
        assert len(pids) == 2
    until(lambda: Tree(*pids).pids() == [])


def test_a_process_seen_once_stays_when_its_parent_dies(tmp_path):
    seen = tmp_path / "seen"
    code = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
while not os.path.exists({str(seen)!r}):
    time.sleep(0.01)
"""
    with started(python(code), tmp_path / "log") as program:
        until(lambda: len(program.tree.pids()) == 2)
        seen.touch()
        program.wait(100.0)
        orphans = program.tree.pids()
        assert len(orphans) == 1
        assert orphans != [program.popen.pid]
    until(lambda: Tree(*orphans).pids() == [])


def test_strangers_are_not_counted(tmp_path):
    with started(python("import time; time.sleep(600)"), tmp_path / "log") as program:
        assert os.getpid() not in program.tree.pids()


def test_peak_memory_starts_again_after_a_reset(tmp_path):
    code = """
import time
block = b"x" * 50_000_000
del block
print("freed", flush=True)
time.sleep(600)
"""
    with started(python(code), tmp_path / "log") as program:
        until(lambda: "freed" in program.log.read_text())
        pid = program.popen.pid
        resident = memory(pid, "VmRSS")
        assert memory(pid, "VmHWM") > resident + 40_000_000
        reset_peak(pid)
        assert memory(pid, "VmHWM") < resident + 10_000_000


def test_a_field_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="VmNone"):
        memory(os.getpid(), "VmNone")


def test_failure_shows_the_last_words(tmp_path):
    code = "print('I have no port to listen on'); raise SystemExit(3)"
    with started(python(code), tmp_path / "log") as program:
        with pytest.raises(RuntimeError, match=r"exit code 3[\s\S]*I have no port"):
            program.wait(100.0)
        with pytest.raises(RuntimeError, match="ended before it listened"):
            wait_for_port(free_port(), program, 100.0)


def test_a_port_nobody_opens_in_time(tmp_path):
    with (
        started(python("import time; time.sleep(600)"), tmp_path / "log") as program,
        pytest.raises(RuntimeError, match=r"does not listen on port \d+ after 0\.2 s"),
    ):
        wait_for_port(free_port(), program, 0.2)
