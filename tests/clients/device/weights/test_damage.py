"""Files of the store that were changed on disk are found before anything is trained with them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from tests.clients.device.weights.test_keeper import LINK, NO_LINK, loaded

from isthmus.errors import AdmissionRefused, TaskError, UserError
from isthmus.job import load_job
from isthmus.start.files import StartFiles
from isthmus.start.manifest import ListedFile, StartManifest
from isthmus_clients.device.weights.store import NotReadNow, WeightStore
from isthmus_clients.weight_commands import weights

OTHER_USER = 65534


def flipped(path):
    """One bit of the last value."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def truncated(path):
    """As after a crash of the disk."""
    path.chmod(0o600)
    os.truncate(path, 1000)


def emptied(path):
    """As after a crash of the disk, too."""
    path.chmod(0o600)
    os.truncate(path, 0)


def replaced(path):
    """Another file of the same size."""
    path.with_name("other").write_bytes(bytes(path.stat().st_size))
    path.with_name("other").replace(path)


def linked(path):
    """The right bytes, in another place, where others may change them."""
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def linked_to_nothing(path):
    """Such a link whose place is gone."""
    path.unlink()
    path.symlink_to(path.with_name("gone"))


DAMAGES = {
    flipped: "its bytes have changed since they were verified",
    truncated: "its bytes have changed since they were verified",
    emptied: "its bytes have changed since they were verified",
    replaced: "its bytes have changed since they were verified",
    linked: "it is a symbolic link",
    linked_to_nothing: "it is a symbolic link",
}
each_damage = pytest.mark.parametrize(
    ("damaged", "said"), DAMAGES.items(), ids=[each.__name__ for each in DAMAGES]
)


@pytest.fixture
def added(device, model, manifest):
    """The file of a model that an owner has added to the store, or a device has fetched."""
    device.store.add(model)
    return device.store.path(manifest.files[0].sha256)


@each_damage
async def test_what_is_damaged_is_fetched_again(
    device, job, manifest, pull, added, caplog, damaged, said
):
    damaged(added)
    place = await device.get(job, pull=pull)
    assert loaded(place, manifest)
    assert not added.is_symlink()
    assert f"model.safetensors in the store, {added}, is damaged: {said}" in caplog.text
    told = {report.pause for report in device.reports}
    assert told == {"model.safetensors was damaged in its store, fetched anew"}
    [kept] = device.store.models()
    assert kept.is_whole
    assert not kept.damaged


@each_damage
async def test_what_is_damaged_and_has_no_source_is_one_sentence(
    device, job, pull, added, damaged, said
):
    damaged(added)
    for _ in range(2):  # each time that the server asks
        with pytest.raises(AdmissionRefused) as refused:
            await device.get(job, "", pull=pull)
        assert str(refused.value) == (
            "model.safetensors was damaged in its store; its owner lets it fetch no models "
            "(weights_mb in policy.toml), and the model that 'table' starts from, of 0.8 MB, is "
            "not here; its owner can add it with `isthmus weights add`"
        )
    assert pull.asked == []
    with pytest.raises(UserError, match=r"was damaged in its store; .* has no source: its owner"):
        await device.get(job, NO_LINK)
    with pytest.raises(TaskError, match="of the model that 'table' starts from is not here"):
        device.kept.place(job)  # nothing is trained on it


@each_damage
async def test_an_owner_who_adds_it_again_has_it(
    device, job, model, manifest, pull, added, damaged, said
):
    damaged(added)
    device.store = WeightStore(device.store.directory)  # as the command has it, which knows nothing
    assert device.store.add(model).is_whole
    assert loaded(await device.get(job, "", pull=pull), manifest)
    assert pull.asked == []


@each_damage
def test_the_list_says_it(device, manifest, model, added, damaged, said):
    def listed(*options):
        state = ["--weights", str(device.store.directory)]
        return CliRunner().invoke(weights, ["list", *options, *state])

    assert listed("--check").exit_code == 0
    damaged(added)
    checked = listed("--check")
    assert checked.exit_code == 1
    assert checked.output.splitlines()[0] == (
        f"{manifest.digest}  0.8 MB  {model} (added, damaged: model.safetensors)"
    )
    [row] = json.loads(listed("--check", "--json").output)["models"]
    assert row["damaged"] == ["model.safetensors"]
    assert not row["whole"]
    # Without reading all of them, by what a look at the file shows.
    plain = listed()
    assert plain.exit_code == 0
    assert ("damaged" in plain.output) == (damaged not in (flipped, replaced))
    # Of no use, and removed like any other.
    device.store.remove(manifest.digest)
    assert device.store.used_bytes == 0
    assert not os.path.lexists(added)


async def test_damage_while_a_run_is_open_is_found_before_the_next_start(
    device, job, manifest, pull, added
):
    assert loaded(await device.get(job, "", pull=pull), manifest)
    flipped(added)
    with pytest.raises(TaskError, match="start this device again, so that it gets it"):
        device.kept.place(job)


async def test_a_file_is_read_once_for_each_state(device, job, pull, added, monkeypatch):
    from isthmus_clients.device.weights import store as store_module

    read = []
    real = store_module.hash_of
    monkeypatch.setattr(store_module, "hash_of", lambda path: read.append(path) or real(path))
    for _ in range(3):
        await device.get(job, "", pull=pull)
    assert read == [added]


