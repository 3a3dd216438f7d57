"""A filter of system calls: no new sockets, and nothing that leads out of the other restrictions.

Landlock does not restrict connections to the Unix sockets of other programs, such as a session bus
that starts commands, and a network namespace does not either. Without socket(2) there are none, and
of pairs of sockets only those that cannot be connected to anything else. The filter applies to a
process and all of its descendants (seccomp(2)).
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterable

from isthmus_clients.device.sandbox.system_calls import system_call

_CALLS = {
    # name: (x86_64, aarch64); None where the architecture has no such call
    "socket": (41, 198),
    # Processes outside, their memory and their descriptors.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # Namespaces and mounts, in which a process would have privileges again.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    # Modes, owners and sizes of files, which Landlock restricts late or not at all.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "truncate": (76, 45),
    # Memory and queues that other processes can open, and that outlive the ones that made them.
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # Memory of the kernel that no limit counts: pages in pipes, and large buffers of sockets.
    "vmsplice": (278, 75),
    "setsockopt": (54, 208),
    # Keys of the user's session, and rarely used parts of the kernel.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
_ABSENT = {
    "io_uring_setup": (425, 425),
    "clone3": (435, 435),
    "memfd_secret": (447, 447),
    # Rules of further restrictions: 64 bytes of the kernel for each, and any number of them.
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
"""Calls that a filter cannot look into, or that nothing uses: callers see a kernel without them and
do without."""
_MEMFD_CREATE = (319, 279)
_MMAP = (9, 222)
_SHARED = 0x01
_ANONYMOUS = 0x20
_GROWS_DOWN = 0x100
_MAPPING_TYPE = 0x0F
"""The flags MAP_* of mmap(2)."""
_PRCTL = (157, 167)
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_FCNTL = (72, 25)
_FCNTL_REFUSED = {
    # Locks that no file of proc(5) ascribes to a process.
    "F_OFD_SETLK": 37,
    "F_OFD_SETLKW": 38,
    # Pipes that hold more than others.
    "F_SETPIPE_SZ": 1031,
}
_CLONE = (56, 220)
_NEW_NAMESPACES = 0x7E020000
"""The flags CLONE_NEW* of clone(2)."""
_SOCKETPAIR = (53, 199)
_PRLIMIT = (302, 261)
_SOCKET_TYPE = 0xF
"""The bits of the type of a socket that are not flags."""

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables, and AUDIT_ARCH."""
_SECCOMP = (317, 277)
_SET_MODE_FILTER = 1
_SPEC_ALLOW = 1 << 2
_X32 = 0x40000000

_LOAD = 0x20
_IF_EQUAL = 0x15
_IF_AT_LEAST = 0x35
_IF_ANY_BIT = 0x45
_RETURN = 0x06
_AND = 0x54
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16
_SECOND_ARGUMENT = 24
_FOURTH_ARGUMENT = 40
"""Offsets in struct seccomp_data."""
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000
_KILL = 0x80000000


def restrict(*, shared_memory: bool = False) -> None:
    """Install the filter for this thread and its descendants.

    The process must have set PR_SET_NO_NEW_PRIVS.

    Args:
        shared_memory: permit memory that RLIMIT_DATA does not count, which drivers of accelerators
            use.

    Raises:
        OSError: this kernel has no filters, or the numbers of this architecture are not known.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"there is no filter for the architecture {machine}")
    program = filter_program(machine, shared_memory=shared_memory)
    array = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(array))
    column, _ = _MACHINES[machine]
    # Mitigations of speculation within the process would only slow the training down.
    arguments = _SET_MODE_FILTER, _SPEC_ALLOW, ctypes.c_char_p(header)
    system_call(_SECCOMP[column], *arguments)


def filter_program(machine: str, *, shared_memory: bool = False) -> bytes:
    """The filter for an architecture in the classic BPF instructions of the kernel."""
    column, audit = _MACHINES[machine]
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_IF_EQUAL, audit, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
        _instruction(_IF_AT_LEAST, _X32, 0, 1),  # the second set of numbers of x86-64
        _instruction(_RETURN, _KILL),
    ]
    code += _refusals((row[column] for row in _CALLS.values()), errno.EPERM)
    code += _refusals((row[column] for row in _ABSENT.values()), errno.ENOSYS)
    if not shared_memory:
        code += _refusals([_MEMFD_CREATE[column]], errno.ENOSYS)
        code += _uncounted_memory(_MMAP[column])
    code += [
        # To be out of reach of the agent, which counts the task's processes and their memory.
        _instruction(_IF_EQUAL, _PRCTL[column], 0, 5),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_IF_EQUAL, _PR_SET_DUMPABLE, 1, 0),
        _instruction(_IF_EQUAL, _PR_SET_CHILD_SUBREAPER, 0, 1),
        _instruction(_RETURN, _FAIL | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
        # A pair of datagram sockets can send to, and be connected to, any socket with a path.
        _instruction(_IF_EQUAL, _SOCKETPAIR[column], 0, 7),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_IF_EQUAL, socket.AF_UNIX, 0, 3),
        _instruction(_LOAD, _SECOND_ARGUMENT),
        _instruction(_AND, _SOCKET_TYPE),
        _instruction(_IF_EQUAL, socket.SOCK_STREAM, 1, 0),
        _instruction(_RETURN, _FAIL | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
        *_refused_commands(_FCNTL[column]),
        # The limits of another process: that on its CPU time would end it.
        _instruction(_IF_EQUAL, _PRLIMIT[column], 0, 4),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_IF_EQUAL, 0, 1, 0),
        _instruction(_RETURN, _FAIL | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
        _instruction(_IF_EQUAL, _CLONE[column], 0, 3),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_IF_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        _instruction(_RETURN, _FAIL | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _uncounted_memory(mmap: int) -> list[bytes]:
    """Refuse memory that RLIMIT_DATA does not count: shared and without a file, or like a stack."""
    return [
        _instruction(_IF_EQUAL, mmap, 0, 6),
        _instruction(_LOAD, _FOURTH_ARGUMENT),
        _instruction(_IF_ANY_BIT, _GROWS_DOWN, 2, 0),
        _instruction(_AND, _MAPPING_TYPE | _ANONYMOUS),
        _instruction(_IF_EQUAL, _SHARED | _ANONYMOUS, 0, 1),
        _instruction(_RETURN, _FAIL | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ]


def _refused_commands(fcntl: int) -> list[bytes]:
    """Refuse what fcntl(2) does of `_FCNTL_REFUSED`."""
    refused = list(_FCNTL_REFUSED.values())
    count = len(refused)
    return [
        _instruction(_IF_EQUAL, fcntl, 0, count + 3),
        _instruction(_LOAD, _SECOND_ARGUMENT),
        *(
            _instruction(_IF_EQUAL, command, count - number, 0)
            for number, command in enumerate(refused)
        ),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _FAIL | errno.EPERM),
    ]


def _refusals(numbers: Iterable[int | None], error: int) -> list[bytes]:
    code = []
    for number in numbers:
        if number is not None:
            code += [_instruction(_IF_EQUAL, number, 0, 1), _instruction(_RETURN, _FAIL | error)]
    return code


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
