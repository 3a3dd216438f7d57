"""Blobs from a folder or another source: verified, bounded, begun again where a stream ended."""

import io
import os
import threading

import pytest
from tests.outside_package import OutsidePackage
from tests.server.scripted_participant import payload_of

from isthmus.errors import UserError
from isthmus.transport import blob_sources
from isthmus.transport.blob_sources import Filling, NamedSource
from isthmus.transport.blobs import MAX_CHUNK_BYTES, Assembly, Piece, describe, into

SIZE = 3 * MAX_CHUNK_BYTES + 17

OUTSIDE = """
from isthmus.errors import UserError


class Picky:
    def __init__(self, target):
        raise UserError("it is closed")


class Nothing:
    def __init__(self, target):
        pass
"""


class Scripted(NamedSource):
    """A source whose streams a test makes; records where they were to begin."""

    def __init__(self, make):
        super().__init__("file:/scripted")
        self.make = make
        self.offsets = []

    def open(self, sha256, size, offset):
        self.offsets.append(offset)
        return self.make(offset)


@pytest.fixture
def blob():
    payload = payload_of(SIZE)
    return payload, describe(payload)


@pytest.fixture
def folder(tmp_path, blob):
    payload, name = blob
    (tmp_path / name.sha256.hex()).write_bytes(payload)
    return tmp_path


def empty(name):
    memory = bytearray(name.size)
    return Assembly(name, into(memory)), memory


async def filled(name, *sources):
    assembly, memory = empty(name)
    return await Filling(assembly, sources).run(), memory


async def test_a_folder_has_blobs_by_their_names(folder, blob):
    payload, name = blob
    found, memory = await filled(name, NamedSource(f"file:{folder}"))
    assert found.complete
    assert memory == payload


async def test_what_begins_here_is_continued(blob):
    payload, name = blob
    source = Scripted(lambda offset: io.BytesIO(payload[offset:]))
    assembly, memory = empty(name)
    assembly.add(Piece(name.sha256, 0, memoryview(payload)[:100]))
    found = await Filling(assembly, [source]).run()
    assert (found.complete, memory == payload, source.offsets) == (True, True, [100])


@pytest.mark.parametrize("ends", [b"", OSError("the line is gone")], ids=["early", "failing"])
async def test_a_stream_that_ends_early_is_opened_again_where_it_stopped(blob, ends):
    payload, name = blob

    class Short(io.BytesIO):
        given = 0

        def read(self, size):
            data = super().read(size)
            self.given += 1
            if self.given == 1 or not data:
                return data
            if isinstance(ends, OSError):
                raise ends
            return ends

    source = Scripted(lambda offset: Short(payload[offset:]))
    found, memory = await filled(name, source)
    assert found.complete
    assert memory == payload
    assert source.offsets == list(range(0, SIZE, blob_sources._READ_BYTES))


@pytest.mark.parametrize(
    ("make", "tries", "said"),
    [
        (lambda payload, offset: None, 1, ""),
        (lambda payload, offset: io.BytesIO(bytes(SIZE)), 1, "something else under this name"),
        (lambda payload, offset: io.BytesIO(payload[offset:-1]), 4, "it sends only a part"),
        (lambda payload, offset: 1 / 0, 3, "ZeroDivisionError: division by zero"),
    ],
    ids=["absent", "other", "short", "raises"],
)
async def test_a_source_without_the_blob_leaves_it_to_the_next(
    folder, blob, caplog, make, tries, said
):
    payload, name = blob
    bad = Scripted(lambda offset: make(payload, offset))
    for others in ([], [NamedSource(f"file:{folder}")]):
        bad.offsets.clear()
        caplog.clear()
        found, memory = await filled(name, bad, *others)
        assert len(bad.offsets) == tries
        assert said in caplog.text
        assert found.complete == bool(others)
        assert found.offset == (SIZE if others else 0)
        assert memory == payload or not others


async def test_no_more_than_the_size_is_read(blob):
    _, name = blob

    class Endless:
        wanted = 0

        def read(self, size):
            self.wanted += size
            return bytes(size)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    stream = Endless()
    found, _ = await filled(name, Scripted(lambda offset: stream))
    assert not found.complete
    assert stream.wanted == SIZE


async def test_a_source_that_hangs_is_given_up_and_writes_nothing_later(
    folder, blob, monkeypatch, caplog
):
    payload, name = blob
    monkeypatch.setattr(blob_sources, "SILENT_SECONDS", 1.0)
    released = threading.Event()
    ended = threading.Event()

    class Hanging(io.BytesIO):
        def read(self, size):
            assert released.wait(100)
            return bytes(size)

        def close(self):
            super().close()
            ended.set()

    hanging = Scripted(lambda offset: Hanging())
    found, memory = await filled(name, hanging, NamedSource(f"file:{folder}"))
    assert found.complete
    assert "it gave too little for 1 s" in caplog.text
    # It is asked again after a while, so that it does not delay each request.
    for _ in range(2):
        await filled(name, hanging)
    assert hanging.offsets == [0]
    released.set()
    assert ended.wait(100)
    assert memory == payload


