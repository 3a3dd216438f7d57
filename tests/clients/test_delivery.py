"""A task that a server hands on: fetched, checked and loaded, or refused with nothing executed."""

import io
import logging
import sys
import zipfile

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.conftest import TABLE
from tests.server.conftest import Net, until

from isthmus.task import Participant, packages
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_clients.device.owner_limits import Guard, parse
from isthmus_server.rounds import roster
from isthmus_server.rounds.roster import Roster

AUTHOR, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2))
LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})
EXECUTED = "print('executed')\nimport beside\n"


def public(author):
    return author.public_key().public_bytes_raw().hex()


def packed(folder, version=1, author=AUTHOR):
    """A package of the table task; `beside.py` tells its versions apart."""
    folder.mkdir(parents=True, exist_ok=True)
    code = TABLE.replace("rows(20,", "rows(20 * beside.VERSION,") + "    pass\n"
    (folder / "task.py").write_text(EXECUTED + code)
    (folder / "beside.py").write_text(f"VERSION = {version}\n")
    return packages.pack(folder, "table", author)


def with_signature(package, signature):
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in {**entries, "signature": signature}.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


class Place:
    """A server with a package, and a device with an owner."""

    def __init__(self, folder, job):
        self.folder = folder
        self.job = job
        self.net = Net()
        self.server, self.tasks = folder / "server", folder / "tasks"
        self.tasks.mkdir()

    def has(self, data, tasks):
        package = packages.read(data)
        packages.install(package, tasks, [package.author])
        return package.digest.hex()

    async def open(self, policy="", change=lambda data: data):
        """What the server hears of the device: its examples, or why it declined."""
        self.guard = Guard(parse(policy, "policy.toml"), self.folder / "usage.json")
        link = await self.net.listen()
        run = link_pb2.OpenRun(
            run_id="run",
            job=self.job.model_dump_json(),
            base=str(self.server),
            layout=LAYOUT.header,
        )
        here = Roster(link, self.job, run, lambda kind, data: None)
        here.start()
        if run.package.blob.size:
            data = change(packages.installed(self.server, "table").data)
            link.publish(run.package.blob, data)
        agent = Agent(
            Participant(name="phone", regime="federated"),
            None,
            tasks=self.tasks,
            guard=self.guard,
        )
        task = self.net.call(agent, "phone")
        await until(lambda: here.clients or here.declined)
        said = here.declined.get("phone")
        found = here.clients["phone"].examples if said is None else said[1]
        await here.stop(over=True)
        assert not link.published_blobs
        task.cancel()
        return found


