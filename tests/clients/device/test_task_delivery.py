"""Task packages from the server: fetched, verified and loaded, or refused without execution."""

import io
import logging
import shutil
import zipfile

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.conftest import TABLE
from tests.server.loopback import LoopbackNetwork
from tests.server.waiting import wait_until

from isthmus.task import Participant, packages
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_clients.device.agent import Agent
from isthmus_clients.device.owner_limits import LimitsGuard, parse
from isthmus_server.rounds import roster
from isthmus_server.rounds.availability import DeviceAvailability
from isthmus_server.rounds.clock import Clock
from isthmus_server.rounds.roster import ParticipantRoster

AUTHOR, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2))
LAYOUT = TensorLayout.from_shapes({"bias": (3,), "weight": (3, 4)})
EXECUTED = "print('executed')\nimport version\n"


def public(author):
    return author.public_key().public_bytes_raw().hex()


def packed(folder, version=1, author=AUTHOR):
    """A package of the table task; `version.py` holds its version."""
    folder.mkdir(parents=True, exist_ok=True)
    code = TABLE.replace("rows(20,", "rows(20 * version.VERSION,") + "    pass\n"
    (folder / "task.py").write_text(EXECUTED + code)
    (folder / "version.py").write_text(f"VERSION = {version}\n")
    return packages.pack(folder, "table", author, version)


def with_signature(package, signature):
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in {**entries, "signature": signature}.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


class ServerAndDevice:
    """A server with a task package, and a device with the limits of its owner."""

    def __init__(self, folder, job):
        self.folder = folder
        self.job = job
        self.network = LoopbackNetwork()
        self.server, self.tasks = folder / "server", folder / "tasks"
        self.tasks.mkdir()

    def install(self, data, tasks):
        package = packages.read(data)
        packages.install(package, tasks, [package.author])
        return package.digest.hex()

    async def open(self, limits="", change=lambda data: data):
        """Open a run on the device: its number of examples, or why it declined."""
        self.guard = LimitsGuard(parse(limits, "policy.toml"), self.folder / "usage.json")
        link = await self.network.listen()
        run = link_pb2.OpenRun(
            run_id="run",
            job=self.job.model_dump_json(),
            base=str(self.server),
            layout=LAYOUT.header,
        )
        roster_of_run = ParticipantRoster(
            link, self.job, run, DeviceAvailability(self.job, Clock()), lambda event: None
        )
        roster_of_run.start()
        if run.package.blob.size:
            data = change(packages.installed(self.server, "table").data)
            link.publish(run.package.blob, data)
        agent = Agent(
            Participant(name="phone", regime="federated"),
            None,
            tasks=self.tasks,
            guard=self.guard,
        )
        task = self.network.dial(agent, "phone")
        await wait_until(lambda: roster_of_run.clients or roster_of_run.declined)
        declined = roster_of_run.declined.get("phone")
        result = roster_of_run.clients["phone"].examples if declined is None else declined[1]
        await roster_of_run.stop(finished=True)
        assert not link.published_blobs
        task.cancel()
        return result


@pytest.fixture
async def setup(tmp_path, make_job):
    settings = ("task.source='table/task.py:Learn'", "federated.clients=0")
    setup = ServerAndDevice(tmp_path, make_job(*settings))
    yield setup
    await setup.network.close()


PLAIN = "[privacy]\nsecure_aggregation = false\n"


async def test_a_package_of_a_trusted_author_is_fetched_once(setup, capsys):
    digest = setup.install(packed(setup.folder / "table"), setup.server)
    limits = f"authors = ['{public(AUTHOR)}']\nbytes_per_day = 20000\n{PLAIN}"
    assert await setup.open(limits) == 20
    assert packages.installed(setup.tasks, "table").digest.hex() == digest
    used = (setup.folder / "usage.json").read_text()
    assert f'"bytes": {len(packages.installed(setup.tasks, "table").data)}' in used
    assert '"rounds": 0' in used
    assert await setup.open(limits) == 20
    assert (setup.folder / "usage.json").read_text() == used
    assert capsys.readouterr().out == "executed\n" * 2


async def test_a_newer_version_replaces_the_older_one_in_a_running_process(setup):
    limits = f"authors = ['{public(AUTHOR)}']\n{PLAIN}"
    for version in (1, 2):
        setup.install(packed(setup.folder / "table", version), setup.server)
        assert await setup.open(limits) == 20 * version


@pytest.mark.parametrize("author", [None, OTHER], ids=["no author", "another author"])
async def test_a_package_of_an_untrusted_author_is_not_fetched(setup, author, capsys):
    setup.install(packed(setup.folder / "table"), setup.server)
    authors = [] if author is None else [public(author)]
    reason = await setup.open(f"authors = {authors}\n{PLAIN}")
    assert reason == (
        "its owner has not installed 'table', nor allowed packages of the author "
        f"{public(AUTHOR)} (authors, in policy.toml)"
    )
    assert list(setup.tasks.iterdir()) == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("damaged", "a transfer does not match its SHA-256: it was damaged in transit"),
        ("another package", "the package received for 'table' is not the one that was offered"),
        ("another name", "the package received for 'table' is not the one that was offered"),
        ("not signed", "the package is not signed by the author it names"),
    ],
)
async def test_a_package_is_verified_before_it_is_written(
    setup, what, sentence, capsys, monkeypatch
):
    """The server offers another package than it sends, with a valid digest of the transfer."""
    setup.install(packed(setup.folder / "table"), setup.server)
    honest = packages.installed(setup.server, "table")
    other = packages.read(packed(setup.folder / "table", version=2))
    data = {
        "damaged": honest.data,
        "another package": other.data,
        "another name": packages.pack(setup.folder / "table", "desk", AUTHOR),
        "not signed": with_signature(honest.data, bytes(64)),
    }[what]
    offered = packages.Package("table", 1, honest.author, honest.digest, {}, data)
    monkeypatch.setattr(roster, "installed_package", lambda job, base: offered)
    flip = (lambda data: data[:-1] + b"\xff") if what == "damaged" else (lambda _: data)
    reason = await setup.open(f"authors = ['{public(AUTHOR)}']\n{PLAIN}", flip)
    assert reason == sentence
    assert list(setup.tasks.iterdir()) == []
    assert capsys.readouterr().out == ""


