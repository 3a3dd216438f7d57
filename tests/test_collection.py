"""The suite is collected on a machine that has nothing which only some tests need."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BARE_MACHINE = """
import importlib.util
import shutil

shutil.which = lambda *_, **__: None
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "torchvision" else find_spec(name, *a)
"""


def test_the_whole_suite_is_collected_on_a_bare_machine(tmp_path):
    """Without Chromium, helm, torchvision, data sets, or other programs that tests look for."""
    (tmp_path / "bare_machine.py").write_text(BARE_MACHINE)
    options = ["--collect-only", "-q", "-p", "bare_machine", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=ROOT,
        env={"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert re.search(r"^\d{4,} tests collected", done.stdout, re.MULTILINE)
