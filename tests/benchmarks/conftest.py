"""Benchmarks are scripts; their shared modules are imported from the benchmarks folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
