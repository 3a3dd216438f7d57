"""A package outside the repository: a module with entry points, in a folder of a test."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path


class OutsidePackage:
    """An installed distribution with one module, found by `sys.path` or `PYTHONPATH`."""

    def __init__(self, folder, module, source, entry_points):
        """Write it.

        Args:
            folder: to find it in.
            module: name of its module.
            source: text of the module.
            entry_points: names of attributes of the module by "group/name".
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{module}.py").write_text(source)
        metadata = self.folder / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = []
        for key, attribute in entry_points.items():
            group, _, name = key.partition("/")
            lines.append(f"[{group}]\n{name} = {module}:{attribute}\n")
        (metadata / "entry_points.txt").write_text("\n".join(lines))

    @property
    def environment(self):
        """The variables of a process that finds the package."""
        paths = [str(self.folder), os.environ.get("PYTHONPATH", "")]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def isthmus(self, *arguments, cwd, forked_commands=None):
        """Run a command with the package installed; returns what ended.

        With `forked_commands` it does not import PyTorch anew.
        """
        program = [sys.executable, "-m", "isthmus"]
        if forked_commands is not None:
            program = [forked_commands.folder / "isthmus"]
        return subprocess.run(
            [*program, *map(str, arguments)],
            cwd=cwd,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    @contextlib.contextmanager
    def on_path(self, monkeypatch):
        """Find the package in this process."""
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(self.folder))
            yield self
