"""Models of a link that devices take from a mirror over HTTPS, and what happens if they cannot."""

import contextlib
import threading

import pytest
from tests.server.scripted_participant import payload_of, replying, training_request
from tests.server.waiting import wait_until
from tests.static_https import static_https

from isthmus.transport import blob_sources
from isthmus.transport.blobs import CHUNK_BYTES, describe
from isthmus.transport.mirrors import MirrorSources
from isthmus.wire import link_pb2
from isthmus_server.mirror.folder import MirrorFolder
from isthmus_server.mirror.mirrored_blobs import MirroredBlobs
from isthmus_server.mirror.place import MARKER
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
"""More than 64 KiB of parameters."""


@pytest.fixture
async def web(tmp_path, monkeypatch):
    """A web server with the folder of a mirror."""
    with static_https(tmp_path / "www", tmp_path / "keys") as served:
        monkeypatch.setenv("SSL_CERT_FILE", str(served.certificate))
        yield served


@contextlib.asynccontextmanager
async def mirroring(link, web):
    """Have a link with a mirror at a web server."""
    link.mirror = MirroredBlobs(MirrorFolder(str(web.folder), web.address))
    async with link.mirror.running("this server"):
        yield


def allowed(web):
    return MirrorSources([f"{web.address}*"], "server_sources in policy.toml")


async def test_devices_get_a_model_from_the_mirror_and_a_datacenter_on_the_link(network, web):
    link = await network.listen()
    payload = payload_of(SIZE)
    blob = describe(payload)
    async with mirroring(link, web):
        link.publish(blob, payload)
        joined = {}
        for name, mirrors in {"a": allowed(web), "b": MirrorSources((), "x"), "c": None}.items():
            joined[name] = await network.join(name, replying(), mirrors=mirrors)
        joined["dc"] = await network.join("dc", replying(), role=link_pb2.DATACENTER)
        for name, participant in joined.items():
            await link.ask(name, training_request(link, blob))
            assert participant.buffers == [payload]
        sent = {name: peer.sent.total for name, peer in link.peers.items()}
        assert sent == {"a": 0, "b": SIZE, "c": SIZE, "dc": SIZE}
        assert len(web.asked) == 1
        # Records of an app are for one device, and not put there.
        records = link_pb2.AppMessage(run_id="run", records=blob)
        await link.ask("a", link_pb2.Request(id=link.new_id(), app=records))
        assert len(web.asked) == 1
        link.retract(blob)


async def test_a_job_of_several_uses_the_mirror_of_the_server(network, web):
    link = await network.listen()
    payload = payload_of(SIZE)
    blob = describe(payload)
    async with mirroring(link, web):
        view = JobLink(SharedLink(link), "job", 1.0)
        await network.join("a", replying(), mirrors=allowed(web))
        view.publish(blob, payload)
        view._shared.note_open(link.peers["a"], view.account)
        await view.ask("a", training_request(link, blob))
        assert link.peers["a"].sent.total == 0
        view.retract(blob)
        view.end()


FAULTS = (
    "lies",
    "is cut",
    "has nothing",
    "hangs",
    "drips",
    "drips its answer",
    "is full",
    "is not allowed",
)


@pytest.mark.parametrize("fault", ["", *FAULTS])
async def test_a_run_ends_with_the_same_model_whatever_the_mirror_does(
    deployment, network, web, tmp_path, monkeypatch, caplog, fault
):
    """The SHA-256 of a run without one; and no bytes of models on the link if it works."""

    async def run(name, mirrors):
        for device in ("a", "b"):
            network.dial(deployment.device(device), device, mirrors=mirrors)
        await wait_until(lambda: {"a", "b"} <= deployment.link.peers.keys())
        report, _ = await deployment.run(name, *CHANGES)
        return report["rounds"]

    await deployment.start(LARGE, names=())
    without = await run("without", None)
    deployment.link = await network.listen()
    async with mirroring(deployment.link, web):
        web.lies = fault == "lies"
        web.sends = {"is cut": 0, "hangs": 10}.get(fault)
        if fault == "has nothing":
            web.folder = tmp_path / "elsewhere"
        elif fault == "hangs":
            monkeypatch.setattr(blob_sources, "SILENT_SECONDS", 0.1)
            web.gate = threading.Event()
        elif fault.startswith("drips"):  # and never ends: no silence of its own is long
            monkeypatch.setattr(blob_sources, "SILENT_SECONDS", 0.3)
            web.sends = 1000
            web.slow = 0.01
            web.drips_answers = fault == "drips its answer"
        elif fault == "is full":
            monkeypatch.setattr(MirrorFolder, "put", full)
        patterns = [] if fault == "is not allowed" else [f"{web.address}*"]
        mirrored = await run("with", MirrorSources(patterns, "server_sources in policy.toml"))
        assert len(list(tmp_path.glob("www/*"))) == (1 if fault == "is full" else 3)
    assert list(tmp_path.glob("www/*")) == [tmp_path / "www" / MARKER]
    digests = [row["model_sha256"] for row in without]
    assert [row["model_sha256"] for row in mirrored] == digests
    assert len(set(digests)) == 2
    size = without[0]["receipts"][0]["bytes_out"]
    assert size > 200_000
    sent = {each["bytes_out"] for row in mirrored for each in row["receipts"]}
    assert sent == {size if fault else 0}
    assert bool(web.asked) == (fault not in ("is full", "is not allowed"))
    said = [each for each in caplog.records if "mirror" in each.getMessage()]
    if fault:
        if fault.startswith("drips"):
            assert "it gave too little for 0.3 s" in caplog.text
        # Once for each device: then it is left alone. A model that is missing is said each time.
        most = 4 if fault == "has nothing" else 2
        assert 1 <= sum(each.levelname == "WARNING" for each in said) <= most


def full(place, name, stream, size):
    raise OSError("No space left on device")
