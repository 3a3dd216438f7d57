"""What a task's processes may have together: memory of any kind, processes, threads and files.

The real sandbox and the real agent's side of it, with a program in the place of a task that tries
one thing after another, without PyTorch. The kernel does not count the processes of root, so all of
it is tried as another user too.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
from tests.clients.device.sandbox.test_confinement import needs_filter, needs_landlock

from isthmus_clients.device.sandbox.confinement import Confinement
from isthmus_clients.device.sandbox.usage import excess, processes_of

NOBODY = 65534

PROGRAM = """
import ctypes, fcntl, mmap, os, socket, struct, sys, threading, time
from pathlib import Path
from isthmus.wire import link_pb2
from isthmus_clients.device.sandbox import task_worker, worker

FOREVER = 120.0
SHARED = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
GROWS_DOWN = 0x100

def prctl(option, value):
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def children(count, work=lambda: None):
    for _ in range(count):
        if os.fork() == 0:
            os.setsid()
            kept = work()
            time.sleep(FOREVER)
            os._exit(0)
    time.sleep(FOREVER)

def threads(count):
    for _ in range(count):
        threading.Thread(target=time.sleep, args=[FOREVER], daemon=True).start()
    time.sleep(FOREVER)

def filled(megabytes):
    memory = mmap.mmap(-1, megabytes << 20, PRIVATE)
    for page in range(0, len(memory), 4096):
        memory[page] = 1
    return memory

def sockets(count):
    kept = [socket.socketpair() for _ in range(count)]
    time.sleep(FOREVER)

def large_buffer():
    socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)

