"""The store of models on a device: what is in it is whole, and stays what it is."""

import dataclasses
import json
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from isthmus.errors import UserError
from isthmus.start.files import StartFiles
from isthmus.start.manifest import StartManifest
from isthmus_clients.device.weights.store import WeightStore
from isthmus_clients.weight_commands import weights


@pytest.fixture
def store(tmp_path):
    return WeightStore(tmp_path / "weights")


def adapter(folder, name="w"):
    folder.mkdir()
    tensors = {f"base_model.model.{name}.lora_A.weight": torch.ones(2, 3)}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 2}')
    return folder


def test_a_model_is_kept_once_under_its_digest_for_its_owner_only(store, model, manifest, tmp_path):
    added = store.add(model)
    assert added.manifest.digest == manifest.digest == StartFiles.find(model).digest()
    assert store.add(model / "model.safetensors").manifest == added.manifest
    assert store.used_bytes == manifest.size
    path = store.path(manifest.files[0].sha256)
    assert path.read_bytes() == (model / "model.safetensors").read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    for folder in (store.directory, store.files, store.partial):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (model / "model.safetensors").write_bytes(b"something else")
    assert store.model(manifest.digest).is_whole


def test_files_of_several_models_are_kept_until_none_has_them(store, model, tmp_path):
    both = adapter(tmp_path / "adapter")
    base = store.add(model).manifest
    adapted = store.add(both, model).manifest
    assert adapted.size == base.size + sum(path.stat().st_size for path in both.iterdir())
    assert store.used_bytes == adapted.size
    assert store.remove(base.digest[:8]) == 0
    assert store.model(adapted.digest).is_whole
    assert store.remove(adapted.digest) == adapted.size
    assert store.models() == []
    assert store.used_bytes == 0
    with pytest.raises(UserError, match=r"no model in .* begin with 'ab'"):
        store.remove("ab")


def test_a_task_sees_files_and_configuration_as_in_a_folder(store, model, tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    for number in (1, 2):
        save_file(
            {f"w{number}": torch.ones(number)}, folder / f"model-0000{number}-of-2.safetensors"
        )
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w1": "model-00001-of-2.safetensors", '
        '"w2": "model-00002-of-2.safetensors"}}'
    )
    manifest = store.add(folder).manifest
    places = {file.sha256: store.path(file.sha256) for file in manifest.files}
    place = store.view(manifest, places, {"model_type": "table"})
    found = StartFiles.find(place.start)
    assert (found.digest(), sorted(found.tensors)) == (manifest.digest, ["w1", "w2"])
    assert found.config() == {"model_type": "table"}
    assert place.mapped
    assert set(places.values()) < set(place.readable)


def test_a_store_may_be_named_from_the_working_directory(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = WeightStore(Path("here"))
    manifest = store.add(model).manifest
    places = {file.sha256: store.path(file.sha256) for file in manifest.files}
    assert store.view(manifest, places, None).start.is_relative_to(tmp_path)


def test_a_damaged_entry_is_as_if_it_were_not_there(store, model):
    digest = store.add(model).manifest.digest
    (store.directory / "models" / digest).write_text("{")
    assert store.models() == []
    assert store.unknown() == [digest]
    store.add(model)
    assert store.model(digest).is_whole


def test_files_stay_of_which_a_damaged_list_may_be(store, model, tmp_path):
    adapted = [store.add(adapter(tmp_path / name, name), model).manifest for name in "ab"]
    lists = store.directory / "models"
    (lists / adapted[0].digest).write_text("{")
    of_store = ["--weights", str(store.directory)]
    listed = CliRunner().invoke(weights, ["list", "--check", *of_store])
    assert listed.exit_code == 1
    said = f"{adapted[0].digest}  its list of files is damaged; add the model again, or remove it"
    assert said in listed.output.splitlines()
    table = json.loads(CliRunner().invoke(weights, ["list", "--json", *of_store]).output)
    assert table["unknown"] == [adapted[0].digest]
    with pytest.raises(UserError, match=f"the list of the files of {adapted[0].digest[:16]} in "):
        store.remove(adapted[1].digest)
    assert store.used_bytes == sum(path.stat().st_size for path in store.files.iterdir())
    # The damaged one can be removed: what no list has goes with it.
    common = {file.sha256 for file in adapted[0].files} & {file.sha256 for file in adapted[1].files}
    assert store.remove(adapted[0].digest) > 0
    assert common
    assert store.model(adapted[1].digest).is_whole
    assert store.unknown() == []
    assert store.remove(adapted[1].digest) > 0
    assert store.used_bytes == 0


@pytest.mark.parametrize("place", ["", "models", "files"])
@pytest.mark.parametrize("command", [["list"], ["list", "--check"], ["remove", "ab"]])
def test_a_store_that_cannot_be_read_is_a_sentence(tmp_path, place, command):
    folder = tmp_path / "state" / "weights"
    (folder / place).parent.mkdir(parents=True)
    (folder / place).write_text("no folder")
    found = CliRunner().invoke(weights, [*command, "--state", str(tmp_path / "state")])
    assert isinstance(found.exception, UserError)
    said = f"{folder} cannot be used: Not a directory"
    if place == "files" and command[0] == "remove":
        said = f"no model in {folder} begin with 'ab'"
    assert str(found.exception) == said


COPY = """
import os, sys
from pathlib import Path
from isthmus_clients.device.weights import store
write = store.PartialFile.write
def half(self, data):
    write(self, data[: len(data) // 2])
    os.kill(os.getpid(), 9)
store.PartialFile.write = half
store.WeightStore(Path(sys.argv[1])).add(Path(sys.argv[2]))
"""


def test_a_killed_process_leaves_nothing_that_counts(store, model, manifest):
    command = [sys.executable, "-c", COPY, str(store.directory), str(model)]
    assert subprocess.run(command, check=False).returncode == -9
    [left] = store.models()  # so that its owner can remove what was copied
    assert not left.is_whole
    [file] = manifest.files
    assert not store.has(file)
    assert store.begun(file) == file.size // 2
    assert store.add(model).is_whole
    assert list(store.partial.iterdir()) == []


SYNCED = """
import os, sys
from pathlib import Path
from isthmus.start.manifest import ListedFile, StartManifest
from isthmus_clients.device.weights import store
if os.geteuid() == 0:  # to whom all files are open
    os.setgid(65534)
    os.setuid(65534)
data = bytes(1000)
file = ListedFile("model", "model.safetensors", store.hashlib.sha256(data).hexdigest(), len(data))
def killed(_):
    os.kill(os.getpid(), 9)
kept = store.WeightStore(Path(sys.argv[1]))
manifest = StartManifest((file,))
if sys.argv[2] == "killed":
    kept.keep(manifest, "a model")
    store.os.fsync = killed
if sys.argv[2] == "removes":
    assert kept.remove(manifest.digest) == 1000
    sys.exit()
with kept.filling(file) as partial:
    partial.write(data[partial.offset :])
    assert partial.finish()
"""


@pytest.mark.parametrize("then", ["finishes", "removes"])
def test_a_process_that_is_killed_while_it_syncs_a_file_leaves_one_of_use(then):
    """It is finished, or removed."""
    # Other users cannot get into the folders of pytest.
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o777)
        command = [sys.executable, "-c", SYNCED, f"{place}/weights"]
        assert subprocess.run([*command, "killed"], check=False).returncode == -9
        command = [*command, then]
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        assert again.stderr == ""
        store = WeightStore(Path(place, "weights"))
        assert list(store.partial.iterdir()) == []
        if then == "removes":
            assert store.models() == []
            return
        [whole] = store.files.iterdir()
        assert store.damage(whole.name) == ""


