"""``isthmus weights``: what device owners keep of the files that models start from."""

from __future__ import annotations

import json
from pathlib import Path

import click

from isthmus.identity.membership import default_state
from isthmus.printable import counted, in_a_line
from isthmus_clients.device.weights.store import DIRECTORY, KeptModel, WeightStore


@click.group()
def weights() -> None:
    """Keep the files that models start from on a device, by their digest."""


_STATE = click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    default=lambda: default_state("client"),
    show_default="~/.local/state/isthmus/client",
    help="Directory of the device's keys; the store is weights in it.",
)
_STORE = click.option(
    "--weights",
    "store",
    type=click.Path(file_okay=False, path_type=Path),
    help="The store, if it is not in --state.",
)


@weights.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--base",
    type=click.Path(exists=True, path_type=Path),
    help="If PATH is an adapter of PEFT: the file or folder of the model that it adapts.",
)
@_STATE
@_STORE
def add(path: Path, base: Path | None, state: Path, store: Path | None) -> None:
    """Copy the files of the model at PATH into the store; those that are there are not copied.

    PATH is a safetensors file, or a folder with such files. Jobs that start from a model with the
    digest that is printed find it there, under whatever path they know it.
    """
    added = WeightStore(store or state / DIRECTORY).add(path, base)
    click.echo(f"{added.manifest.digest}  {_size(added)}  {in_a_line(added.name)}")


@weights.command("list")
@_STATE
@_STORE
@click.option(
    "--check", is_flag=True, help="Read all files; the exit status is 1 if one is damaged."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_(state: Path, store: Path | None, *, check: bool, as_json: bool) -> None:
    """Print the models of the store, by digest.

    Files of another size than they should have are said to be damaged, and with --check those with
    other bytes, too. A device gets them again before it trains.
    """
    place = WeightStore(store or state / DIRECTORY)
    if check:
        for each in place.models():
            for file in each.manifest.files:
                place.damage(file.sha256)
    found = place.models()
    unknown = place.unknown()
    _print(place, found, unknown, as_json=as_json)
    if check and (unknown or any(each.damaged for each in found)):
        raise SystemExit(1)


def _print(
    place: WeightStore, found: list[KeptModel], unknown: list[str], *, as_json: bool
) -> None:
    if as_json:
        rows = [
            {
                "sha256": each.manifest.digest,
                "bytes": each.manifest.size,
                "name": each.name,
                "added": each.added,
                "whole": each.is_whole,
                "damaged": list(each.damaged),
                "files": [file.name for file in each.manifest.files],
            }
            for each in found
        ]
        table = {"models": rows, "unknown": unknown, "bytes": place.used_bytes}
        click.echo(json.dumps(table, indent=1))
        return
    for each in found:
        origin = "added" if each.added else "of a job"
        whole = "" if each.is_whole else ", not whole"
        if each.damaged:
            whole = f", damaged: {in_a_line(', '.join(each.damaged))}"
        name = in_a_line(each.name)
        click.echo(f"{each.manifest.digest}  {_size(each)}  {name} ({origin}{whole})")
    for digest in unknown:
        click.echo(f"{digest}  its list of files is damaged; add the model again, or remove it")
    click.echo(f"{counted(len(found), 'model')}; {place.used_bytes / 1e6:.1f} MB of files")


@weights.command()
@click.argument("digest")
@_STATE
@_STORE
def remove(digest: str, state: Path, store: Path | None) -> None:
    """Remove the model whose digest begins with DIGEST, and the files that no other one has."""
    freed = WeightStore(store or state / DIRECTORY).remove(digest)
    click.echo(f"removed; {freed / 1e6:.1f} MB are free now")


def _size(model: KeptModel) -> str:
    return f"{model.manifest.size / 1e6:.1f} MB"
