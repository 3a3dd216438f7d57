"""Blobs at a mirror: encrypted, named in requests while they are there, and removed."""

import asyncio
import hashlib
import io
import shutil
import threading

import pytest
from tests.server.scripted_participant import payload_of
from tests.server.waiting import wait_until

from isthmus.transport.blobs import Broadcast, InFile, describe
from isthmus.transport.encrypted_blobs import keystream
from isthmus.wire import link_pb2
from isthmus_server.mirror.folder import MirrorFolder
from isthmus_server.mirror.mirrored_blobs import LEAST_BYTES, MirroredBlobs
from isthmus_server.mirror.place import MARKER

SIZE = 3_000_017
URL = "https://cdn.example.org/models/"


class GatedFolder(MirrorFolder):
    """A folder in which a file is begun, and goes on when the test says so."""

    def __init__(self, target, url):
        super().__init__(target, url)
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.error = None
        self.puts = 0

    def put(self, name, stream, size):
        self.puts += 1
        first = stream.read(10)
        self.begun.set()
        assert self.gate.wait(100)
        if self.error is not None:
            raise self.error
        super().put(name, io.BufferedReader(Both(first, stream)), size)


class Both(io.RawIOBase):
    """Some bytes and then a stream."""

    def __init__(self, first, stream):
        self.first = first
        self.stream = stream

    def readable(self):
        return True

    def readinto(self, buffer):
        data = self.first or self.stream.read(len(buffer))
        self.first = b""
        buffer[: len(data)] = data
        return len(data)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "www"


@pytest.fixture
def offered():
    """A model that the link offers, and the request for it."""
    payload = payload_of(SIZE)
    return Offered(payload)


class Offered:
    def __init__(self, payload):
        self.payload = payload
        self.blob = describe(payload)
        self.broadcast = Broadcast(self.blob.sha256, payload)

    def get(self, sha256):
        return self.broadcast if sha256 == self.blob.sha256 else None

    def request(self):
        return link_pb2.Request(id="1", train_local=link_pb2.TrainLocal(model=self.blob))


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != MARKER)


async def asked(blobs, offered):
    """The blob of a request as a device is sent it."""
    request = offered.request()
    await blobs.add_addresses("phone", request, offered.get)
    return request.train_local.model


async def test_what_is_at_the_mirror_is_encrypted_with_the_key_in_the_request(folder, offered):
    blobs = MirroredBlobs(MirrorFolder(str(folder), URL))
    async with blobs.running("me"):
        blob = await asked(blobs, offered)
        (name,) = files(folder)
        assert blob.address == URL + name
        stored = (folder / name).read_bytes()
        # Neither the bytes nor their digest are there, and not the key.
        assert name not in (offered.blob.sha256.hex(), hashlib.sha256(stored).hexdigest())
        assert offered.payload[:32] not in stored
        assert keystream(blob.key, 0).update(stored) == offered.payload
        assert (folder / name).stat().st_mode & 0o777 == 0o644
        again = await asked(blobs, offered)
        assert (again.address, again.key) == (blob.address, blob.key)
    assert files(folder) == []


async def test_a_blob_in_a_file_is_put_there_too(folder, offered, tmp_path):
    (tmp_path / "spilled").write_bytes(offered.payload)
    with (tmp_path / "spilled").open("rb") as file:
        offered.broadcast = Broadcast(offered.blob.sha256, InFile(file, SIZE))
        blobs = MirroredBlobs(MirrorFolder(str(folder), URL))
        async with blobs.running("me"):
            blob = await asked(blobs, offered)
            stored = (folder / files(folder)[0]).read_bytes()
    assert keystream(blob.key, 0).update(stored) == offered.payload


async def test_what_the_link_does_not_offer_any_more_is_removed(folder, offered, timeouts):
    blobs = MirroredBlobs(MirrorFolder(str(folder), URL), kept_seconds=77)
    async with blobs.running("me"):
        await asked(blobs, offered)
        blobs.withdraw(offered.broadcast, is_last=False)  # another job offers it, too
        (copy,) = blobs._copies.values()
        assert copy.removal is None
        offered.broadcast = Broadcast(offered.blob.sha256, offered.payload)
        blob = await asked(blobs, offered)
        blobs.withdraw(offered.broadcast, is_last=True)
        # The evaluation of a round's model, a moment later.
        assert (await asked(blobs, offered)).address == blob.address
        assert len(files(folder)) == 1
        blobs.withdraw(offered.broadcast, is_last=True)
        await timeouts.expire(77)
        await wait_until(lambda: not files(folder))
        # With another key, as the first one may be known to a device that has left.
        assert (await asked(blobs, offered)).key != blob.key