async def test_a_task_that_the_owner_installed_or_changed_is_not_replaced(setup):
    limits = f"authors = ['{public(AUTHOR)}']\n{PLAIN}"
    setup.install(packed(setup.folder / "table", version=2), setup.server)
    packed(setup.tasks / "table", version=3)
    assert await setup.open(limits) == 60
    setup.install(packed(setup.folder / "table", version=1), setup.tasks)
    (setup.tasks / "table/version.py").write_text("VERSION = 4\n")
    changed = setup.tasks / "table/version.py"
    assert await setup.open(limits) == (
        f"{changed} is not what the author of 'table' signed; install it again, or remove "
        f"{setup.tasks / 'table/.package'} to keep the folder as your own task"
    )
    assert (setup.tasks / "table/version.py").read_text() == "VERSION = 4\n"


async def test_an_older_version_is_refused_also_after_the_task_was_removed(setup, capsys):
    """An old package is signed as validly as a new one, including the errors in it."""
    limits = f"authors = ['{public(AUTHOR)}']\n{PLAIN}"
    setup.install(packed(setup.folder / "table", version=3), setup.server)
    assert await setup.open(limits) == 60
    shutil.rmtree(setup.tasks / "table")
    shutil.rmtree(setup.server / "table")
    setup.install(packed(setup.folder / "table", version=2), setup.server)
    older = "version 2 of 'table' is older than version 3, which this machine has or had"
    assert await setup.open(limits) == older
    assert not list(setup.tasks.iterdir())
    setup.install(packed(setup.folder / "table", version=2), setup.tasks)  # nor if the owner does
    assert await setup.open(limits) == older
    setup.install(packed(setup.folder / "table", version=4), setup.server)
    assert await setup.open(limits) == 80
    assert capsys.readouterr().out == "executed\n" * 2


async def test_the_same_version_with_other_files_is_refused(setup):
    limits = f"authors = ['{public(AUTHOR)}']\n{PLAIN}"
    setup.install(packed(setup.folder / "table", version=3), setup.server)
    assert await setup.open(limits) == 60
    shutil.rmtree(setup.server / "table")
    (setup.folder / "table/more.py").write_text("")
    setup.install(packed(setup.folder / "table", version=3), setup.server)
    reason = await setup.open(limits)
    assert reason.startswith("version 3 of 'table' has other files than the version 3 that this ")


@pytest.mark.parametrize("damage", ["", "[]", '{"x": [1, "zz"]}', '{"x": 1}'])
async def test_a_record_of_versions_that_cannot_be_read_refuses_packages(setup, damage):
    (setup.folder / "packages.json").write_text(damage)
    setup.install(packed(setup.folder / "table"), setup.tasks)
    reason = await setup.open(PLAIN)
    assert reason == (
        "its record of task versions cannot be read; its owner can remove packages.json, after "
        "which older versions are accepted again"
    )


async def test_only_tasks_with_allowed_digests_are_loaded(setup, capsys):
    old = packages.read(packed(setup.folder / "table", version=2)).digest.hex()
    digest = setup.install(packed(setup.folder / "table"), setup.server)
    trusted = f"authors = ['{public(AUTHOR)}']\n"
    refused = f"its owner does not allow the task of digest {digest}"
    assert await setup.open(f"{trusted}digests = ['{old}']\n{PLAIN}") == refused
    assert list(setup.tasks.iterdir()) == []
    packed(setup.tasks / "table")
    reason = await setup.open(f"digests = ['{digest}']\n{PLAIN}")
    assert reason.endswith(
        "(digests, in policy.toml), and 'table' was not installed from a package"
    )
    setup.install(packed(setup.folder / "table"), setup.tasks)
    assert await setup.open(f"digests = ['{old}']\n{PLAIN}") == refused
    assert capsys.readouterr().out == ""
    assert await setup.open(f"digests = ['{digest}']\n{PLAIN}") == 20
    (setup.tasks / "table/version.py").write_text("VERSION = 5\n")
    reason = await setup.open(f"digests = ['{digest}']\n{PLAIN}")
    assert reason.endswith(
        "is not what the author of 'table' signed; install it again, or remove "
        f"{setup.tasks / 'table/.package'} to keep the folder as your own task"
    )


async def test_a_server_whose_own_copy_was_changed_offers_no_package(setup, caplog):
    setup.install(packed(setup.folder / "table"), setup.server)
    (setup.server / "table/version.py").write_text("VERSION = 6\n")
    with caplog.at_level(logging.WARNING):
        reason = await setup.open(f"authors = ['{public(AUTHOR)}']\n{PLAIN}")
    assert "devices are not offered the task: " in caplog.text
    assert reason.startswith("task.source='table/task.py:Learn' is not a file in ")
