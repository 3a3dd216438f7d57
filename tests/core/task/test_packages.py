import hashlib
import importlib.util
import io
import json
import os
import py_compile
import sys
import zipfile

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import AdmissionRefused, TaskError, UserError
from isthmus.task import check_installed, load_named
from isthmus.task.commands import task
from isthmus.task.packages import install, installed, new_author, pack, read, read_author

AUTHOR = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = AUTHOR.public_key().public_bytes_raw()
FILES = {"task.py": b"raise SystemExit('executed')\n", "data/words.txt": b"a\nb\n"}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "keyboard"
    for path, data in {**FILES, ".git/config": b"x", "__pycache__/task.pyc": b"y"}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


@pytest.fixture
def package(folder):
    return pack(folder, "keyboard", AUTHOR)


def rewritten(package, change):
    """The same package with other entries: (name, data, compression method)."""
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        entries = [(name, archive.read(name), zipfile.ZIP_STORED) for name in archive.namelist()]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data, how in change(entries):
            archive.writestr(zipfile.ZipInfo(name), data, how)
    return out.getvalue()


def test_a_package_is_installed_without_executing_it(package, tmp_path):
    found = read(package)
    assert (found.name, found.author, dict(found.files)) == ("keyboard", PUBLIC, FILES)
    target = install(found, tmp_path / "tasks", [PUBLIC])
    assert target == tmp_path / "tasks/keyboard"
    files = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    assert files == FILES.keys() | {".package"}
    assert [path.name for path in (tmp_path / "tasks").iterdir()] == ["keyboard"]


def test_a_changed_installed_folder_is_detected(package, tmp_path):
    tasks = tmp_path / "tasks"
    target = install(read(package), tasks, [PUBLIC])
    assert installed(tasks, "keyboard") == read(package)
    (target / "__pycache__").mkdir()
    (target / "__pycache__/task.cpython-311.pyc").write_bytes(b"compiled earlier")
    assert installed(tasks, "keyboard") == read(package)
    words = (target / "data/words.txt").read_bytes()
    for path, data in (
        ("data/words.txt", b"c\n"),
        ("task.py", None),
        ("torch.py", b"1"),
        ("data/notes.txt", b""),
        ("torch.so", b"2"),
    ):
        before = (target / path).read_bytes() if (target / path).exists() else None
        (target / path).unlink(missing_ok=True)
        if data is not None:
            (target / path).write_bytes(data)
        with pytest.raises(
            AdmissionRefused, match=rf"{path} is not what the author of 'keyboard' signed"
        ):
            installed(tasks, "keyboard")
        (target / path).unlink(missing_ok=True)
        if before is not None:
            (target / path).write_bytes(before)
    assert (target / "data/words.txt").read_bytes() == words
    (target / ".package").write_bytes(package[:-1])
    with pytest.raises(AdmissionRefused, match="this is not a task package"):
        installed(tasks, "keyboard")
    (target / ".package").unlink()
    for name in ("keyboard", "another", "..", ""):
        assert installed(tasks, name) is None


def test_equal_files_give_equal_packages(folder, package):
    assert pack(folder, "keyboard", AUTHOR) == package


def test_a_newer_package_replaces_an_older_one(folder, package, tmp_path):
    install(read(package), tmp_path / "tasks", [PUBLIC])
    (folder / "data/words.txt").unlink()
    (folder / "task.py").write_text("new")
    target = install(read(pack(folder, "keyboard", AUTHOR, 2)), tmp_path / "tasks", [PUBLIC])
    assert (target / "task.py").read_text() == "new"
    assert not (target / "data/words.txt").exists()


