"""What of a notebook goes along to the processes of a run, and with which values."""

import contextlib

import pytest
import torch

from isthmus.errors import UserError
from isthmus_server.python.copied_code import copied_code


def executed(*cells):
    """The names after some cells, of which those that fail end at the error."""
    names = {}
    for cell in cells:
        with contextlib.suppress(Exception):
            exec(cell, names)
    return names


def copied(*cells, wanted="T", names=None):
    made = {}
    exec(copied_code(cells, names or executed(*cells), wanted, executed=False), made)
    return made


USES = "class T:\n    def get(self): return x"


@pytest.mark.parametrize(
    "make",
    [
        "import torch\nx = torch.device('cpu')",
        "from pathlib import Path\nbase = Path('a')\nx = base.joinpath('b')",
        "import functools\ndef of(n): return n\nx = functools.partial(of, 3).func",
        "x = 0\nfor step in range(5): x += step",
        "x = [n for n in range(4)]\nx.append(9)",
        "x = {'a': (1, 2.5, None), 'b': {True, b'c'}, 'd': float('inf'), 'e': ()}",
        "import torch\nx = torch.rand(3, 2)",
        "import torch\nx = torch.rand(2, 0).half()",
        "import numpy as np\nx = np.random.rand(3).astype('float32')",
        "y = 2\nx = y * 3\ny = 100",
        "if True:\n    x = 3",
        "from math import *\nx = pi",
        "x, (y, *z) = ['a', 'bcd']",
    ],
)
def test_a_name_has_the_value_that_it_has_in_the_notebook(make):
    names = executed(make, USES)
    expected = names["x"]
    found = copied(make, USES, names=names)["T"]().get()
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype
    elif type(expected).__module__ == "numpy":
        assert (found == expected).all()
        assert found.dtype == expected.dtype
    elif callable(expected):
        assert found(5) == expected(5)
    else:
        assert found == expected


def test_an_import_that_failed_is_left_out():
    made = copied("import no_such_module, sys", "import math, no_such_module", "import math", USES)
    assert "math" in made
    assert "T" in made


def test_a_definition_that_failed_is_left_out():
    made = copied("import no_such_module as nothing", "class Old(nothing.Base): ...", "x = 1", USES)
    assert "Old" not in made
    assert made["T"]().get() == 1


def test_what_was_forgotten_is_left_out():
    """As after %reset."""
    cells = ("def old(n=torch.zeros(1)): ...", "x = 1", USES)
    made = copied(*cells, names=executed(*cells[1:]))
    assert "old" not in made


def test_what_only_computes_is_left_out():
    made = copied("data = list(range(3))", "print(data)", "def other(): return data", "x=1", USES)
    assert "data" not in made
    assert callable(made["other"])


def test_a_local_name_is_not_that_of_the_notebook():
    made = copied(
        "model = object()", "class T:\n    def get(self):\n        model = 1\n        return model"
    )
    assert made["T"]().get() == 1
    assert "model" not in made


def test_a_function_is_the_one_defined_last():
    made = copied("def x(): return 1", USES, "def x(): return 2")
    assert made["T"]().get()() == 2


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        ("for x in [object()]: pass", "it is of the type object, and no single import, definition"),
        ("import torch\nx = torch.zeros(20_000)", r"an array of shape \(20000,\), and it has more"),
        (
            "import torch\nx = torch.zeros(2, requires_grad=True)",
            r"or needs a gradient; make it in",
        ),
        ("x = 'a' * 300_000", "whose 300002 characters cannot go along to the run's processes"),
        ("globals()['x'] = object()", "'T' refers to 'x', which cannot go along to the run's proc"),
    ],
)
def test_what_cannot_go_along_is_named(make, reason):
    with pytest.raises(UserError, match=reason):
        copied(make, USES)


def test_a_name_that_another_needs_is_named_with_its_user():
    cells = ("for y in [object()]: pass", "x = [y]", USES)
    with pytest.raises(UserError, match=r"^'x' refers to 'y', which cannot"):
        copied(*cells)
