"""Which failures end in zeros in a secure sum: those that follow from the model and the data alone.

Others, which a server can cause on devices of its choice, are told as one constant sentence.
"""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from isthmus import PackedText
from isthmus.errors import JobError, TaskError, TaskInterrupted, TaskProcessEnded
from isthmus.task import user_code
from isthmus_clients.training.withholding import (
    DetailsWithheld,
    attempted,
    constant_failures,
    has_broken_accelerator,
)


def in_the_task(error):
    """As the code of a task raises it."""
    with user_code("forward()"):
        raise error


def in_this_process(error):
    raise error


NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
OF_SERVER = {
    "memory of Python": MemoryError(),
    "memory of PyTorch": RuntimeError(NO_MEMORY),
    "memory of an accelerator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
    "memory of a library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
    "memory of C++": RuntimeError("std::bad_alloc"),
    "threads": RuntimeError("can't start new thread"),
    "open files of PyTorch": RuntimeError("unable to open file <a>: Too many open files (24)"),
    "open files of another process": OSError("Caught OSError: [Errno 24] Too many open files: 'a'"),
    "open files": OSError(errno.EMFILE, "Too many open files"),
    "disk space": OSError(errno.ENOSPC, "No space left on device"),
    "cancelled": TaskInterrupted("the server no longer wants the update of this round"),
}
OF_DATA = {
    "an exception of the task": ValueError("the patient is Ann"),
    "an error of PyTorch": RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    "an unreadable file": FileNotFoundError(errno.ENOENT, "No such file or directory"),
    "a loss that is not finite": TaskError("the loss of a is nan at step 3"),
}


@pytest.mark.parametrize("what", OF_SERVER)
@pytest.mark.parametrize("place", [in_the_task, in_this_process])
def test_what_a_server_can_cause_is_no_vector_of_zeros(what, place):
    with pytest.raises(DetailsWithheld, match="the device could not do this"):
        attempted("training", lambda: place(OF_SERVER[what]))


def test_a_round_that_the_server_gave_up_is_no_error_of_the_task(caplog):
    caplog.set_level("INFO")
    with pytest.raises(DetailsWithheld):
        attempted("training in round 2", lambda: in_this_process(OF_SERVER["cancelled"]))
    with pytest.raises(DetailsWithheld), constant_failures(True, on_data=True):
        in_this_process(OF_SERVER["cancelled"])
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("INFO", "training in round 2 was stopped: the server has given the round up"),
        (
            "INFO",
            "this device could not execute a request: the server no longer wants the update of "
            "this round",
        ),
    ]


@pytest.mark.parametrize("what", OF_DATA)
def test_what_follows_from_model_and_data_is_a_vector_of_zeros(what):
    assert attempted("training", lambda: in_the_task(OF_DATA[what])) is None


def test_an_exception_of_the_task_that_was_raised_from_itself_is_a_vector_of_zeros():
    """Python allows it: the chain of its causes has no end."""
    error = ValueError("the patient is Ann")
    error.__cause__ = error
    assert attempted("training", lambda: in_the_task(error)) is None
    assert not has_broken_accelerator(error)


class Lacking(Dataset):
    """Has no memory for an example, and says so as NumPy does."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        np.empty(1 << 60, dtype=np.uint8)


class Killed(Lacking):
    """Whose process ends, as one that the system has no memory for."""

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", [Lacking, Killed])
def test_a_lack_in_another_process_of_the_task_is_no_vector_of_zeros(kind):
    """What a loader's process raises comes here as text, if it cannot be made anew."""

    def read():
        with user_code("training_step()"):
            next(iter(DataLoader(kind(), num_workers=1)))

    with pytest.raises(DetailsWithheld):
        attempted("training", read)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_of_a_pool_that_is_killed_gives_no_vector_of_zeros():
    def compute():
        with user_code("forward()"), ProcessPoolExecutor(1) as pool:
            pool.submit(killed).result()

    with pytest.raises(DetailsWithheld):
        attempted("training", compute)


