"""``isthmus model``: what files have that a model can start from, and what would be loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from isthmus.errors import JobError, UserError
from isthmus.job import load_job
from isthmus.printable import in_a_line
from isthmus.start.files import StartFiles, digest_of_all
from isthmus.task.loading import keep_process, load_task

if TYPE_CHECKING:
    from isthmus.start.loading import ComparedStart

_NAME_WIDTH = 60
"""Characters of the column of names; longer names move the rest of their line."""

_PATH = click.Path(path_type=Path)
_BASE = click.option(
    "--base", type=_PATH, help="If PATH is an adapter of PEFT: the model that it adapts."
)


@click.group()
def model() -> None:
    """Show what a model starts from."""


@model.command()
@click.argument("path", metavar="PATH", type=_PATH)
@_BASE
def inspect(path: Path, base: Path | None) -> None:
    """List the tensors in PATH, and print the digest of its files.

    PATH is a safetensors file, a folder of Hugging Face, of a run or of an export. The digest is
    what `model.sha256` of a job has to be.
    """
    # An adapter can be looked at without the model under it, whose digest is part of both's.
    found = [StartFiles.find(path)] if base is None else StartFiles.find_all(path, base)
    stored_in = [
        (stored, file.path.name)
        for files in found
        for file in files.files
        for stored in file.tensors.values()
    ]
    width = min(max((len(stored.name) for stored, _ in stored_in), default=0), _NAME_WIDTH)
    for stored, name in stored_in:
        row = f"{stored.dtype:8} {_shape(stored.shape):20} {name}"
        click.echo(f"{in_a_line(stored.name):{width}}  {row}")
    rows = [stored for files in found for _, stored in files.tensors.values()]
    elements = sum(math.prod(stored.shape) for stored in rows)
    count = sum(stored.end - stored.begin for stored in rows)
    kinds = Counter(stored.dtype for stored in rows)
    types = ", ".join(f"{number} in {dtype}" for dtype, number in sorted(kinds.items()))
    click.echo(f"path    {path}\ntensors {types}: {elements:,} elements, {count:,} bytes")
    if base is None and found[0].is_adapter:
        click.echo("sha256  is that of the adapter and the model under it; name that with --base")
    else:
        click.echo(f"sha256  {digest_of_all(found)}")


@model.command("import")
@click.argument("path", metavar="PATH", type=_PATH)
@click.argument("job", metavar="JOB", type=_PATH)
@_BASE
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key.")
def import_(path: Path, job: Path, base: Path | None, overrides: tuple[str, ...]) -> None:
    """Show by tensor what JOB would load with `model.start` = PATH, and nothing else.

    The model is built, and names, shapes and types are compared. The exit code is 1 if they do not
    fit.
    """
    from isthmus.task.scoring.building import (
        build_model,
        build_without_memory,
        compare_with_start,
    )

    changes = [f"model.start={_literal(path)}"]
    if base is not None:
        changes.append(f"model.base={_literal(base)}")
    loaded = load_job(job, [*overrides, *changes])
    folder = job.resolve().parent
    keep_process()
    data = loaded.task.data_in(folder)
    task = load_task(loaded.task.source, loaded.task.settings, base=folder, data=data)
    built = build_without_memory(task, loaded.seed)  # enough for names, shapes and types
    if built is None:
        built = build_model(task, loaded.seed)
    compared = compare_with_start(built, task, loaded, folder)
    for line in _lines(compared):
        click.echo(line)
    if reason := compared.plan.explain():
        raise JobError(f"model.start: {path}: {reason}")
    click.echo(f"path    {path}\nsha256  {loaded.model.sha256}")


@model.command()
@click.argument("folder", metavar="FOLDER", type=_PATH)
@click.argument("output", metavar="OUTPUT", type=_PATH)
def convert(folder: Path, output: Path) -> None:
    """Write a distributed checkpoint of PyTorch (DCP) as the safetensors file OUTPUT.

    FOLDER is one that torchtitan, or a program with FSDP, has written: it has a file .metadata.
    Names and types stay. The state of optimizers, schedules and data is left out. One tensor is in
    memory at a time, and no code of the checkpoint is executed.
    """
    from isthmus.start.distributed_checkpoint import DistributedCheckpoint

    if output.suffix != ".safetensors":
        raise UserError(f"{output} has to end with .safetensors, by which a start is recognised")
    checkpoint = DistributedCheckpoint.open(folder)
    checkpoint.write(output)
    count = len(checkpoint.left_out)
    firsts = ", ".join(in_a_line(name) for name in checkpoint.left_out[:3])
    if count:
        click.echo(f"left out: {count} values that are not the model's ({firsts}, ...)")
    click.echo(f"path    {output}\nsha256  {StartFiles.find(output).digest()}")


def _lines(compared: ComparedStart) -> Iterator[str]:
    """A line for each tensor of the model, and for each of the files that is not loaded."""
    if compared.converted is not None:
        yield "loaded by transformers, which has other names in memory than the files"
    rows = {name: row for files in compared.files for name, (_, row) in files.tensors.items()}
    added = {each.source for each in compared.merged}
    for target in compared.plan.targets:
        name = in_a_line(" = ".join(target.names))
        tensor = target.tensor
        kind = f"{str(tensor.dtype).removeprefix('torch.')} {_shape(tuple(tensor.shape))}"
        sources = []
        for source in target.sources:
            dtype = f" {rows[source].dtype}" if source in rows else ""
            more = " + adapter" if source in added else ""
            sources.append(f"{in_a_line(source)}{dtype}{more}")
        missing = target.name in compared.plan.missing
        none = "MISSING" if missing else "the seed"
        yield f"{name}  {kind}  <- {' = '.join(sources) or none}"
    for name in compared.plan.unexpected:
        yield f"UNEXPECTED  <- {in_a_line(name)}"


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def _literal(path: Path) -> str:
    """A path as a value of TOML, which does not depend on the folder of the job."""
    text = str(path.absolute()).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