@pytest.mark.parametrize("after", range(4))
def test_what_an_interrupted_removal_leaves_is_removed_by_the_next(
    store, model, tmp_path, monkeypatch, after
):
    """Three files and their list."""
    kept = store.add(adapter(tmp_path / "adapter"), model)
    names = []
    real = Path.unlink

    def unlink(path, **more):
        if len(names) == after and path.is_relative_to(store.directory):
            raise KeyboardInterrupt
        names.append(path)
        real(path, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            store.remove(kept.manifest.digest)
    assert [each.manifest.digest for each in store.models()] == [kept.manifest.digest]
    store.remove(kept.manifest.digest)
    assert store.models() == []
    assert store.used_bytes == 0


def test_no_digits_remove_nothing(store, model):
    """Even if there is only one model."""
    store.add(model)
    with pytest.raises(UserError, match="name a model by the first digits"):
        store.remove("")
    assert len(store.models()) == 1


def test_one_process_at_a_time_fills_a_file(store, manifest):
    [file] = manifest.files
    with store.filling(file) as first, store.filling(file) as second:
        assert first is not None
        assert second is None


FULL = """
import sys
from pathlib import Path
from isthmus.errors import UserError
from isthmus_clients.device.weights.store import WeightStore
try:
    WeightStore(Path("/mnt/weights")).add(Path(sys.argv[1]))
except UserError as error:
    print(error)
"""


def test_a_full_disk_is_a_sentence(model):
    inside = f"mount -t tmpfs -o size=300k tmpfs /mnt && {sys.executable} -c '{FULL}' {model}"
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-Urm", "true"], check=False).returncode:
        pytest.skip("no user namespaces here")
    command = [unshare, "-Urm", "sh", "-c", inside]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == (
        "the disk of /mnt/weights is full; free some space, or remove a model with `isthmus "
        "weights remove`\n"
    )


def test_the_commands_add_list_and_remove(tmp_path, model, manifest):
    def isthmus(*arguments):
        result = CliRunner().invoke(weights, [*arguments, "--state", str(tmp_path)])
        assert result.exit_code == 0, result.output
        return result.output

    assert isthmus("add", str(model)) == f"{manifest.digest}  0.8 MB  {model}\n"
    assert isthmus("list").splitlines() == [
        f"{manifest.digest}  0.8 MB  {model} (added)",
        "1 model; 0.8 MB of files",
    ]
    assert manifest.digest in isthmus("list", "--json")
    assert isthmus("remove", manifest.digest[:12]) == "removed; 0.8 MB are free now\n"
    assert isthmus("list") == "0 models; 0.0 MB of files\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "../model.safetensors"}, "which is no file of a model"),
        ({"name": "model.bin"}, "which is no file of a model"),
        ({"sha256": "zz"}, "which is no file of a model"),
        ({"size": 1 << 62}, "which is no file of a model"),
        ({"part": "adapter"}, r"in the parts \('adapter',\) is no model's"),
    ],
)
def test_a_list_of_files_is_checked_before_it_is_used(manifest, change, said):
    file = dataclasses.replace(manifest.files[0], **change)
    with pytest.raises(UserError, match=said):
        StartManifest((file,))
