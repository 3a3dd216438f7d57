"""The command line that all benchmarks share: their sizes, their data, and what they need.

A benchmark has three sizes. `--quick` measures a small part; `--smoke` takes the smallest sizes, to
see that the script works, and its figures mean nothing. What a benchmark cannot do without, a data
set or a package, is named in one sentence when it is missing:

>>> needs("no_such_module", "no-such-package")
Traceback (most recent call last):
    ...
isthmus.errors.UserError: no-such-package is not installed; run `pip install no-such-package`
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from isthmus.errors import UserError

Value = TypeVar("Value")
DATA_VARIABLE = "ISTHMUS_TEST_DATA"


def options(
    description: str,
    argv: Sequence[str] | None = None,
    more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> argparse.Namespace:
    """Parse the command line of a benchmark: `quick`, `smoke` (bool) and `json` (Path or None).

    `more` adds the options of one benchmark.
    """
    parser = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="measure a small part, under 100 s")
    size.add_argument(
        "--smoke",
        action="store_true",
        help="the smallest sizes, to see that the script works; its figures mean nothing",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    more(parser)
    return parser.parse_args(argv)


def of_size(given: argparse.Namespace, *, full: Value, quick: Value, smoke: Value) -> Value:
    """The value for the size that the command line asks for."""
    if given.smoke:
        return smoke
    return quick if given.quick else full


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the folder with the data sets."""
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help=f"folder with the data sets' files; default: ${DATA_VARIABLE}",
    )


def data_folder(given: argparse.Namespace, *files: str) -> Path:
    """The folder with the data sets, which has these files.

    Raises:
        UserError: no folder is given, or it does not exist or lacks a file.
    """
    variable = os.environ.get(DATA_VARIABLE)
    how = f"give the folder with the data sets as --data DIR or in {DATA_VARIABLE}"
    if given.data is None and not variable:
        raise UserError(f"this benchmark needs data sets, which are not part of the project; {how}")
    folder: Path = given.data or Path(str(variable))
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; {how}")
    for name in files:
        if not (folder / name).is_file():
            raise UserError(f"there is no {name} in {folder}; {how}")
    return folder


def needs(module: str, package: str) -> None:
    """Check that a module can be imported; `package` has it.

    Raises:
        UserError: it cannot.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{package} is not installed; run `pip install {package}`")


def script(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """A benchmark's function `main`; a `UserError` is its one sentence and gives exit status 1."""

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except UserError as error:
            print(f"{Path(main.__code__.co_filename).name}: {error}", file=sys.stderr)
            return 1

    return guarded
