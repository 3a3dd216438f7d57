import os
import sys
import time

import pytest
from harness.processes import ProcessTree, free_port, memory, reset_peak, started, wait_for_port

BURN = "import time\nwhile time.process_time() < 0.5: pass"


def python(code):
    return [sys.executable, "-S", "-c", code]


def until(condition):
    end = time.monotonic() + 100.0  # only a hang is that long
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_cpu_time_of_a_waited_for_child_is_counted(tmp_path):
    code = f"""
import subprocess, sys, time
subprocess.run([sys.executable, "-S", "-c", {BURN!r}])
print("waited", flush=True)
time.sleep(600)
"""
    with started(python(code), tmp_path / "log") as program:
        until(lambda: "waited" in program.log.read_text())
        assert len(program.tree.pids()) == 1
        assert 0.45 <= program.tree.cpu_seconds() < 2.0  # ticks are rounded down


def test_cpu_time_of_a_zombie_is_counted_once(tmp_path):
    code = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", {BURN!r}])
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
print("dead", flush=True)
time.sleep(600)
"""
    with started(python(code), tmp_path / "log") as program:
        until(lambda: "dead" in program.log.read_text())
        assert len(program.tree.pids()) == 2
        assert 0.45 <= program.tree.cpu_seconds() < 2.0  # ticks are rounded down


def test_grandchildren_in_another_session_are_tracked_and_killed(tmp_path):
    grandchild = "import os, time; os.setsid(); print('there', flush=True); time.sleep(600)"
    code = f"""
import subprocess, sys
subprocess.run([sys.executable, "-S", "-c", {grandchild!r}])
"""
    with started(python(code), tmp_path / "log") as program:
        until(lambda: "there" in program.log.read_text())
        pids = program.tree.pids()
        assert len(pids) == 2
    until(lambda: ProcessTree(*pids).pids() == [])


def test_an_orphaned_process_stays_in_the_tree(tmp_path):
    signal_file = tmp_path / "signal_file"
    code = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
while not os.path.exists({str(signal_file)!r}):
    time.sleep(0.01)
"""
    with started(python(code), tmp_path / "log") as program:
        until(lambda: len(program.tree.pids()) == 2)
        signal_file.touch()
        program.wait(100.0)
        orphans = program.tree.pids()
        assert len(orphans) == 1
        assert orphans != [program.popen.pid]
    until(lambda: ProcessTree(*orphans).pids() == [])


def test_unrelated_processes_are_not_tracked(tmp_path):
    with started(python("import time; time.sleep(600)"), tmp_path / "log") as program:
        assert os.getpid() not in program.tree.pids()


def test_peak_memory_can_be_reset(tmp_path):
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


def test_an_unknown_memory_field_is_named():
    with pytest.raises(ValueError, match="VmNone"):
        memory(os.getpid(), "VmNone")


def test_failure_shows_the_end_of_the_output(tmp_path):
    code = "print('I have no port to listen on'); raise SystemExit(3)"
    with started(python(code), tmp_path / "log") as program:
        with pytest.raises(RuntimeError, match=r"exit code 3[\s\S]*I have no port"):
            program.wait(100.0)
        with pytest.raises(RuntimeError, match="ended before it listened"):
            wait_for_port(free_port(), program, 100.0)


def test_waiting_for_a_port_times_out(tmp_path):
    with (
        started(python("import time; time.sleep(600)"), tmp_path / "log") as program,
        pytest.raises(RuntimeError, match=r"does not listen on port \d+ after 0\.2 s"),
    ):
        wait_for_port(free_port(), program, 0.2)
