"""The command ``isthmus export``."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from isthmus.errors import UserError

if TYPE_CHECKING:
    from isthmus_server.storage.store import Store


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["safetensors", "torch-export", "executorch"]),
    default="safetensors",
    show_default=True,
    help="Tensors by name, or a program that runs without the task's code.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the files. Default: RUN/export.",
)
def export(run_dir: Path, format_: str, output: Path | None) -> None:
    """Write the final model of the run in the directory RUN, with a model card.

    A program is compared with the model before the command ends. One of torch.export loads with
    torch.export.load; one of ExecuTorch is for apps on small devices, one example at a time.
    """
    from isthmus_server.read.export.model_card import FILE, model_card
    from isthmus_server.read.report.report import read_report
    from isthmus_server.storage.damage_checks import FINAL_MODEL
    from isthmus_server.storage.run_description import resume_command
    from isthmus_server.storage.run_place import original_in_words, original_of
    from isthmus_server.storage.store import Store

    with contextlib.closing(Store.open(run_dir, check=True)) as store:
        report = read_report(store)
        if report.final is None and report.status == "finished":
            raise UserError(
                f"the run in {run_dir} was directed by a ServerApp, which keeps its own model"
            )
        if report.final is None:
            original = None
            with contextlib.suppress(FileNotFoundError):  # of a run that was never continued
                original = original_of(run_dir)
            where = f"`{resume_command(run_dir)}` continues it"
            if original is not None:
                where = f"it is a copy of {original_in_words(run_dir, original)}: only that goes on"
            raise UserError(
                f"the run in {run_dir} has no final model yet, it is {report.status}; {where}"
            )
        folder = output or run_dir / "export"
        folder.mkdir(parents=True, exist_ok=True)
        if format_ == "safetensors":
            path = folder / FINAL_MODEL
            note = ""
            shutil.copyfile(store.directory / FINAL_MODEL, path)
        elif format_ == "torch-export":
            path = folder / "model.pt2"
            note = _write_program(store, path)
        else:
            path = folder / "model.pte"
            note = "  (for one example at a time)"
            _write_executorch_program(store, path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        card = model_card(report, store.job, report.final, path.name, digest)
        (folder / FILE).write_text(card, encoding="utf-8")
    click.echo(f"model   {path}{note}\nsha256  {digest}\ncard    {folder / FILE}")


def _write_program(store: Store, path: Path) -> str:
    """Write the program of `torch.export`; returns what is to be said about it."""
    from isthmus_server.python.saved_model import load_model, task_of
    from isthmus_server.read.export.program import export_program

    any_size = export_program(task_of(store), load_model(store.directory), path)
    return "" if any_size else "  (for batches of 3 examples, as the model's code requires)"


def _write_executorch_program(store: Store, path: Path) -> None:
    from isthmus_server.python.saved_model import load_model, task_of
    from isthmus_server.read.export.executorch_program import export_executorch

    export_executorch(task_of(store), load_model(store.directory), path)