def in_a_thread(work):
    """Where a loader does not hear of the end of its processes by a signal."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def read_of_loader():
    return in_a_thread(lambda: next(iter(DataLoader(Killed(), num_workers=1))))


def read_of_pipe():
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    return ours.recv()


def write_to_pipe():
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    ours.send(bytes(1000))


def run_program(command):
    return subprocess.run(command, check=True)


OF_OTHER_PROCESSES = {
    "loader in a thread": read_of_loader,
    "pipe": read_of_pipe,
    "pipe to write": write_to_pipe,
    "program": lambda: run_program([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]),
    "program of a shell": lambda: run_program(["sh", "-c", "exit 137"]),
}


@pytest.mark.parametrize("what", OF_OTHER_PROCESSES)
def test_the_end_of_another_process_of_the_task_is_no_vector_of_zeros(what):
    def compute():
        with user_code("forward()"):
            OF_OTHER_PROCESSES[what]()

    with pytest.raises(DetailsWithheld):
        attempted("training", compute)


def test_a_process_of_joblib_that_is_killed_gives_no_vector_of_zeros():
    said = "A worker process managed by the executor was unexpectedly terminated."
    with pytest.raises(DetailsWithheld):
        attempted("training", lambda: in_the_task(BrokenProcessPool(said)))


@pytest.mark.parametrize(
    "error", [EOFError("Ran out of input"), subprocess.CalledProcessError(1, "convert")]
)
def test_a_file_that_is_cut_and_a_program_that_fails_are_a_vector_of_zeros(error):
    assert attempted("training", lambda: in_the_task(error)) is None


def test_a_lack_among_errors_of_a_group_is_no_vector_of_zeros():
    """Tasks that run at the same time raise all of their errors together."""
    group = ExceptionGroup("two tasks", [KeyError("a"), MemoryError()])
    with pytest.raises(DetailsWithheld):
        attempted("training", lambda: in_the_task(group))
    of_data = ExceptionGroup("two tasks", [KeyError("the patient is Ann"), ValueError("b")])
    assert attempted("training", lambda: in_the_task(of_data)) is None


def hides(error):
    """A task that says in its own words that something has failed."""
    try:
        raise error
    except (RuntimeError, KeyError):
        raise ValueError("the batch cannot be used")  # noqa: B904 - as tasks do


def hides_well(error):
    try:
        raise error
    except (RuntimeError, KeyError):
        raise ValueError("the batch cannot be used") from None


@pytest.mark.parametrize("way", [hides, hides_well])
def test_a_lack_that_the_task_hides_is_no_vector_of_zeros(way):
    with pytest.raises(DetailsWithheld):
        attempted("training", lambda: way(RuntimeError(NO_MEMORY)))
    assert attempted("training", lambda: way(KeyError("the patient is Ann"))) is None


def test_text_that_cannot_be_read_for_lack_of_open_files_is_no_vector_of_zeros(
    tmp_path, monkeypatch
):
    (tmp_path / "a.txt").write_text("a text of some words " * 9)
    rows = PackedText(tmp_path / "a.txt", tokenizer=lambda text: [*text.encode()], end=0, length=8)

    def lacks(*args, **kwargs):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def read():
        with user_code("local_data()"):
            return rows[0]

    assert attempted("training", read) is not None
    monkeypatch.setattr(type(tmp_path), "open", lacks)
    with pytest.raises(DetailsWithheld):
        attempted("training", read)


def test_of_the_agent_itself_only_deliberate_errors_are_zeros():
    assert attempted("training", lambda: in_this_process(JobError("too few examples"))) is None
    for error in (TaskProcessEnded("it was killed"), OSError(errno.EIO, "the disk fails")):
        with pytest.raises(DetailsWithheld):
            attempted("training", lambda error=error: in_this_process(error))
