"""Blobs that pass as open files between processes of one user on one machine."""

import os
import subprocess
import sys
import tempfile

import pytest

from isthmus.system.memory_file import MemoryFile
from isthmus.transport.blobs import InFile, describe
from isthmus.transport.shared_memory import (
    answer,
    has_random_name,
    machine,
    named,
    offered,
    opened,
    read_into,
)
from isthmus.wire import link_pb2

HERE = machine()
pytestmark = pytest.mark.skipif(not HERE, reason="memory is shared on Linux only")


def test_another_process_reads_the_memory_that_was_offered():
    memory = MemoryFile(6)
    memory[:] = b"update"
    file = offered(memoryview(memory))
    code = (
        "from isthmus.transport.shared_memory import *; from isthmus.wire import link_pb2;"
        f"file = link_pb2.OpenFile(process={file.process}, descriptor={file.descriptor});"
        "print(machine(), opened(file, 6).read().decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{HERE} update\n"


def test_a_reader_keeps_the_bytes_when_the_owner_frees_its_memory():
    memory = MemoryFile(3)
    memory[:] = b"abc"
    with opened(offered(memoryview(memory)), 3) as file:
        del memory
        assert file.read() == b"abc"


@pytest.mark.parametrize(
    "payload",
    [
        bytearray(8),
        memoryview(b"readonly"),
        memoryview(MemoryFile(8))[1:],
        memoryview(MemoryFile(8))[:7],
    ],
    ids=["bytearray", "bytes", "a later part", "a first part"],
)
def test_only_a_whole_shared_buffer_or_a_file_is_offered(payload):
    assert offered(payload) is None


def test_a_random_name_is_told_from_a_sha256():
    """It names one blob, and is as long as the SHA-256 that it replaces."""
    payload = b"update"
    names = [named(payload) for _ in range(2)]
    assert all(has_random_name(name) for name in names)
    assert not has_random_name(describe(payload))
    assert not has_random_name(link_pb2.Blob(size=6))
    assert {(len(name.sha256), name.size) for name in names} == {(32, 6)}
    assert names[0] != names[1]


def test_a_blob_in_a_file_is_offered_and_read():
    with tempfile.TemporaryFile() as file:
        file.write(b"checkpoint")
        file.flush()
        copy = bytearray(10)
        with opened(offered(InFile(file, 10)), 10) as blob:
            read_into(blob, copy)
    assert copy == b"checkpoint"


def test_files_that_cannot_hold_the_blob_are_not_opened():
    memory = MemoryFile(3)
    with pytest.raises(OSError, match="does not have 4 bytes"):
        opened(offered(memoryview(memory)), 4)
    reading, writing = os.pipe()
    try:
        pipe = link_pb2.OpenFile(process=os.getpid(), descriptor=reading)
        with pytest.raises(OSError, match="does not have 0 bytes"):
            opened(pipe, 0)
    finally:
        os.close(reading)
        os.close(writing)
    gone = link_pb2.OpenFile(process=os.getpid(), descriptor=1 << 20)
    with pytest.raises(FileNotFoundError):
        opened(gone, 1)


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error():
    with tempfile.TemporaryFile() as file:
        file.write(b"12345")
        file.flush()
        with opened(offered(InFile(file, 5)), 5) as blob:
            file.truncate(2)
            with pytest.raises(OSError, match="cut short"):
                read_into(blob, bytearray(5))


def test_only_a_pull_from_this_machine_is_answered_with_a_file():
    payload = memoryview(MemoryFile(4))
    pull = link_pb2.Pull(sha256=b"x" * 32, machine=HERE)
    reply = answer(pull, payload, HERE)
    assert reply.chunk.file.process == os.getpid()
    assert reply.chunk.sha256 == pull.sha256
    assert answer(pull, payload, "") is None  # this process shares nothing
    assert answer(link_pb2.Pull(machine="another"), payload, HERE) is None
    assert answer(link_pb2.Pull(), payload, "") is None