async def test_a_source_that_drips_is_given_up(folder, blob, monkeypatch, caplog):
    """It would keep a device out of each round: what it gives is no sign of an end."""
    payload, name = blob
    monkeypatch.setattr(blob_sources, "SILENT_SECONDS", 1.0)

    def drip(offset):
        threading.Event().wait(0.001)  # else a fast machine has enough bytes in the time
        return io.BytesIO(payload[offset : offset + 1])

    dripping = Scripted(drip)
    found, memory = await filled(name, dripping, NamedSource(f"file:{folder}"))
    assert found.complete
    assert memory == payload
    assert "it gave too little for 1 s" in caplog.text
    assert dripping.rests


async def test_a_source_that_gives_enough_is_read_however_much_a_stream_waits_for(
    blob, monkeypatch, caplog
):
    payload, name = blob
    monkeypatch.setattr(blob_sources, "SILENT_SECONDS", 1.0)
    rate = MAX_CHUNK_BYTES  # a second for what a chunk of the link may have

    class Slow(io.BytesIO):
        def read(self, size):
            threading.Event().wait(1.5 * size / rate)
            return super().read(size)

    begun, memory = empty(name)
    begun.add(Piece(name.sha256, 0, memoryview(payload)[: 2 * MAX_CHUNK_BYTES]))
    slow = Scripted(lambda offset: Slow(payload[offset:]))
    found = await Filling(begun, [slow]).run()
    assert found.complete
    assert memory == payload
    assert caplog.text.count("gave too little") == 0


async def test_a_source_is_not_asked_while_a_thread_hangs_in_it(blob, monkeypatch):
    """However long: threads would add up, one for each request."""
    payload, name = blob
    monkeypatch.setattr(blob_sources, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(blob_sources, "REST_SECONDS", 0.0)
    released = threading.Event()
    threads = []

    def hang(offset):
        threads.append(threading.current_thread())
        assert released.wait(100)
        return io.BytesIO(payload[offset:])

    hanging = Scripted(hang)
    for _ in range(2):
        found, memory = await filled(name, hanging)
        assert not found.complete
    assert hanging.offsets == [0]
    released.set()
    threads[0].join()
    assert not any(memory)
    monkeypatch.setattr(blob_sources, "SILENT_SECONDS", 100.0)
    found, memory = await filled(name, hanging)
    assert memory == payload


@pytest.mark.parametrize("slow", [True, False])
async def test_a_source_rests_if_a_request_ended_while_it_gave_slowly(blob, monkeypatch, slow):
    payload, name = blob
    monkeypatch.setattr(blob_sources, "SILENT_SECONDS", 0.0 if slow else 100.0)

    def make(offset):
        filling.abandon()
        return io.BytesIO(payload[offset:])

    source = Scripted(make)
    filling = Filling(empty(name)[0], [source])
    await filling.run()
    assert source.rests == slow


async def test_what_was_abandoned_before_it_began_is_not_asked_for(blob):
    _, name = blob
    source = Scripted(lambda offset: None)
    filling = Filling(empty(name)[0], [source])
    filling.abandon()
    assert not (await filling.run()).complete
    assert source.offsets == []


async def test_after_it_was_abandoned_nothing_is_written(blob):
    _, name = blob
    assembly, memory = empty(name)

    def make(offset):
        filling.abandon()
        return io.BytesIO(b"\1" * SIZE)

    filling = Filling(assembly, [Scripted(make), Scripted(lambda offset: 1 / 0)])
    found = await filling.run()
    assert not found.complete
    assert not any(memory)


@pytest.mark.parametrize("wrong", ["size", "pipe", "folder"])
async def test_what_is_no_such_file_is_not_opened(tmp_path, blob, wrong):
    payload, name = blob
    path = tmp_path / name.sha256.hex()
    if wrong == "size":
        path.write_bytes(payload + b"1")
    elif wrong == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert NamedSource(f"file:{tmp_path}").open(name.sha256.hex(), name.size, 0) is None


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ("/srv/blobs", "--blobs /srv/blobs does not name a source: write KIND:TARGET"),
        ("flie:/srv", r"--blobs flie:/srv is unknown; did you mean file\?"),
        ("file:blobs", "--blobs file:blobs has to name a folder from / on"),
        ("picky:x", "^it is closed$"),
        ("nothing:x", r"--blobs nothing:x is not a source of blobs: it has no open\(\)"),
    ],
)
def test_a_source_that_cannot_be_used_is_reported(tmp_path, monkeypatch, named, sentence):
    entries = {"isthmus.blob_sources/picky": "Picky", "isthmus.blob_sources/nothing": "Nothing"}
    package = OutsidePackage(tmp_path, "odd_sources", OUTSIDE, entries)
    with package.on_path(monkeypatch), pytest.raises(UserError, match=sentence):
        NamedSource(named)
