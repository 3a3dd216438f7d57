"""Options that name a mirror, and folders that are none of this server's."""

import errno
import io
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus_server.mirror.folder import MirrorFolder
from isthmus_server.mirror.options import place_named
from isthmus_server.mirror.place import MARKER

URL = "https://cdn.example.org/models"


@pytest.mark.parametrize(
    ("named", "url", "sentence"),
    [
        ("/srv/www", URL, "--mirror /srv/www does not name a place: write file:/FOLDER or s3:"),
        ("ftp:host", URL, "--mirror ftp:host does not name a place"),
        ("s3://models", URL, "--mirror s3://models does not name a place"),
        ("file:", URL, "--mirror file: does not name a place"),
        ("file:www", URL, "--mirror file:www has to name a folder from / on"),
        ("file:/srv/www", None, "needs the address at which a web server serves that folder"),
        (
            "file:/srv/www",
            "http://cdn.example.org/",
            "--mirror-url 'http://cdn.example.org/' is no",
        ),
        ("file:/srv/www", "https://", "--mirror-url 'https://' is no address of the form"),
        ("file:/srv/www", "https://a:b@cdn.example.org/", "is no address of the form"),
        ("file:/srv/www", "https://cdn.example.org/?key=1", "is no address of the form"),
        ("file:/srv/www", "https://cdn.example.org:port/", "is no address of the form"),
        ("file:/srv/www", "https://cdn.example.org/a b", "is no address of the form"),
    ],
)
def test_options_that_cannot_be_used_are_said(named, url, sentence):
    with pytest.raises(UserError) as raised:
        place_named(named, url)
    assert sentence in str(raised.value)


@pytest.mark.parametrize("url", [URL, f"{URL}/"])
def test_addresses_are_in_the_folder(url):
    assert place_named("file:/srv/www", url).address("ab") == f"{URL}/ab"


def test_a_folder_is_one_servers_and_has_nothing_else(tmp_path):
    mine = MirrorFolder(str(tmp_path / "www"), URL)
    for _ in range(2):
        mine.claim("me")
    with pytest.raises(UserError, match="is the mirror of another server; name another folder"):
        mine.claim("you")
    (tmp_path / "www" / MARKER).unlink()
    (tmp_path / "www" / "index.html").write_text("of a web site")
    with pytest.raises(UserError, match="has other files; name a folder that is empty"):
        mine.claim("me")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used: File exists"):
        MirrorFolder(str(tmp_path / "file"), URL).claim("me")


def test_of_two_servers_that_claim_a_folder_at_once_one_has_it(tmp_path, monkeypatch):
    mine, yours = (MirrorFolder(str(tmp_path / "www"), URL) for _ in range(2))
    files = Path.iterdir

    def files_before_the_other_claims(folder):
        found = list(files(folder))
        monkeypatch.setattr(Path, "iterdir", files)
        yours.claim("you")
        return found

    monkeypatch.setattr(Path, "iterdir", files_before_the_other_claims)
    with pytest.raises(UserError, match="is the mirror of another server; name another folder"):
        mine.claim("me")
    yours.claim("you")


def test_a_claim_that_a_crash_cut_short_is_named_as_one(tmp_path):
    (tmp_path / MARKER).touch()
    with pytest.raises(UserError, match=f"{MARKER} is empty, as after a crash; remove it if no"):
        MirrorFolder(str(tmp_path), URL).claim("me")


def test_a_claim_for_which_there_is_no_room_leaves_no_file(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda path, *how, **also: path.touch() or Full())
    with pytest.raises(UserError, match="cannot be used: No space left on device"):
        MirrorFolder(str(tmp_path), URL).claim("me")
    assert not list(tmp_path.iterdir())
