"""Updates of a link that devices put into a store, and what happens if they cannot."""

import asyncio
import contextlib
import threading

import pytest
from tests.server.mirror.stores import FolderStore
from tests.server.scripted_participant import payload_of, replying, training_request
from tests.server.waiting import wait_until
from tests.static_https import static_https

from isthmus.transport import blob_sources
from isthmus.transport.blobs import CHUNK_BYTES
from isthmus.transport.uploads import UploadAddresses
from isthmus.wire import link_pb2
from isthmus_server.mirror import stored_updates
from isthmus_server.mirror.stored_updates import StoredUpdates
from isthmus_server.model.update_decoding import UpdateSpool
from isthmus_server.transport.job_link import JobLink, SharedLink

SIZE = 20 * CHUNK_BYTES + 3
CHANGES = (
    *("federated.secure_aggregation=false", "federated.cohort=2", "federated.quorum=2", "rounds=2"),
    "seed=1",
)
LARGE = """
def model(self):
    return nn.Sequential(nn.Linear(4, 10000), nn.Linear(10000, 3))
"""
"""More than 256 KiB of parameters."""


@pytest.fixture
async def web(tmp_path, monkeypatch):
    """A web server with the folder of a store."""
    (tmp_path / "www").mkdir()
    with static_https(tmp_path / "www", tmp_path / "keys") as served:
        monkeypatch.setenv("SSL_CERT_FILE", str(served.certificate))
        yield served


@contextlib.asynccontextmanager
async def storing(link, web):
    """Have a link with a store at a web server."""
    store = FolderStore(web.folder, web.address)
    link.uploads = StoredUpdates(store)
    async with link.uploads.running("this server"):
        yield store


def allowed(web):
    return UploadAddresses([f"{web.address}*"], "server_uploads in policy.toml")


async def received(link, name, folder, blob):
    """The update of a device as a round gets it."""
    async with link.stored(name, blob, folder) as stored:
        with UpdateSpool(folder, expected_bytes=blob.size) as spool:
            await link.fetch(name, blob, spool.write, spool.take, stored)
            with spool.view() as view:
                return bytes(view), stored is not None


async def asked(link, name):
    """Have a device train; returns its result."""
    reply = await link.ask(name, training_request(link))
    return reply.trained.result


async def test_an_update_comes_through_the_store_and_not_on_the_link(network, web, tmp_path):
    link = await network.listen()
    payload = payload_of(SIZE)
    async with storing(link, web):
        await network.join("a", replying(payload), uploads=allowed(web))
        await network.join("b", replying(payload), uploads=UploadAddresses((), "x"))
        await network.join("c", replying(payload))
        proxy, port = await network.start_proxy()
        await network.join("d", replying(payload), port, uploads=allowed(web))
        for name, is_stored in {"a": True, "b": False, "c": False, "d": True}.items():
            blob = await asked(link, name)
            assert await received(link, name, tmp_path, blob) == (payload, is_stored)
            # Its bytes are counted, wherever they have come from.
            assert link.peers[name].received.take([blob.sha256]) == SIZE
            assert link.peers[name].transfer_time.advanced == SIZE
        assert sum(carried["up"] for carried in proxy.carried) < 10_000
        assert len(web.put) == 2
        await wait_until(lambda: not list(web.folder.iterdir()))


async def test_only_plain_updates_are_put_there(network, web, tmp_path):
    """Whatever the server asks: what is masked goes over the link alone."""
    link = await network.listen()
    payload = payload_of(SIZE)
    works = {
        "secure": link_pb2.TrainLocal(run_id="run", secure=b"x"),
        "ranges": link_pb2.TrainLocal(run_id="run", ranges=b"x"),
        "keep": link_pb2.TrainLocal(run_id="run", keep=True),
    }
    async with storing(link, web):
        for name, work in works.items():
            await network.join(name, replying(payload), uploads=allowed(web))
            request = link_pb2.Request(id=link.new_id(), train_local=work)
            blob = (await link.ask(name, request)).trained.result
            assert await received(link, name, tmp_path, blob) == (payload, False)
    assert web.put == []


async def test_a_server_has_one_address_for_each_update(network, web):
    """What hangs at addresses would add up with each that it names."""
    link = await network.listen()
    await network.join("a", replying(payload_of(SIZE)), uploads=allowed(web))
    blob = await asked(link, "a")
    blob.key = bytes(32)
    for name, is_stored in (("0" * 64, True), ("1" * 64, False), ("0" * 64, True)):
        blob.address = web.address + name
        assert await link.peers["a"].store(blob, pause=100) == is_stored
    assert [path for path, _ in web.put] == ["/" + "0" * 64]


async def test_a_job_of_several_uses_the_store_of_the_server(network, web, tmp_path):
    link = await network.listen()
    payload = payload_of(SIZE)
    async with storing(link, web):
        view = JobLink(SharedLink(link), "job", 1.0)
        await network.join("a", replying(payload), uploads=allowed(web))
        blob = await asked(link, "a")
        assert await received(view, "a", tmp_path, blob) == (payload, True)
        view.end()


async def test_an_upload_goes_on_while_the_link_is_broken(network, web, tmp_path):
    link = await network.listen()
    payload = payload_of(SIZE)
    web.gate = threading.Event()
    async with storing(link, web):
        proxy, port = await network.start_proxy()
        await network.join("a", replying(payload), port, uploads=allowed(web))
        blob = await asked(link, "a")
        receiving = asyncio.create_task(received(link, "a", tmp_path, blob))
        await wait_until(lambda: web.put)
        before = link.peers["a"].stream
        proxy.cut()
        await wait_until(lambda: link.peers["a"].stream not in (None, before))
        web.gate.set()
        assert await receiving == (payload, True)
        assert len(web.put) == 1


