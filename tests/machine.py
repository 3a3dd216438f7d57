"""What some tests need of the machine, besides the packages of constraints.txt.

Without it these tests are skipped. A reason says what is missing and, after a semicolon, what to do
about it; the last line of a test run repeats the second part.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

BIN = Path(sys.executable).parent

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
]
HELM = shutil.which("helm", path=f"{BIN}:{os.environ['PATH']}")
DATA = Path(os.environ.get("ISTHMUS_TEST_DATA") or "/nonexistent")
"""A folder with real data sets, which are not part of the project."""

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium; install chromium"
)
needs_helm = pytest.mark.skipif(HELM is None, reason="there is no helm; install helm")
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd; install systemd"
)
needs_data = pytest.mark.skipif(
    not (DATA / "heart-disease").is_dir(),
    reason="real data sets are not part of the project; set ISTHMUS_TEST_DATA to their folder",
)
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU; run on a machine with one"
)
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="there is no Ray; pip install 'isthmus[ray]'",
)
