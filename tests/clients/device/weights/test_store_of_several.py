"""A store that several devices, jobs and owners' commands use at the same time."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import save_file

from isthmus.errors import AdmissionRefused, UserError
from isthmus.job import with_changes
from isthmus.start.files import StartFiles
from isthmus.start.manifest import ListedFile, StartManifest
from isthmus_clients.device.weights import store as store_module
from isthmus_clients.device.weights.store import WeightStore


@pytest.fixture
def store(tmp_path):
    return WeightStore(tmp_path / "weights")


def test_a_model_is_not_removed_while_a_process_fills_a_file_of_it(store, manifest, model):
    """Its end would put what another process has begun by then into the store as whole."""
    [file] = manifest.files
    data = (model / "model.safetensors").read_bytes()
    store.keep(manifest, "base")
    with store.filling(file) as filled:
        filled.write(data[:1000])
        with pytest.raises(UserError, match="a process fills a file of this model"):
            store.remove(manifest.digest)
        with store.filling(file) as second:
            assert second is None
        filled.write(data[1000:])
        assert filled.finish()
    assert hashlib.sha256(store.path(file.sha256).read_bytes()).hexdigest() == file.sha256
    assert store.remove(manifest.digest) == file.size


def test_a_half_of_a_model_is_removed(store, manifest):
    [file] = manifest.files
    store.keep(manifest, "base")
    with store.filling(file) as filled:
        filled.write(bytes(1000))
    assert store.remove(manifest.digest) == 1000
    assert store.used_bytes == 0


def test_what_an_interrupted_copy_leaves_can_be_removed(store, model, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store_module.PartialFile, "finish", stopped)
        with pytest.raises(KeyboardInterrupt):
            store.add(model)
    assert store.used_bytes > 0
    [left] = store.models()
    assert not left.is_whole
    store.remove(left.manifest.digest)
    assert store.used_bytes == 0


def test_a_job_does_not_change_the_configuration_of_another(store, model):
    manifest = store.add(model).manifest
    places = {file.sha256: store.path(file.sha256) for file in manifest.files}
    of_one = store.view(manifest, places, {"model_type": "one"})
    of_two = store.view(manifest, places, {"model_type": "two"})
    without = store.view(manifest, places, None)
    configs = [StartFiles.find(each.start).config() for each in (of_one, of_two, without)]
    assert configs == [{"model_type": "one"}, {"model_type": "two"}, None]
    assert store.view(manifest, places, {"model_type": "one"}) == of_one


def test_a_device_does_not_change_the_links_of_another(store, model, tmp_path):
    [file] = StartManifest.of(StartFiles.find_all(model)).files
    manifest = StartManifest((file,))
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes((model / "model.safetensors").read_bytes())
    first = store.view(manifest, {file.sha256: model / "model.safetensors"}, None)
    store.view(manifest, {file.sha256: copy}, None)
    assert (first.start / "model.safetensors").resolve() == model / "model.safetensors"


def test_a_server_that_changes_configurations_does_not_fill_the_disk(store, model, monkeypatch):
    monkeypatch.setattr(store_module, "_MAX_VIEWS", 3)
    manifest = store.add(model).manifest
    places = {file.sha256: store.path(file.sha256) for file in manifest.files}
    for number in range(10):
        place = store.view(manifest, places, {"number": number})
    assert len(list((store.directory / "views").iterdir())) == 3
    assert StartFiles.find(place.start).config() == {"number": 9}
    store.remove(manifest.digest)
    assert list((store.directory / "views").iterdir()) == []


def test_made_up_sizes_do_not_change_what_is_known_of_a_whole_model(store, model, manifest):
    store.add(model)
    [file] = manifest.files
    lie = StartManifest((ListedFile(file.part, file.name, file.sha256, file.size + 1),))
    assert lie.digest == manifest.digest
    store.keep(lie, "base")
    assert store.model(manifest.digest).is_whole


def test_a_list_with_two_sizes_of_one_file_is_refused():
    files = [ListedFile("model", f"{n}.safetensors", "ab" * 32, n) for n in (1, 2)]
    with pytest.raises(UserError, match="two sizes for one SHA-256"):
        StartManifest(tuple(files))


async def test_lists_of_files_do_not_fill_the_disk(device, job, model, pull):
    """Also of a model whose files are here: each name that is made up is another digest."""

    folder = device.tasks.parent / "models"
    folder.mkdir()
    files = []
    for number in (1, 2):
        path = folder / f"{number}.safetensors"
        save_file({f"w{number}": torch.ones(number)}, path)
        data = path.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        files.append(ListedFile("model", path.name, sha256, len(data)))
    big = ListedFile("model", "3.safetensors", "ab" * 32, 1 << 61)
    for listed in (StartManifest(tuple(files)), StartManifest((*files, big))):
        asked = with_changes(job, {"model.sha256": listed.digest})
        limits = f"[weights]\nfolders = ['{folder}']\n"
        if big in listed.files:
            with pytest.raises(AdmissionRefused, match="fetch no models"):
                await device.get(asked, limits, listed=listed, pull=pull)
        else:
            place = await device.get(asked, limits, listed=listed, pull=pull)
            assert json.loads((place.start / "model.safetensors.index.json").read_bytes())
        assert device.store.models() == []
        assert device.store.noted_bytes == 0


async def test_a_server_does_not_learn_whether_a_file_that_is_no_model_is_here(device, job):
    """From a digest one can find what is short, such as a password."""

    folder = device.tasks.parent / "models"
    folder.mkdir()
    secret = b"pin=4711"
    (device.tasks.parent / "secret").write_bytes(secret)
    (folder / "link").symlink_to(device.tasks.parent / "secret")
    guess = ListedFile("model", "x.safetensors", hashlib.sha256(secret).hexdigest(), len(secret))
    listed = StartManifest((guess,))
    asked = with_changes(job, {"model.sha256": listed.digest})
    with pytest.raises(AdmissionRefused, match="is not here"):
        await device.get(asked, f"[weights]\nfolders = ['{folder}']\n", listed=listed)
