"""What an aggregator keeps of the blobs that its devices pull."""

import asyncio
import shutil

from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_server.aggregator import blobs
from isthmus_server.aggregator.blobs import KeptBlobs


async def kept_of(folder, payloads):
    """Which of these it keeps when all were got, one after the other."""
    described = [describe(payload) for payload in payloads]
    by_sha256 = {blob.sha256: payload for blob, payload in zip(described, payloads, strict=True)}

    async def piece(sha256, offset, length):
        return bytearray(by_sha256[sha256][offset : offset + length])

    async def arrived(sha256, end):
        pass

    kept = KeptBlobs(folder, piece, arrived)
    for blob in described:
        kept.note(link_pb2.Request(train_local=link_pb2.TrainLocal(model=blob)))
        await kept._get(blob.sha256)
        kept._make_room()
    found = [by_sha256[sha256] for sha256 in kept._files]
    assert len(kept._store) == len(found)
    kept.close()
    return found


async def test_what_nobody_pulls_takes_no_more_than_it_leaves_free(tmp_path, monkeypatch):
    payloads = [bytes([number]) * 1000 for number in range(4)]
    assert await kept_of(tmp_path, payloads) == payloads
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2500))
    assert await kept_of(tmp_path, payloads) == payloads[2:]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    assert not await kept_of(tmp_path, payloads)


async def test_only_so_many_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(blobs, "KEPT", 3)
    payloads = [bytes([number]) * 1000 for number in range(5)]
    assert await kept_of(tmp_path, payloads) == payloads[2:]


async def test_devices_that_wait_for_a_slow_download_hear_how_much_is_here(tmp_path, monkeypatch):
    monkeypatch.setattr(blobs, "_PIECE_SECONDS", 0.0)  # each piece is slow
    monkeypatch.setattr(blobs, "_FIRST_PIECE", 1000)
    payload = bytes(2500)
    ends = []

    async def piece(sha256, offset, length):
        return bytearray(payload[offset : offset + length])

    async def arrived(sha256, end):
        ends.append(end)

    kept = KeptBlobs(tmp_path, piece, arrived)
    kept.note(link_pb2.Request(train_local=link_pb2.TrainLocal(model=describe(payload))))
    await kept._get(describe(payload).sha256)
    assert ends == [1000, 2000, 2500]
    kept.close()


async def test_files_of_a_start_keep_no_model_of_a_round_waiting(tmp_path):
    files = [bytes([number]) * 1000 for number in range(3)]
    model = b"m" * 1000
    is_asked = set()

    async def piece(sha256, offset, length):
        is_asked.add(sha256)
        if sha256 != describe(model).sha256:
            await asyncio.Event().wait()  # it takes hours
        return bytearray(model[offset : offset + length])

    async def arrived(sha256, end):
        pass

    kept = KeptBlobs(tmp_path, piece, arrived)
    listed = [link_pb2.StartFile(blob=describe(file)) for file in files]
    kept.note(link_pb2.Request(prepare=link_pb2.Prepare(files=listed)))
    kept.note(link_pb2.Request(train_local=link_pb2.TrainLocal(model=describe(model))))
    waiting = [asyncio.create_task(kept._get(describe(file).sha256)) for file in files]
    async with asyncio.timeout(60):
        await kept._get(describe(model).sha256)
    assert describe(model).sha256 in kept._files
    assert len(is_asked) == 2  # one of the files, too
    for task in waiting:
        task.cancel()
    kept.close()
