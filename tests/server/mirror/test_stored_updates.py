"""Updates in a store: verified before they are used, and removed."""

import io
import sys

import pytest
from tests.server.mirror.stores import FolderStore
from tests.server.scripted_participant import payload_of
from tests.server.waiting import wait_until

from isthmus.errors import UserError
from isthmus.transport.blobs import describe
from isthmus.transport.encrypted_blobs import keystream
from isthmus.transport.uploads import UploadAddresses
from isthmus_server.mirror import stored_updates
from isthmus_server.mirror.options import store_named
from isthmus_server.mirror.stored_updates import LEAST_BYTES, StoredUpdates

SIZE = 3_000_017
URL = "https://store.example.org/updates/"


@pytest.fixture
def payload():
    return payload_of(SIZE)


@pytest.fixture
def folder(tmp_path):
    """A store that is a folder."""
    return FolderStore(tmp_path / "store", URL)


def names(folder):
    return [path.name for path in folder.folder.iterdir()]


def stored(folder, expected, payload):
    """Have an update in the store as a device puts it there."""
    encrypted = keystream(expected.blob.key, 0).update(bytes(payload))
    (folder.folder / expected.name).write_bytes(encrypted)


async def test_an_update_is_decrypted_into_a_file_of_nobody_and_removed(folder, payload, tmp_path):
    updates = StoredUpdates(folder)
    spool = tmp_path / "spool"
    spool.mkdir()
    async with updates.running("me"):
        async with updates.expecting("a", describe(payload), spool) as expected:
            assert expected.blob.address == f"{URL}{expected.name}?size={SIZE}"
            stored(folder, expected, payload)
            with await updates.get(expected) as file:
                assert file.tell() == SIZE
                file.seek(0)
                assert file.read() == payload
                assert list(spool.iterdir()) == []
        await wait_until(lambda: not names(folder))
        async with updates.expecting("a", describe(payload), spool) as again:
            # Each has a key of its own.
            assert again.blob.key != expected.blob.key
    assert names(folder) == []


async def test_small_updates_come_on_the_link(folder, tmp_path):
    updates = StoredUpdates(folder)
    async with updates.running("me"):
        for size, is_expected in ((LEAST_BYTES - 1, False), (LEAST_BYTES, True)):
            blob = describe(payload_of(size))
            async with updates.expecting("a", blob, tmp_path) as expected:
                assert (expected is not None) == is_expected


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (None, "the store does not have it"),
        (b"short", f"the store has 5 bytes in place of {SIZE}"),
        (bytes(SIZE), "the store has something else under its name"),
    ],
)
async def test_a_device_that_puts_something_else_there_is_alone_in_that(
    folder, payload, tmp_path, caplog, there, said
):
    updates = StoredUpdates(folder)
    blob = describe(payload)
    async with updates.running("me"):
        async with updates.expecting("a", blob, tmp_path) as expected:
            if there is not None:
                (folder.folder / expected.name).write_bytes(there)
            assert await updates.get(expected) is None
        assert f"updates of a come on the link for 600 s: {said}" in caplog.text
        async with updates.expecting("a", blob, tmp_path) as expected:
            assert expected is None
        async with updates.expecting("b", blob, tmp_path) as expected:
            assert expected is not None
    assert names(folder) == []