def test_an_older_package_or_a_variant_of_the_same_version_is_not_installed(folder, tmp_path):
    """An old package is signed as validly as a new one, including the errors in it."""
    tasks = tmp_path / "tasks"
    packed = {version: read(pack(folder, "keyboard", AUTHOR, version)) for version in (1, 2, 3)}
    for version in (2, 2, 3):
        install(packed[version], tasks, [PUBLIC])
    with pytest.raises(
        AdmissionRefused, match=r"^version 1 of 'keyboard' is older than version 3, which this"
    ):
        install(packed[1], tasks, [PUBLIC])
    (folder / "task.py").write_text("another")
    with pytest.raises(AdmissionRefused, match=r"^version 3 of 'keyboard' has other files than "):
        install(read(pack(folder, "keyboard", AUTHOR, 3)), tasks, [PUBLIC])
    assert installed(tasks, "keyboard") == packed[3]
    other = Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32)
    another = read(pack(folder, "keyboard", other, 1))
    install(another, tasks, [another.author])  # versions are those of an author


@pytest.mark.parametrize("elsewhere", [False, True], ids=["with the file", "PYTHONPYCACHEPREFIX"])
def test_a_planted_cache_is_not_executed(folder, tmp_path, monkeypatch, elsewhere):
    """Python would load a cache that claims the date and size of the signed file."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "caches") if elsewhere else None)
    (folder / "task.py").write_bytes(b"VALUE = 1\n")
    tasks = tmp_path / "tasks"
    target = install(read(pack(folder, "keyboard", AUTHOR)), tasks, [PUBLIC])
    signed = (target / "task.py").stat()
    evil = tmp_path / "task.py"
    evil.write_bytes(b"VALUE = 2\n")
    os.utime(evil, ns=(signed.st_atime_ns, signed.st_mtime_ns))
    cache = importlib.util.cache_from_source(str(target / "task.py"))
    py_compile.compile(str(evil), cfile=cache, dfile=str(target / "task.py"))
    assert load_named("keyboard/task.py:VALUE", "task.source", base=tasks) == 2  # it would be
    check_installed("keyboard/task.py:VALUE", tasks)
    assert load_named("keyboard/task.py:VALUE", "task.source", base=tasks) == 1


@pytest.mark.parametrize(
    "where", ["./other/task.py", "keyboard/../other/task.py", "other//task.py", "{}/other/task.py"]
)
def test_a_task_has_one_spelling(folder, tmp_path, where):
    """The folder that is checked would be `keyboard`, or none, and that which is loaded `other`."""
    tasks = tmp_path / "tasks"
    install(read(pack(folder, "keyboard", AUTHOR)), tasks, [PUBLIC])
    install(read(pack(folder, "other", AUTHOR)), tasks, [PUBLIC])
    (tasks / "other" / "extra.py").write_text("VALUE = 3\n")
    with pytest.raises(AdmissionRefused):
        check_installed("other/task.py:VALUE", tasks)
    with pytest.raises(TaskError, match="write the path as its files are named in"):
        check_installed(f"{where.format(tasks)}:VALUE", tasks)


def test_an_unapproved_author_is_refused(package, tmp_path):
    other = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    with pytest.raises(
        AdmissionRefused, match=r"is by the author [0-9a-f]{64}, who is not approved here"
    ):
        install(read(package), tmp_path / "tasks", [other])
    assert not (tmp_path / "tasks").exists()


def manifest_with(change):
    def changed(entries):
        for name, data, how in entries:
            if name == "manifest.json":
                table = json.loads(data)
                change(table)
                yield name, json.dumps(table), how
            else:
                yield name, data, how

    return changed


def other_author(table):
    table["author"] = Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (manifest_with(lambda table: table.update(name="camera")), "not signed by the author"),
        (manifest_with(other_author), "not signed by the author"),
        (
            lambda entries: [(n, d + b"#" if n == "task.py" else d, h) for n, d, h in entries],
            "'task.py' is not what its author signed",
        ),
        (lambda entries: [*entries, ("more.py", b"", 0)], "its files are not those of its manif"),
        (lambda entries: entries[:-1], "its files are not those of its manifest"),
        (lambda entries: [e for e in entries if e[0] != "signature"], "not a task package"),
        (lambda entries: [*entries, ("../task.py", b"", 0)], "is not a plain name"),
        (lambda entries: [*entries, ("/etc/passwd", b"", 0)], "is not a plain name"),
        (lambda entries: [*entries, ("bomb", bytes(1 << 24), 8)], "'bomb' is compressed"),
    ],
)
def test_a_package_that_was_changed_is_refused(package, change, sentence):
    with pytest.raises(AdmissionRefused, match=sentence):
        read(rewritten(package, change))


def with_manifest(package, manifest):
    """The package with another manifest, signed by the author: nothing else protects the reader."""
    signature = AUTHOR.sign(b"isthmus/task/2" + hashlib.sha256(manifest).digest())

    def changed(entries):
        for name, data, how in entries:
            yield name, {"manifest.json": manifest, "signature": signature}.get(name, data), how

    return rewritten(package, changed)


def manifest_of(package):
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        return archive.read("manifest.json")


MALFORMED = {
    "an array": b"[]",
    "a number": b"7",
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "nothing": b"",
    "deep nesting": b"[" * 100_000,
    "deep nesting in a table": b'{"files": ' * 50_000 + b"1" + b"}" * 50_000,
    "a huge number": b'{"version": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("manifest", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_manifest_is_one_sentence(package, manifest):
    with pytest.raises(AdmissionRefused, match=r"^this is not a task package: .+$") as caught:
        read(with_manifest(package, manifest))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["format", "version", "name", "author", "files"])
@pytest.mark.parametrize(
    "value", [None, True, 0, -1, 1.5, 2**60, "", "../x", [], {}, [["a"]], {"task.py": 1}]
)
def test_a_manifest_with_values_of_other_types_is_one_sentence(package, key, value):
    table = {**json.loads(manifest_of(package)), key: value}
    with pytest.raises(AdmissionRefused, match=r"^this is not a task package: .+$") as caught:
        read(with_manifest(package, json.dumps(table).encode()))
    assert "\n" not in str(caught.value)


def test_a_manifest_with_a_key_twice_is_refused(package):
    """Two readers could take different ones."""
    twice = manifest_of(package).replace(b'"name"', b'"version": 9,\n "name"')
    with pytest.raises(AdmissionRefused, match="its manifest has the key 'version' twice"):
        read(with_manifest(package, twice))
    unknown = manifest_of(package).replace(b'"name"', b'"noise": 9,\n "name"')
    with pytest.raises(AdmissionRefused, match=r"its manifest has an invalid noise$"):
        read(with_manifest(package, unknown))


@given(st.data())
def test_every_flip_of_a_signed_manifest_is_refused_or_changes_nothing_else(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "flipped"
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_bytes(FILES["task.py"])
    package = pack(folder, "keyboard", AUTHOR)
    manifest = bytearray(manifest_of(package))
    at = data.draw(st.integers(0, len(manifest) - 1))
    manifest[at] ^= data.draw(st.integers(1, 255))
    try:
        found = read(with_manifest(package, bytes(manifest)))
    except AdmissionRefused:
        return
    assert dict(found.files) == {"task.py": FILES["task.py"]}


@given(st.data())
def test_every_change_of_signed_bytes_is_detected(data):
    """Bytes of files, manifest and signature are covered; some bytes of the zip format are not."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w"):
        pass
    with pytest.raises(AdmissionRefused):
        read(data.draw(st.binary(max_size=300) | st.just(out.getvalue())))


