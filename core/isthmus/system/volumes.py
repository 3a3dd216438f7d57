"""Which directories are on a volume that several machines may have mounted."""

from __future__ import annotations

import re
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
"""What is mounted where (proc_pid_mountinfo(5)); only Linux has it."""

_SHARED = {
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "gfs2",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "ocfs2",
    "orangefs",
    "pvfs2",
    "smb3",
}
"""File systems of networks and clusters; those in user space (`fuse.NAME`) may be some, too."""


def is_shared(folder: Path) -> bool:
    """Whether a directory is on a volume of a network or a cluster; False where that is not known.

    Memory that processes map from a file is the same for all of one machine, and not for those of
    several.
    """
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    place = folder.resolve()
    kind = ""
    depth = -1
    for line in lines:
        mount, _, source = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) < 5:
            continue
        root = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
        # The last of those that are as deep: it hides the others.
        if place.is_relative_to(root) and len(root.parts) >= depth:
            depth = len(root.parts)
            kind = source.split(" ")[0]
    return kind in _SHARED or kind.startswith("fuse.")