class Dripping(io.RawIOBase):
    """Gives a few bytes and then nothing for as long as the test says."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def read(self, size=-1, /):
        self.gate.wait(60)
        return b""


@pytest.mark.parametrize("fault", ["signs nothing", "cannot be read", "ends early", "hangs"])
async def test_a_store_that_fails_is_left_alone(
    folder, payload, tmp_path, caplog, monkeypatch, fault
):
    updates = StoredUpdates(folder)
    blob = describe(payload)
    async with updates.running("me"):
        if fault == "signs nothing":
            folder.error = OSError("no credentials for https://store.example.org/?key=secret")
        async with updates.expecting("a", blob, tmp_path) as expected:
            assert (expected is None) == (fault == "signs nothing")
            if fault == "cannot be read":
                folder.error = OSError("503 of https://store.example.org/?key=secret")
            elif fault == "ends early":
                folder.stream = io.BytesIO(b"some"), SIZE
            elif fault == "hangs":
                monkeypatch.setattr(stored_updates, "SILENT_SECONDS", 0.2)
                folder.stream = Dripping(folder.gate), SIZE
            if expected is not None:
                assert await updates.get(expected) is None
        folder.error = None
        folder.gate.set()
        assert caplog.text.count("the store of updates fails, and they come on the link") == 1
        assert "secret" not in caplog.text
        async with updates.expecting("b", blob, tmp_path) as expected:
            assert expected is None


async def test_what_a_crash_leaves_is_removed_at_the_next_start(folder, payload):
    folder.claim("me")
    left = "ab" * 32
    (folder.folder / left).write_bytes(payload)
    async with StoredUpdates(folder).running("me"):
        assert names(folder) == []


async def test_what_comes_too_late_is_removed_by_a_later_look(folder, payload, tmp_path):
    updates = StoredUpdates(folder, sweep_seconds=0.05)
    async with updates.running("me"):
        async with updates.expecting("a", describe(payload), tmp_path) as late:
            pass
        await wait_until(lambda: late.name in folder.removed)
        async with updates.expecting("b", describe(payload), tmp_path) as expected:
            stored(folder, expected, payload)
            stored(folder, late, payload)
            await wait_until(lambda: late.name not in names(folder))
            assert expected.name in names(folder)


@pytest.mark.parametrize(
    "named",
    ["s3:", "s3:/prefix", "s3://bucket/prefix", "file:/srv/www", "ftp:host", "bucket/prefix"],
)
def test_an_option_that_names_no_store_is_said(named):
    with pytest.raises(UserError) as raised:
        store_named(named)
    assert f"--uploads {named} does not name a store: write s3:BUCKET/PREFIX" in str(raised.value)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UserError, match=r"--uploads s3:bucket needs boto3, of 1\.36 or newer"):
        store_named("s3:bucket")


async def test_a_device_puts_an_update_at_a_signed_address(store, tmp_path, payload):
    updates = StoredUpdates(store_named("s3:models/updates"))
    allowed = UploadAddresses(["https://127.0.0.1:*/models/updates/*"], "x")
    async with updates.running("me"):
        async with updates.expecting("a", describe(payload), tmp_path) as expected:
            address = expected.blob.address
            # The store itself refuses another size: the length is signed.
            assert "X-Amz-SignedHeaders=content-length%3Bhost" in address
            assert "X-Amz-Expires=3600" in address
            sending = allowed.of(expected.blob, payload)
            assert await sending.run(lambda sent: None)
            held = store.get_object(Bucket="models", Key=f"updates/{expected.name}")
            assert payload[:32] not in held["Body"].read()
            with await updates.get(expected) as file:
                file.seek(0)
                assert file.read() == payload
        await wait_until(lambda: keys(store) == ["updates/isthmus-uploads"])
        async with updates.expecting("a", describe(payload), tmp_path) as expected:
            assert await updates.get(expected) is None  # nothing was put there


def keys(store):
    return [item["Key"] for item in store.list_objects_v2(Bucket="models").get("Contents", ())]


async def test_a_place_for_updates_is_one_servers_and_no_mirror(store):
    store_named("s3:models/a").claim("me")
    store_named("s3:models/a").claim("me")
    with pytest.raises(UserError, match="is for the updates of another server; name another"):
        store_named("s3:models/a").claim("you")
    store.put_object(Bucket="models", Key="b/isthmus-mirror", Body=b"me")
    with pytest.raises(UserError, match="--uploads s3:models/b has other files; name a PREFIX"):
        store_named("s3:models/b").claim("me")
    store.put_object(Bucket="models", Key="c/" + "0f" * 32, Body=b"of a crash")
    store.put_object(Bucket="models", Key="c/isthmus-uploads", Body=b"me")
    async with StoredUpdates(store_named("s3:models/c")).running("me"):
        assert "c/" + "0f" * 32 not in keys(store)


async def test_a_store_without_tls_is_refused(store, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    with pytest.raises(UserError, match=r"devices send nothing to http://127\.0\.0\.1:9000"):
        store_named("s3:models")
