"""Models of a link that devices take from a mirror over HTTPS, and what happens if they cannot."""

import contextlib
import math
import threading

import pytest
from tests.server.scripted_participant import payload_of, replying, training_request
from tests.server.waiting import wait_until
from tests.static_https import static_https

from isthmus.transport import blob_sources
from isthmus.transport.blobs import CHUNK_BYTES, describe
from isthmus.transport.mirrors import MirrorSources
from isthmus.wire import link_pb2
from isthmus_server.mirror import mirror_use
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


async def test_the_server_counts_and_says_what_its_mirror_should_have_sent(
    network, web, tmp_path, timeouts, caplog
):
    """The operator of a web server that has ended sees it in no other place."""
    link = await network.listen()
    places = {"a": allowed(web), "b": allowed(web), "c": None, "d": allowed(web)}
    models = [payload_of(SIZE), payload_of(SIZE + 1), payload_of(SIZE + 2)]
    async with mirroring(link, web):
        use = link.mirror.use
        for name in ("a", "b", "c"):
            await network.join(name, replying(), mirrors=places[name])
        await sent(link, models[0], "a", "a", "b", "c")
        assert use.taken == {"mirror": 2, "link": 1}
        await timeouts.expire(mirror_use.GATHER_SECONDS)
        assert said(caplog) == [f"1 device that had got nothing {NOTHING}"]
        web.folder = tmp_path / "elsewhere"
        await network.join("d", replying(), mirrors=places["d"])
        for model in models[1:]:
            await sent(link, model, "a", "b", "c", "d")
        assert use.taken == {"mirror": 2, "link": 9}
        # Not again within ten minutes, and not of an owner who does not allow it.
        assert len(said(caplog)) == 1
        use._line.cancel()
        use._say()
        assert said(caplog)[1:] == [f"2 devices that had got models {MODELS}; 1 device {NEVER}"]
    assert len(said(caplog)) == 2


@pytest.mark.parametrize("later", ["at once", "when it is put there again", "when it can be put"])
async def test_a_model_that_a_device_has_kept_from_the_link_is_not_counted_as_from_the_mirror(
    network, web, tmp_path, later
):
    """As for an evaluation and the round after it, or for two attempts at a round."""
    link = await network.listen()
    payload = payload_of(SIZE)
    kept = []
    async with mirroring(link, web):
        use = link.mirror.use
        web.folder = tmp_path / "elsewhere"
        if later == "when it can be put":
            link.mirror._rests_until = math.inf
        await network.join(
            "a",
            replying(),
            mirrors=allowed(web),
            held=lambda request: kept[0] if kept else None,
        )
        blob = describe(payload)
        link.publish(blob, payload)
        await link.ask("a", training_request(link, blob))
        kept.append(payload)
        link.mirror._rests_until = 0.0
        if later == "when it is put there again":
            link.mirror._forget(blob.sha256)
        await link.ask("a", training_request(link, blob))
        link.retract(blob)
        assert use.taken == {"mirror": 0, "link": int(later != "when it can be put")}


MODELS = (
    "from the mirror got one from this server, although the mirror has it: look at its web server"
)
NOTHING = (
    "from the mirror so far got a model from this server, although the mirror has it: if their "
    "owners allow the mirror (server_sources), look at its web server"
)
NEVER = f"that had got nothing {NOTHING}"


async def sent(link, payload, *names):
    """Have devices asked for work with a model, one after the other."""
    blob = describe(payload)
    link.publish(blob, payload)
    for name in names:
        await link.ask(name, training_request(link, blob))
    link.retract(blob)


def said(caplog):
    """The server's lines about what devices do with the mirror."""
    return [
        each.getMessage()
        for each in caplog.records
        if each.name == "isthmus_server.mirror.mirror_use"
    ]


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
    lines = said(caplog)
    assert len(lines) == (0 if fault in ("", "is full") else 1)
    warned = [
        each
        for each in caplog.records
        if "mirror" in each.getMessage() and each.getMessage() not in lines
    ]
    if fault:
        if fault.startswith("drips"):
            assert "gave too little for 0.3 s; models come from the server" in caplog.text
        # Once for each device: then it is left alone. A model that is missing is said each time.
        most = 4 if fault == "has nothing" else 2
        assert 1 <= sum(each.levelname == "WARNING" for each in warned) <= most


def full(place, name, stream, size):
    raise OSError("No space left on device")
