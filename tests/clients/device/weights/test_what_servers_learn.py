"""What a server reads of the models on a device says nothing of the owner's paths and sources."""

import errno
import hashlib
import os

import pytest
from tests.clients.device.weights.test_keeper import LINK, NO_LINK

from isthmus.errors import TaskError, UserError
from isthmus.job import with_changes
from isthmus.start.manifest import ListedFile, StartManifest
from isthmus.transport.blob_sources import NamedSource
from isthmus_clients.device.weights.store import DiskFull, PartialFile


def everything_said(device, error):
    """What the server reads: the error of the request, and why it was waited."""
    return " ".join([str(error.value), *(report.pause for report in device.reports)])


async def test_a_file_that_an_owner_may_not_read_is_named_in_the_log_only(
    device, job, tmp_path, caplog, monkeypatch
):
    real = os.open

    def refused(path, *arguments, **options):
        if str(path).startswith(str(tmp_path / "secret-folder")):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refused)  # the tests may run as root, who may read all
    limits = NO_LINK + f"sources = ['file:{tmp_path}/secret-folder']\n"
    blobs = [NamedSource(f"file:{tmp_path}/secret-folder")]
    with pytest.raises(UserError) as error:
        await device.get(job, limits, blobs=blobs)
    assert "secret-folder" in caplog.text
    assert "secret-folder" not in everything_said(device, error)


async def test_an_address_of_the_owner_is_named_in_the_log_only(device, job, caplog):
    limits = NO_LINK + "sources = ['https://127.0.0.1:9/secret-folder/']\n"
    with pytest.raises(UserError) as error:
        await device.get(job, limits)
    assert "127.0.0.1:9/secret-folder/ cannot be reached" in caplog.text
    assert "127.0.0.1" not in everything_said(device, error)


async def test_a_server_does_not_learn_which_names_and_sizes_a_folder_has(
    device, job, manifest, tmp_path
):
    folder = tmp_path / "models"
    folder.mkdir()
    limits = NO_LINK + f"sources = ['file:{folder}']\n"
    said = []
    for has in (False, True):
        if has:
            (folder / "model.safetensors").write_bytes(bytes(manifest.size))
        device.reports.clear()
        with pytest.raises(UserError) as error:
            await device.get(job, limits)
        said.append({*everything_said(device, error).split()})
    assert said[0] == said[1]


async def test_a_full_disk_is_named_in_the_log_only(device, job, pull, caplog, monkeypatch):
    def full(partial, data):
        raise DiskFull(f"the disk of {partial._store.directory} is full")

    monkeypatch.setattr(PartialFile, "write", full)
    with pytest.raises(UserError, match="the disk of the store of models is full") as error:
        await device.get(job, LINK, pull=pull)
    assert str(device.store.directory) in caplog.text
    assert str(device.store.directory) not in everything_said(device, error)


async def test_a_file_that_is_none_of_tensors_is_named_in_the_log_only(
    device, model, job, tmp_path, caplog
):
    files = []
    folder = tmp_path / "blobs"
    folder.mkdir()
    for number in (1, 2):
        data = bytes([number]) * 100
        sha256 = hashlib.sha256(data).hexdigest()
        (folder / sha256).write_bytes(data)
        files.append(ListedFile("model", f"{number}.safetensors", sha256, 100))
    listed = StartManifest(tuple(files))
    odd = with_changes(job, {"model.sha256": listed.digest})
    limits = NO_LINK + f"sources = ['file:{folder}']\n"
    with pytest.raises(TaskError, match="cannot be used on this device; see its log") as error:
        await device.get(odd, limits, listed=listed)
    assert str(tmp_path) in caplog.text
    assert str(tmp_path) not in everything_said(device, error)
