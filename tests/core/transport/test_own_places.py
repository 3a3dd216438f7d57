"""What a server reads in place of a participant's directories."""

import pwd
from pathlib import Path

import pytest

from isthmus.transport.own_places import OwnPlaces


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "ann"))
    return OwnPlaces({"--tasks": tmp_path / "ann" / "my tasks", "--data": None, "--": Path("/")})


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("no file {ann}/my tasks/learn/task.py", "no file --tasks/learn/task.py"),
        ("put it into {ann}/my tasks.", "put it into --tasks."),
        ("{ann}/my tasks: {ann}/other is damaged", "--tasks: ~/other is damaged"),
        ("'{ann}' cannot be read", "'~' cannot be read"),
        ("https://example.org{ann}/my tasks", "https://example.org{ann}/my tasks"),
        ("{ann}a/tasks and /etc", "{ann}a/tasks and /etc"),
    ],
)
def test_directories_have_the_names_of_their_options(places, tmp_path, said, read):
    ann = tmp_path / "ann"
    assert places.hidden(said.format(ann=ann)) == read.format(ann=ann)


def test_a_directory_that_a_link_names_is_hidden_in_both_spellings(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    places = OwnPlaces({"--tasks": tmp_path / "link"})
    said = f"{tmp_path}/link/task.py is {tmp_path}/real/task.py"
    assert places.hidden(said) == "--tasks/task.py is --tasks/task.py"


@pytest.mark.parametrize("home", ["the root", "none"])
def test_a_user_without_a_home_hides_nothing(home, monkeypatch):
    """As that of a container: its failures are told as they are."""

    def unknown(user):
        raise KeyError(user)

    monkeypatch.setenv("HOME", "/")
    if home == "none":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert OwnPlaces({"--data": None}).hidden("no file /a/b") == "no file /a/b"
