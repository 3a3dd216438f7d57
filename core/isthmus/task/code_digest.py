"""A digest of a task's code, equal on machines that train with the same Python files.

It does not depend on how the files were installed: from a package or by hand. Two machines with
different packages of the same Python files agree; what else a package contains is not covered.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path, PurePosixPath

from isthmus.errors import TaskError


def code_digest(source: str, base: Path) -> bytes:
    """SHA-256 over the Python files of a task.

    These are all in the task's folder, `table` for `table/task.py:Table`, or the one file of a task
    without a folder. For `package.module:Name`, which only a server on the same machine may use, it
    is the file of the module.

    Args:
        source: the job's `task.source`.
        base: directory of relative paths.

    Raises:
        TaskError: a file cannot be read.
    """
    where = source.rpartition(":")[0]
    try:
        files = _files(where, base)
        digests = {name: hashlib.sha256(path.read_bytes()).digest() for name, path in files.items()}
    except (OSError, ImportError, ValueError) as error:
        raise TaskError(f"the code of task.source={source!r} cannot be read: {error}") from None
    total = hashlib.sha256(b"isthmus/task-code/1")
    for name, digest in sorted(digests.items()):
        total.update(len(name.encode()).to_bytes(4, "little") + name.encode() + digest)
    return total.digest()


def _files(where: str, base: Path) -> dict[str, Path]:
    """Files by the name that the digest contains."""
    if not where.endswith(".py"):
        spec = importlib.util.find_spec(where)
        return {where: Path(spec.origin)} if spec is not None and spec.origin else {}
    parts = PurePosixPath(where).parts
    if len(parts) == 1 or parts[0] in ("/", ".."):
        return {where: base / where}
    folder = base / parts[0]
    found = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*.py")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    }
    return {**found, "/".join(parts[1:]): base / where}
