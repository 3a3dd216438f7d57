"""Code of the tests that scripts share, such as comparisons and planted faults."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make_importable() -> None:
    """Have `tests` and what it imports found, as pytest does from the same setting."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for folder in settings["tool"]["pytest"]["ini_options"]["pythonpath"]:
        sys.path.append(str(ROOT / folder))