@pytest.fixture
async def place(tmp_path, make_job, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    settings = ("task.source='table/task.py:Learn'", "federated.clients=0")
    place = Place(tmp_path, make_job(*settings))
    yield place
    await place.net.close()
    sys.modules.pop("beside", None)


PLAIN = "[privacy]\nsecure_aggregation = false\n"


async def test_a_package_of_an_author_whom_the_owner_trusts_is_fetched_once(place, capsys):
    digest = place.has(packed(place.folder / "table"), place.server)
    policy = f"authors = ['{public(AUTHOR)}']\nbytes_per_day = 20000\n{PLAIN}"
    assert await place.open(policy) == 20
    assert packages.installed(place.tasks, "table").digest.hex() == digest
    used = (place.folder / "usage.json").read_text()
    assert f'"bytes": {len(packages.installed(place.tasks, "table").data)}' in used
    assert '"rounds": 0' in used
    assert await place.open(policy) == 20
    assert (place.folder / "usage.json").read_text() == used
    assert capsys.readouterr().out == "executed\n" * 2


async def test_a_newer_version_takes_its_place_also_in_a_process_that_ran_the_older_one(place):
    policy = f"authors = ['{public(AUTHOR)}']\n{PLAIN}"
    for version in (1, 2):
        place.has(packed(place.folder / "table", version), place.server)
        assert await place.open(policy) == 20 * version


@pytest.mark.parametrize("author", [None, OTHER], ids=["nobody", "somebody else"])
async def test_a_package_of_an_author_who_is_not_trusted_is_not_even_fetched(place, author, capsys):
    place.has(packed(place.folder / "table"), place.server)
    authors = [] if author is None else [public(author)]
    said = await place.open(f"authors = {authors}\n{PLAIN}")
    assert said == (
        "its owner has not installed 'table', nor allowed packages of the author "
        f"{public(AUTHOR)} (authors, in policy.toml)"
    )
    assert list(place.tasks.iterdir()) == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("damaged", "a transfer does not match its SHA-256: it was damaged on the way"),
        ("another package", "the package that came for 'table' is not the one that was offered"),
        ("another name", "the package that came for 'table' is not the one that was offered"),
        ("not signed", "the package is not signed by the author it names"),
    ],
)
async def test_what_comes_is_checked_before_it_is_written(
    place, what, sentence, capsys, monkeypatch
):
    """A server lies about what it offers; the digest of the transfer is its own."""
    place.has(packed(place.folder / "table"), place.server)
    honest = packages.installed(place.server, "table")
    other = packages.read(packed(place.folder / "table", version=2))
    data = {
        "damaged": honest.data,
        "another package": other.data,
        "another name": packages.pack(place.folder / "table", "desk", AUTHOR),
        "not signed": with_signature(honest.data, bytes(64)),
    }[what]
    offered = packages.Package("table", honest.author, honest.digest, {}, data)
    monkeypatch.setattr(roster, "_installed", lambda job, base: offered)
    flip = (lambda data: data[:-1] + b"\xff") if what == "damaged" else (lambda _: data)
    said = await place.open(f"authors = ['{public(AUTHOR)}']\n{PLAIN}", flip)
    assert said == sentence
    assert list(place.tasks.iterdir()) == []
    assert capsys.readouterr().out == ""


async def test_what_the_owner_put_there_by_hand_or_changed_stays(place):
    policy = f"authors = ['{public(AUTHOR)}']\n{PLAIN}"
    place.has(packed(place.folder / "table", version=2), place.server)
    packed(place.tasks / "table", version=3)
    assert await place.open(policy) == 60
    place.has(packed(place.folder / "table", version=1), place.tasks)
    (place.tasks / "table/beside.py").write_text("VERSION = 4\n")
    assert await place.open(policy) in (60, 80)  # this process knows beside.py from before
    assert (place.tasks / "table/beside.py").read_text() == "VERSION = 4\n"


async def test_with_digests_only_those_tasks_are_loaded(place, capsys):
    old = packages.read(packed(place.folder / "table", version=2)).digest.hex()
    digest = place.has(packed(place.folder / "table"), place.server)
    trusted = f"authors = ['{public(AUTHOR)}']\n"
    refused = f"its owner does not allow the task of digest {digest}"
    assert await place.open(f"{trusted}digests = ['{old}']\n{PLAIN}") == refused
    assert list(place.tasks.iterdir()) == []
    packed(place.tasks / "table")
    said = await place.open(f"digests = ['{digest}']\n{PLAIN}")
    assert said.endswith("(digests, in policy.toml), and 'table' was not installed from a package")
    place.has(packed(place.folder / "table"), place.tasks)
    assert await place.open(f"digests = ['{old}']\n{PLAIN}") == refused
    assert capsys.readouterr().out == ""
    assert await place.open(f"digests = ['{digest}']\n{PLAIN}") == 20
    (place.tasks / "table/beside.py").write_text("VERSION = 5\n")
    said = await place.open(f"digests = ['{digest}']\n{PLAIN}")
    assert said.endswith("is not what the author of 'table' signed; install it again")


async def test_a_server_whose_own_copy_was_changed_hands_nothing_on(place, caplog):
    place.has(packed(place.folder / "table"), place.server)
    (place.server / "table/beside.py").write_text("VERSION = 6\n")
    with caplog.at_level(logging.WARNING):
        said = await place.open(f"authors = ['{public(AUTHOR)}']\n{PLAIN}")
    assert "devices are not offered the task: " in caplog.text
    assert said.startswith("task.source='table/task.py:Learn' is not a file in ")