def page_in_a_pipe():
    library = ctypes.CDLL(None, use_errno=True)
    page = ctypes.create_string_buffer(1)
    part = (ctypes.c_size_t * 2)(ctypes.addressof(page), 1)
    if library.vmsplice(os.pipe()[1], part, 1, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def page_tables(gigabytes):
    # Nothing is stored, and the kernel needs 4 KB for each 2 MB in which something was read.
    no_reserve = 0x4000
    memory = mmap.mmap(-1, gigabytes << 30, PRIVATE | no_reserve, mmap.PROT_READ)
    for place in range(0, len(memory), 2 << 20):
        memory[place]
    time.sleep(FOREVER)

def ranges(count, processes):
    # Nothing is stored: each page has another protection than the next, and is a range of its own.
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    size = ctypes.c_size_t(2 * count * mmap.PAGESIZE)
    start = library.mmap(None, size, mmap.PROT_READ, PRIVATE, -1, ctypes.c_long(0))
    for number in range(count):
        place = ctypes.c_void_p(start + 2 * number * mmap.PAGESIZE)
        if library.mprotect(place, ctypes.c_size_t(mmap.PAGESIZE), 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    children(processes)

def lock(command, start):
    place = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
    return fcntl.fcntl(LOCKED, command, place)

def locks(count):
    for number in reversed(range(count)):
        lock(fcntl.F_SETLK, 2 * number)
    time.sleep(FOREVER)

def ruleset():
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(444, (ctypes.c_uint64 * 2)(0, 3), 16, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def files(count, megabytes, named):
    kept = []
    for number in range(count):
        file = open(Path(os.environ["TMPDIR"], str(number)), "wb")
        file.write(bytes(megabytes << 20))
        file.flush()
        if not named:
            os.unlink(file.name)
        kept.append(file)
    time.sleep(FOREVER)

def execute(self, request, memory):
    if request.WhichOneof("work") == "open":
        return link_pb2.Reply(opened=link_pb2.Opened(examples=20))
    global LOCKED
    LOCKED = open(Path(os.environ["TMPDIR"], "locked"), "wb")
    exec((self._settings.tasks / "statement").read_text())
    return link_pb2.Reply(trained=link_pb2.Trained())

task_worker.TaskWorker._execute = execute
if os.environ["LC_NAMESPACES"] == "without":
    worker.enter_namespaces = lambda: False
sys.exit(worker.main(sys.argv[1:]))
"""

AGENT = """
import json, os, sys, time
from pathlib import Path
from isthmus.errors import TaskError
from isthmus.job import parse_job
from isthmus.task import Participant
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.device.owner_limits import OwnerLimits, SandboxLimits
from isthmus_clients.device.sandbox import task_process
from isthmus_clients.device.sandbox.process_host import ProcessHost

folder, program, statements = json.load(sys.stdin)
task_process.PROGRAM = ("-c", program)
tasks, state = Path(folder, "tasks"), Path(folder, "state")
tasks.mkdir()
state.mkdir()
(tasks / "task.py").write_text("class Learn: pass")
layout = TensorLayout.from_shapes({"weight": (3,)})
job = parse_job(
    'name = "table"\\n[task]\\nsource = "task.py:Learn"', ["federated.secure_aggregation=false"]
)
work = link_pb2.OpenRun(
    run_id="run", job=job.model_dump_json(), base="/nowhere", layout=layout.header
)
limits = OwnerLimits(memory_mb=256, sandbox=SandboxLimits(processes=40, scratch_mb=8))
host = ProcessHost(
    Participant(name="a", regime="federated"), None, tasks, 1, state=state, limits=limits
)

def left():
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += str(state).encode() in path.read_bytes()
        except OSError:
            pass
    return found

results = {}
for statement in statements:
    (tasks / "statement").write_text(statement)
    host.open(work)
    process = host.process
    payload = host.buffer(2 * layout.nbytes)
    payload[:] = layout.header.ljust(layout.nbytes, b"\\0") * 2
    training = link_pb2.TrainLocal(run_id="run", round=1)
    try:
        host.train(statement, training, payload, lambda progress: None)
        sentence = ""
    except TaskError as error:
        sentence = str(error)
    ended = process.ended
    host.close()
    process.wait()
    until = time.monotonic() + 10
    while left() and time.monotonic() < until:
        time.sleep(0.01)
    results[statement] = [sentence, ended, left()]
print(json.dumps(results))
"""

REFUSED = {
    "os.memfd_create('x')": "Function not implemented",
    "mmap.mmap(-1, 4096, SHARED)": "Operation not permitted",
    "mmap.mmap(-1, 4096, PRIVATE | GROWS_DOWN)": "Operation not permitted",
    "filled(300)": "Cannot allocate memory",
    "prctl(4, 0)": "Operation not permitted",
    "prctl(36, 0)": "Operation not permitted",
    "open('/dev/shm/isthmus-test', 'wb')": "Permission denied",
    "files(1, 9, True)": "File too large",
    "large_buffer()": "Operation not permitted",
    "page_in_a_pipe()": "Operation not permitted",
    "sockets(600)": "Too many open files",
    "fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)": "Operation not permitted",
    "lock(37, 0)": "Operation not permitted",
    "lock(38, 0)": "Operation not permitted",
    "ruleset()": "Function not implemented",
}
"""What fails in the task's process, which goes on."""

MEMORY = r"its processes had \d+ MB of memory together, and its owner allows memory_mb=256$"
PROCESSES = "it had more than 40 processes and threads, and its owner allows no more"
LOCKS = "it had more than 10000 locks on parts of files, and no task may have more"
FILES = "its files had more than 8 MB, or were more than 50000, and its owner allows no more"
ENDED = {
    "children(4, lambda: filled(120))": MEMORY,
    "children(4, lambda: [socket.socketpair() for _ in range(300)])": MEMORY,
    "children(12, lambda: [os.pipe() for _ in range(450)])": MEMORY,
    "page_tables(200)": MEMORY,
    "ranges(30000, 30)": MEMORY,
    "locks(10500)": LOCKS,
    "children(60)": PROCESSES,
    "threads(60)": PROCESSES,
    "files(3, 4, True)": FILES,
    "files(3, 4, False)": FILES,
}
"""What ends the process and all that it has started."""

COUNTED = r"internal error: (BlockingIOError|RuntimeError): .*(unavailable|can't start new thread)"
"""What the task gets where the kernel counts its processes."""


PACKAGES = os.pathsep.join(path for path in sys.path if path)
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def python_for(user):
    """A Python that a user can run with these packages; None if there is none."""
    for python in (sys.executable, shutil.which(PYTHON, path="/usr/bin:/usr/local/bin")):
        if (
            python is not None
            and run(python, user, "import isthmus_clients.doctor").returncode == 0
        ):
            return python
    return None


def run(python, user, program, **more):
    try:
        return subprocess.run(
            [python, "-c", program],
            env={**os.environ, "PYTHONPATH": PACKAGES, **more.pop("env", {})},
            capture_output=True,
            text=True,
            check=False,
            user=user,
            group=user,
            cwd="/",
            **more,
        )
    except PermissionError as error:
        return subprocess.CompletedProcess([python], 1, "", str(error))


def try_all(python, user, namespaces):
    """What each statement led to: a sentence, whether its process ended, and processes left."""
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp()  # not below the tests', which only their user may enter
        stack.callback(shutil.rmtree, folder)
        if user is not None:
            os.chown(folder, user, user)
        given = json.dumps([folder, PROGRAM, [*REFUSED, *ENDED]])
        env = {"LC_NAMESPACES": namespaces, "HOME": folder}
        ran = run(python, user, AGENT, input=given, env=env)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module", params=[None, NOBODY], ids=["this user", "another user"])
def caller(request):
    """A Python, and the user to run it as."""
    if request.param is not None and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    python = python_for(request.param)
    if python is None:
        pytest.skip(f"other users cannot run this Python; install {PYTHON} for all")
    return python, request.param


@needs_filter
@needs_landlock
@pytest.mark.parametrize("namespaces", ["with", "without"])
def test_what_a_task_has_too_much_of_is_refused_or_ends_it(caller, namespaces):
    """With one sentence, and the agent goes on: each is tried after the one before."""
    found = try_all(*caller, namespaces)
    for statement, expected in REFUSED.items():
        sentence, ended, left = found[statement]
        assert expected in sentence, (statement, sentence)
        assert (ended, left) == (False, 0), statement
    for statement, expected in ENDED.items():
        sentence, ended, left = found[statement]
        assert left == 0, statement
        counted = expected is PROCESSES and not ended
        pattern = COUNTED if counted else f"^the process of the task ended: {expected}"
        assert re.search(pattern, sentence), (statement, sentence)


SHARING = """
import mmap, os, time

memory = mmap.mmap(-1, 120 << 20)
for page in range(0, len(memory), 4096):
    memory[page] = 1
for _ in range(3):
    if os.fork() == 0:
        sum(memory[::4096])
        os.write(1, b"read\\n")  # at once, as others write too
        break
time.sleep(120)
"""


def test_memory_that_processes_share_counts_once(tmp_path):
    """As a driver's does, which may share memory without a file."""
    allowed = Confinement((), tmp_path, tmp_path, memory_mb=100)
    command = [sys.executable, "-c", SHARING]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        for _ in range(3):
            assert process.stdout.readline() == b"read\n"
        assert len(processes_of(process.pid)) == 4
        assert excess(process.pid, allowed, shared=0) is None
        less = dataclasses.replace(allowed, memory_mb=50)
        assert re.search(MEMORY.replace("256", "50"), excess(process.pid, less, shared=0))
        assert excess(process.pid, less, shared=50 << 20) is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
