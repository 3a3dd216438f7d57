import doctest

import pytest
from harness import command_line

from isthmus.errors import UserError


def options(*arguments):
    return command_line.options("What it measures.", arguments, command_line.add_data)


def test_options():
    given = options("--quick", "--json", "out.json")
    assert given.quick
    assert given.json.name == "out.json"


@pytest.mark.parametrize(("arguments", "size"), [((), 3), (("--quick",), 2), (("--smoke",), 1)])
def test_the_size_is_that_of_the_command_line(arguments, size):
    assert command_line.of_size(options(*arguments), full=3, quick=2, smoke=1) == size


def test_two_sizes_are_refused(capsys):
    with pytest.raises(SystemExit):
        options("--quick", "--smoke")
    assert "not allowed with" in capsys.readouterr().err


def test_the_folder_of_the_data_is_that_of_the_option_or_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ISTHMUS_TEST_DATA", str(tmp_path))
    assert command_line.data_folder(options(), "file") == tmp_path
    with pytest.raises(UserError, match="there is no other in "):
        command_line.data_folder(options(), "other")
    monkeypatch.setenv("ISTHMUS_TEST_DATA", "")
    with pytest.raises(UserError, match="--data DIR or in ISTHMUS_TEST_DATA"):
        command_line.data_folder(options())
    assert command_line.data_folder(options("--data", str(tmp_path))) == tmp_path


def test_the_docstring_example():
    assert doctest.testmod(command_line).failed == 0