async def test_an_upload_that_ended_while_the_link_was_broken_is_told_of(network, web, tmp_path):
    link = await network.listen()
    payload = payload_of(SIZE)
    web.gate = threading.Event()
    async with storing(link, web):
        proxy, port = await network.start_proxy()
        await network.join("a", replying(payload), port, uploads=allowed(web))
        blob = await asked(link, "a")
        receiving = asyncio.create_task(received(link, "a", tmp_path, blob))
        await wait_until(lambda: web.put)
        proxy.cut(for_good=True)
        web.gate.set()
        await wait_until(lambda: list(web.folder.iterdir()))
        proxy.refusing = False
        assert await receiving == (payload, True)
        assert len(web.put) == 1


async def test_a_device_that_says_nothing_new_of_an_upload_is_not_waited_for(
    network, web, tmp_path, timeouts
):
    link = await network.listen()
    payload = payload_of(SIZE)
    web.gate = threading.Event()
    async with storing(link, web):
        await network.join("a", replying(payload), uploads=allowed(web))
        blob = await asked(link, "a")
        receiving = asyncio.create_task(received(link, "a", tmp_path, blob))
        await wait_until(lambda: web.put)
        peer = link.peers["a"]
        await wait_until(lambda: peer.storing and peer.storing[blob.sha256].sent)
        waiting = peer.storing[blob.sha256]
        while not waiting.done.done():
            await timeouts.expire((30 + link.lease_seconds) / 6)
        assert await receiving == (payload, False)
        web.gate.set()


FAULTS = (
    *("refuses", "is cut", "hangs", "loses", "lies", "signs nothing", "cannot be read"),
    "is not allowed",
)


@pytest.mark.parametrize("fault", ["", *FAULTS])
async def test_a_run_ends_with_the_same_model_whatever_the_store_does(
    deployment, network, web, monkeypatch, caplog, fault
):
    """The SHA-256 of a run without one."""

    async def run(name, make):
        for device in ("a", "b"):
            network.dial(deployment.device(device), device, uploads=make())
        await wait_until(lambda: {"a", "b"} <= deployment.link.peers.keys())
        report, _ = await deployment.run(name, *CHANGES)
        return report["rounds"]

    await deployment.start(LARGE, names=())
    without = await run("without", lambda: None)
    deployment.link = await network.listen()
    async with storing(deployment.link, web) as store:
        web.status = 403 if fault == "refuses" else 0
        web.takes = [1000] * 100 if fault == "is cut" else []
        web.lies = fault == "lies"
        if fault == "hangs":
            monkeypatch.setattr(blob_sources, "SILENT_SECONDS", 0.3)
            web.gate = threading.Event()
        elif fault == "loses":
            store.folder = web.folder / "elsewhere"
            store.folder.mkdir()
        elif fault == "signs nothing":
            store.error = OSError("no credentials")
        elif fault == "cannot be read":
            store.stream = OnlyErrors(), 320_000
        patterns = [] if fault == "is not allowed" else [f"{web.address}*"]
        stored = await run(
            "with", lambda: UploadAddresses(patterns, "server_uploads in policy.toml")
        )
        if web.gate is not None:
            web.gate.set()
        await wait_until(
            lambda: (
                fault in ("loses", "hangs", "is cut")
                or not [path for path in web.folder.iterdir() if path.is_file()]
            )
        )
    assert [row["model_sha256"] for row in stored] == [row["model_sha256"] for row in without]
    assert len({row["model_sha256"] for row in stored}) == 2
    for rows in (without, stored):
        assert {each["status"] for row in rows for each in row["receipts"]} == {"accepted"}
    # What came on the link after it was put there was not received twice.
    of = [
        {each["bytes_in"] for row in rows for each in row["receipts"]} for rows in (stored, without)
    ]
    assert of[0] == of[1]
    assert bool(web.put) == (fault not in ("signs nothing", "is not allowed"))
    if not fault:
        assert len(web.put) == 4
    said = [each for each in caplog.records if "the link" in each.getMessage()]
    if fault:
        # Once for each device: then it is left alone.
        assert 1 <= sum(each.levelname == "WARNING" for each in said) <= 4
    else:
        assert said == []


KINDS = {
    "encoded": ("federated.codec=rounded", "federated.codec_settings={bits=4}"),
    "a rule": ("federated.aggregation=median",),
    "buffered": ("federated.mode=buffered", "federated.buffer={concurrency=2}"),
    "secure": ("federated.secure_aggregation=true", "federated.cohort=3", "federated.quorum=3"),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_plain_rounds_of_each_kind_use_the_store_and_secure_ones_do_not(
    deployment, network, web, monkeypatch, kind
):
    monkeypatch.setattr(stored_updates, "LEAST_BYTES", 100)
    await deployment.start(LARGE, names=())
    async with storing(deployment.link, web):
        for name in ("a", "b", "c"):
            network.dial(deployment.device(name), name, uploads=allowed(web))
        await wait_until(lambda: {"a", "b", "c"} <= deployment.link.peers.keys())
        changes = ("federated.clients=3", *CHANGES, *KINDS[kind])
        report, _ = await deployment.run("run", *changes)
        received = [each for row in report["rounds"] for each in row["receipts"]]
        accepted = sum(each["status"] == "accepted" for each in received)
        assert accepted == (6 if kind == "secure" else 4)
        # A third device may have been invited, or have begun anew in a buffer.
        assert (len(web.put) >= accepted) == (kind != "secure")
        assert (web.put == []) == (kind == "secure")


class OnlyErrors:
    """A stream that cannot be read."""

    def read(self, size):
        raise OSError("the store is on fire")

    def close(self):
        pass
