import select
import subprocess
import sys

CHILD = (
    "from isthmus.system.process import die_with_parent as d; d(); print('up', flush=True); input()"
)
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"

PROTECTED = """
import ctypes
from isthmus.system.process import protect_memory
PR_GET_DUMPABLE = 3
protect_memory()
print(ctypes.CDLL(None).prctl(PR_GET_DUMPABLE, 0, 0, 0, 0))
"""


def test_protected_memory_is_not_dumped():
    """The kernel couples access by ptrace and /proc/PID/mem to the same property."""
    assert subprocess.check_output([sys.executable, "-c", PROTECTED], text=True) == "0\n"


def test_a_child_dies_with_its_parent_for_any_cause():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        # Parent and child both hold the pipe open: it ends when both are gone.
        assert select.select([parent.stdout], [], [], 100.0)[0]
        assert parent.stdout.read() == ""
