import select
import subprocess
import sys

CHILD = (
    "from isthmus.system.process import die_with_parent as d; d(); print('up', flush=True); input()"
)
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


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