@given(st.data())
def test_damage_is_refused_or_changes_nothing(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_bytes(FILES["task.py"])
    package = bytearray(pack(folder, "keyboard", AUTHOR))
    at = data.draw(st.integers(0, len(package) - 1))
    package[at] ^= data.draw(st.integers(1, 255))
    try:
        found = read(bytes(package))
    except AdmissionRefused:
        return
    assert (found.name, found.author) == ("keyboard", PUBLIC)
    assert dict(found.files) == {"task.py": FILES["task.py"]}


def test_a_directory_of_a_million_entries_is_not_read():
    directory = b"PK\x01\x02" + bytes(42)
    end = b"PK\x05\x06" + bytes(8) + (46 << 20).to_bytes(4, "little") + bytes(6)
    with pytest.raises(AdmissionRefused, match=f"its directory of {46 << 20} bytes is too large"):
        read(directory * (1 << 20) + end)
    hidden = end[:16] + end[:4] + bytes(2)  # its last field looks like the end of another
    with pytest.raises(AdmissionRefused, match=f"its directory of {46 << 20} bytes is too large"):
        read(directory * (1 << 20) + hidden)


def test_a_folder_with_links_or_without_files_is_not_packed(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no files to pack"):
        pack(tmp_path / "empty", "keyboard", AUTHOR)
    for target in ("/etc/passwd", "/etc"):
        (folder / "link").symlink_to(target)
        with pytest.raises(UserError, match="is not a plain file"):
            pack(folder, "keyboard", AUTHOR)
        (folder / "link").unlink()


def test_a_folder_that_is_too_large_is_not_read(folder):
    with (folder / "data.bin").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="has more than 1000 files or 32 MB"):
        pack(folder, "keyboard", AUTHOR)


def test_an_author_s_key_is_not_packed_with_the_task(folder):
    new_author(folder / "author.key")
    result = CliRunner().invoke(task, ["pack", str(folder), "--key", str(folder / "author.key")])
    assert "is secret and must not be in" in str(result.exception)


def test_an_author_s_key_is_made_once_and_is_private(tmp_path):
    public = new_author(tmp_path / "author.key")
    assert read_author(tmp_path / "author.key").public_key().public_bytes_raw() == public
    with pytest.raises(UserError, match="exists already; nothing was changed"):
        new_author(tmp_path / "author.key")
    (tmp_path / "author.key").chmod(0o644)
    with pytest.raises(UserError, match="can be read by others on this machine"):
        read_author(tmp_path / "author.key")


def test_a_public_key_is_refused_as_a_signing_key(tmp_path):
    """A public key is as long as a private one, so its length does not distinguish them."""
    public = tmp_path / "author.pub"
    public.write_text(new_author(tmp_path / "author.key").hex() + "\n")
    public.chmod(0o600)
    with pytest.raises(
        UserError, match=r"author.pub is not an author's signing key; .* public key"
    ):
        read_author(public)
    with pytest.raises(UserError, match="nowhere cannot be read: No such file"):
        read_author(tmp_path / "nowhere")


def test_the_commands_from_a_key_to_an_installed_task(folder, tmp_path):
    def type_(*words):
        result = CliRunner().invoke(task, [str(word) for word in words], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output.strip()

    public = type_("key", tmp_path / "author.key")
    packed, tasks = tmp_path / "keyboard.task", tmp_path / "tasks"
    said = type_("pack", folder, "--key", tmp_path / "author.key", "--output", packed)
    assert f"digest {said.split()[1]}" in type_("show", packed)
    assert type_("install", packed, "--author", public, "--tasks", tasks) == f"{tasks}/keyboard"
    assert (tasks / "keyboard/task.py").exists()


def test_packing_again_increases_the_version_if_a_file_has_changed(folder, tmp_path):
    key, packed = tmp_path / "author.key", tmp_path / "keyboard.task"
    new_author(key)

    def pack_again(*more):
        words = ["pack", str(folder), "--key", str(key), "--output", str(packed), *more]
        return CliRunner().invoke(task, words)

    first = pack_again()
    assert first.stdout.endswith(" version 1\n")
    assert "is new, so it has version 1; if 'keyboard' was packed with this key" in first.stderr
    same = pack_again()
    assert same.output.endswith(" version 1\n")
    (folder / "task.py").write_text("changed")
    assert pack_again().output.endswith(" version 2\n")
    assert pack_again("--version", "7").output.endswith(" version 7\n")
    before = packed.read_bytes()
    (folder / "task.py").write_text("changed again")
    for version, sentence in (("6", "is older than version 7"), ("7", "has other files than")):
        result = pack_again("--version", version)
        assert isinstance(result.exception, AdmissionRefused)
        assert sentence in str(result.exception)
    assert packed.read_bytes() == before
