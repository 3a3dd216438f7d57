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
    from isthmus_server.read.report.report import Report
    from isthmus_server.storage.store import Store


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["safetensors", "huggingface", "merged", "torch-export", "executorch"]),
    default="safetensors",
    show_default=True,
    help="Tensors by name, a folder for from_pretrained(), or a program that runs without the "
    "task's code.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the files. Default: RUN/export; RUN/huggingface or RUN/merged for these.",
)
def export(run_dir: Path, format_: str, output: Path | None) -> None:
    """Write the final model of the run in the directory RUN, with a model card.

    A folder or program is compared with the model before the command ends. Folders are of models of
    transformers: huggingface is the whole model, or the adapter of a model of PEFT, and merged is
    the model with its adapter merged into it. A program of torch.export loads with
    torch.export.load; one of ExecuTorch is for apps on small devices, one example at a time.
    """
    from isthmus_server.read.export.model_card import FILE, model_card
    from isthmus_server.read.report.report import read_report
    from isthmus_server.read.transcript import head_of
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
        if format_ in ("huggingface", "merged"):
            folder = output or run_dir / format_
            digest = _write_folder(store, report, folder, merged=format_ == "merged")
            click.echo(f"model   {folder}\nsha256  {digest}\ncard    {folder / FILE}")
            return
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
        card = model_card(report, store.job, report.final, path.name, digest, head_of(store))
        (folder / FILE).write_text(card, encoding="utf-8")
    click.echo(f"model   {path}{note}\nsha256  {digest}\ncard    {folder / FILE}")


def _write_folder(store: Store, report: Report, folder: Path, *, merged: bool) -> str:
    """Write a folder of Hugging Face, at once with all of its files; returns its digest."""
    from isthmus.start.files import StartFiles
    from isthmus_server.python.saved_model import load_model
    from isthmus_server.read.export.hugging_face import export_folder
    from isthmus_server.read.export.model_card import FILE, model_card
    from isthmus_server.read.transcript import head_of

    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} has files already; remove it, or name another with --output")
    target = folder.resolve()  # of a link to an empty folder, that folder
    if target == Path.cwd():
        raise UserError(
            f"{folder} is the directory where this command runs, and would be replaced; name a "
            "folder in it with --output"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # A folder of which a part is missing could be loaded as another model.
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        model = load_model(store.directory)
        export_folder(store.job, store.base, model, part, merged=merged)
        digest = StartFiles.find(part).digest()
        assert report.final is not None
        card = model_card(report, store.job, report.final, folder.name, digest, head_of(store))
        (part / FILE).write_text(card, encoding="utf-8")
        part.replace(target)  # an empty folder may be there
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return digest


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