async def test_requests_at_the_same_time_read_a_file_once(device, job, pull, added, monkeypatch):
    from isthmus_clients.device.weights import store as store_module

    read = []
    real = store_module.hash_of

    def slow(path):
        read.append(path)
        time.sleep(0.3)  # in which the others would read it, too
        return real(path)

    monkeypatch.setattr(store_module, "hash_of", slow)
    await asyncio.gather(*(device.get(job, "", pull=pull) for _ in range(3)))
    assert read == [added]


@contextlib.contextmanager
def no_more_open_files():
    """Within it this process can open no file."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open("/", os.O_RDONLY)
    os.close(taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_process_without_room_for_open_files_finds_no_damage(
    device, job, manifest, pull, added, caplog
):
    await device.get(job, "", pull=pull)
    device.store = WeightStore(device.store.directory)
    keeper = device.keeper()
    keeper.note(manifest, job)
    with no_more_open_files():
        with pytest.raises(NotReadNow, match="cannot be read now: Too many open files"):
            device.store.damage(added.name)
        with pytest.raises(TaskError, match=r"^the store of models cannot be read now; see this"):
            keeper.place(job)
        with pytest.raises(UserError, match="cannot be read now"):
            device.store.drop(added.name)
    assert "is damaged" not in caplog.text
    # Nothing was deleted, and what was not known then is asked again.
    assert loaded(await device.get(job, "", pull=pull), manifest)


async def test_what_no_source_has_stays_and_is_named_each_time(device, job, manifest, pull, added):
    flipped(added)
    for _ in range(2):
        with pytest.raises(UserError, match=r"was damaged in its store; .* has no source: its own"):
            await device.get(job, NO_LINK)
    [kept] = device.store.models()
    assert kept.damaged == ("model.safetensors",)
    assert added.stat().st_size == manifest.size


async def test_what_is_damaged_needs_no_more_room(device, job, manifest, pull, added):
    """The owner's limit has room for one such file."""
    flipped(added)
    assert loaded(await device.get(job, "weights_mb = 1\n", pull=pull), manifest)
    assert device.store.used_bytes == manifest.size


async def test_a_server_that_lies_about_a_size_has_nothing_deleted(
    device, job, manifest, pull, added
):
    [file] = manifest.files
    lie = StartManifest((ListedFile(file.part, file.name, file.sha256, file.size + 1),))
    with pytest.raises(UserError, match=r"^model\.safetensors of the model that"):
        await device.get(job, LINK, listed=lie, pull=pull)
    assert device.store.damage(file.sha256) == ""
    assert added.stat().st_size == file.size


async def test_of_several_files_the_damaged_ones_are_fetched(device, tmp_path, caplog):
    folder = tmp_path / "several"
    folder.mkdir()
    parts = {f"model-{n}.safetensors": {f"w{n}": torch.full((1000,), float(n))} for n in range(4)}
    for name, tensors in parts.items():
        save_file(tensors, folder / name)
    index = {next(iter(tensors)): name for name, tensors in parts.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    text = 'name = "several"\n[task]\nsource = "task.py:Learn"\n[model]\nstart = "several"\n'
    (tmp_path / "job.toml").write_text(text)
    job = load_job(tmp_path / "job.toml")
    manifest = StartManifest.of(StartFiles.find_all(folder))
    device.store.add(folder)
    damaged = manifest.files[1:3]
    for file in damaged:
        flipped(device.store.path(file.sha256))
    asked = []

    async def pull(sha256, offset, length):
        asked.append(sha256.hex())
        [name] = [file.name for file in manifest.files if file.sha256 == sha256.hex()]
        return bytearray((folder / name).read_bytes()[offset : offset + length])

    assert loaded(await device.get(job, listed=manifest, pull=pull), manifest)
    assert asked == [file.sha256 for file in damaged]
    first = "model-1.safetensors and 1 more file were damaged in its store, fetched anew"
    assert {report.pause for report in device.reports} == {first}
    assert caplog.text.count("is damaged: its bytes have changed") == 2


PERMISSIONS = """
import os, sys
from pathlib import Path
from isthmus_clients.device.weights.store import NotReadNow, WeightStore
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
store = WeightStore(Path(sys.argv[1]))
print(repr(store.damage(sys.argv[3])))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program as another user")
@pytest.mark.parametrize(("of_another", "said"), [(False, "''"), (True, "Permission denied'")])
def test_permissions_are_corrected_if_the_file_is_this_users(device, added, of_another, said):
    """A file that nobody may read; of another user it cannot be used."""
    # Other users cannot get into the folders of pytest.
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        folder = Path(place) / "weights"
        shutil.copytree(device.store.directory, folder)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)
        path = folder / "files" / added.name
        path.chmod(0)
        if of_another:
            os.chown(path, 0, 0)
        command = [sys.executable, "-c", PERMISSIONS, str(folder), str(OTHER_USER), added.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        assert found.stdout.strip().endswith(said)
        assert (path.stat().st_mode & 0o777 == 0o400) == (not of_another)


def test_permissions_that_let_others_write_are_corrected(device, added):
    added.chmod(0o666)
    assert device.store.damage(added.name) == ""
    assert added.stat().st_mode & 0o777 == 0o400


async def test_a_folder_in_its_place_is_one_sentence(device, job, pull, added, caplog):
    added.unlink()
    added.mkdir()
    with pytest.raises(UserError, match="the store of models cannot be written to; see this dev"):
        await device.get(job, LINK, pull=pull)
    assert f"{added}, is damaged: it is no file" in caplog.text
    with pytest.raises(UserError, match="cannot be used: Is a directory"):
        device.store.remove(added.name)
