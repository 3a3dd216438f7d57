"""``isthmus task``: commands for authors and users of task packages."""

from __future__ import annotations

from pathlib import Path

import click

from isthmus.errors import UserError
from isthmus.task import packages
from isthmus.task.manifest import MAX_VERSION

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group()
def task() -> None:
    """Pack tasks, and install those of authors you trust."""


@task.command()
@click.argument("file", type=_FILE)
def key(file: Path) -> None:
    """Make an author's signing key in FILE, and print the public key."""
    click.echo(packages.new_author(file).hex())


@task.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--key", "key_file", required=True, type=_FILE, help="The author's signing key.")
@click.option("--name", help="The folder it is installed as. Default: the folder's own name.")
@click.option("--output", type=_FILE, help="Default: NAME.task.")
@click.option(
    "--version",
    type=click.IntRange(min=1, max=MAX_VERSION),
    help="Must increase with every change. Default: one above that of the package in --output, or "
    "1 without one.",
)
def pack(
    folder: Path, key_file: Path, name: str | None, output: Path | None, version: int | None
) -> None:
    """Pack the files in FOLDER, signed, and print file, digest and version.

    Devices refuse a version below one that they have or had. Equal files keep their version.
    """
    if key_file.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{key_file} is secret and must not be in {folder}; move it")
    name = name or folder.resolve().name
    output = output or Path(f"{name}.task")
    author = packages.read_author(key_file)
    data = packages.pack(folder, name, author, version or 1)
    earlier = _read(output) if output.exists() else None
    if earlier is not None and (earlier.name, earlier.author) == (
        name,
        author.public_key().public_bytes_raw(),
    ):
        package = packages.read(data)
        if version is None:
            unchanged = earlier.files == package.files
            data = packages.pack(folder, name, author, earlier.version + (not unchanged))
        else:
            package.check_follows(earlier.version, earlier.digest)
    try:
        output.write_bytes(data)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from None
    package = packages.read(data)
    click.echo(f"{output} {package.digest.hex()} version {package.version}")
    if version is None and earlier is None:
        click.echo(
            f"{output} is new, so it has version 1; if {name!r} was packed with this key before, "
            "pack it again with a higher --version",
            err=True,
        )


@task.command()
@click.argument("package", type=_FILE)
def show(package: Path) -> None:
    """List the content of PACKAGE and its author, without executing anything."""
    content = _read(package)
    click.echo(f"{content.name} version {content.version}")
    click.echo(f"author {content.author.hex()}\ndigest {content.digest.hex()}")
    for path, data in content.files.items():
        click.echo(f"{len(data):>10} {path}")


@task.command()
@click.argument("package", type=_FILE)
@click.option(
    "--author",
    "authors",
    required=True,
    multiple=True,
    metavar="KEY",
    help="The public key of an author you trust; may be repeated.",
)
@click.option(
    "--tasks",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory that this machine loads tasks from.",
)
def install(package: Path, authors: tuple[str, ...], tasks: Path) -> None:
    """Unpack PACKAGE into a directory of tasks, if an author you trust signed it."""
    try:
        approved = [bytes.fromhex(author) for author in authors]
    except ValueError:
        raise UserError(
            "an --author is the 64 characters that `isthmus task key` printed"
        ) from None
    click.echo(packages.install(_read(package), tasks, approved))


def _read(path: Path) -> packages.Package:
    try:
        with path.open("rb") as file:
            return packages.read(file.read(packages.MAX_BYTES + 1))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