async def test_its_memory_is_not_read_after_it_was_withdrawn(folder, offered):
    """By then it may have another model, which nobody was to get."""
    place = GatedFolder(str(folder), URL)
    blobs = MirroredBlobs(place)
    async with blobs.running("me"):
        asking = asyncio.create_task(asked(blobs, offered))
        await wait_until(place.begun.is_set)
        blobs.withdraw(offered.broadcast, is_last=True)
        place.gate.set()
        blob = await asking
        assert (blob.address, blob.key) == ("", b"")
        assert files(folder) == []
        assert (await asked(blobs, offered)).address  # it is offered again


@pytest.mark.parametrize("fault", ["fails", "slow"])
async def test_a_mirror_that_fails_or_is_slow_delays_one_request(folder, offered, caplog, fault):
    place = GatedFolder(str(folder), URL)
    if fault == "fails":
        place.error = OSError("the disk is full")
        place.gate.set()
    blobs = MirroredBlobs(place, put_seconds=100 if fault == "fails" else 0.01)
    async with blobs.running("me"):
        for _ in range(3):
            assert (await asked(blobs, offered)).address == ""
        said = "the disk is full" if fault == "fails" else "a blob was not there after 0.01 s"
        assert caplog.text.count("the mirror cannot be written to") == 1
        assert said in caplog.text
        assert place.puts == 1
        if fault == "slow":  # it is used when it is there
            place.gate.set()
            (copy,) = blobs._copies.values()
            await copy.put
            assert (await asked(blobs, offered)).address
        assert files(folder) == [] or fault == "slow"


async def test_a_folder_that_is_gone_is_said_in_plain_words(folder, offered, caplog):
    blobs = MirroredBlobs(MirrorFolder(str(folder), URL))
    async with blobs.running("me"):
        shutil.rmtree(folder)
        assert (await asked(blobs, offered)).address == ""
        (said,) = caplog.messages
        assert said.endswith(f"pull on the link for 600 s: there is no folder {folder} any more")


class UnsignedFolder(MirrorFolder):
    """A folder whose addresses come when the test says so."""

    def __init__(self, target, url):
        super().__init__(target, url)
        self.gate = threading.Event()
        self.asked = 0

    def address(self, name):
        self.asked += 1
        assert self.gate.wait(100)
        return super().address(name)


async def test_a_store_that_does_not_sign_delays_one_request(folder, offered, caplog, monkeypatch):
    """Its library may wait for credentials for ever."""
    place = UnsignedFolder(str(folder), URL)
    blobs = MirroredBlobs(place, put_seconds=0.01)
    async with blobs.running("me"):
        await asked(blobs, offered)
        (copy,) = blobs._copies.values()
        await copy.put
        for _ in range(3):
            assert (await asked(blobs, offered)).address == ""
        assert place.asked == 1
        assert caplog.text.count("the mirror cannot be written to") == 1
        place.gate.set()
        monkeypatch.setattr(blobs, "_unsigned_until", 0.0)
        monkeypatch.setattr(blobs, "_put_seconds", 100)
        assert (await asked(blobs, offered)).address


async def test_what_is_small_or_for_one_device_is_not_put_there(folder):
    blobs = MirroredBlobs(MirrorFolder(str(folder), URL))
    async with blobs.running("me"):
        small = Offered(payload_of(LEAST_BYTES - 1))
        assert (await asked(blobs, small)).address == ""
        one = Offered(payload_of(SIZE))
        records = link_pb2.AppMessage(records=one.blob)
        request = link_pb2.Request(id="1", app=records)
        await blobs.add_addresses("phone", request, one.get)
        assert request.app.records.address == ""
        assert files(folder) == []


async def test_a_request_without_a_blob_stays_without_one(folder):
    """A device would take it for a package of a task, or for a model."""
    blobs = MirroredBlobs(MirrorFolder(str(folder), URL))
    opening = link_pb2.Request(id="1", open=link_pb2.OpenRun(run_id="run"))
    before = opening.SerializeToString()
    await blobs.add_addresses("phone", opening, lambda sha256: None)
    assert not opening.open.HasField("package")
    assert opening.SerializeToString() == before


async def test_what_a_crash_left_is_removed(folder):
    place = MirrorFolder(str(folder), URL)
    async with MirroredBlobs(place).running("me"):
        pass
    for name in ("a" * 64, "b" * 64 + ".part", "index.html"):
        (folder / name).write_bytes(b"left")
    async with MirroredBlobs(place).running("me"):
        assert files(folder) == ["index.html"]
