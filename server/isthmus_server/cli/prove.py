"""The command ``isthmus prove``."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from isthmus.errors import UserError


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of the transcript. Default: RUN.transcript.jsonl, next to RUN.",
)
def prove(run_dir: Path, output: Path | None) -> None:
    """Write the transcript of the run in the directory RUN, and print its head.

    It has the plans, receipts, charges and model digests of the run, and what devices have signed,
    in one chain of hashes, of which the head is the last one. `isthmus-verify` checks it on another
    machine, without Isthmus. It names the participants. RUN is only read.
    """
    from isthmus_server.read.transcript import Transcript
    from isthmus_server.storage.checkpoints import replacing
    from isthmus_server.storage.store import Store

    with contextlib.closing(Store.open(run_dir, check=True)) as store:
        path = output or _next_to(store.directory)
        transcript = Transcript(store)
        try:
            # As a whole or not at all: half of one would look like a run that was cut short.
            with replacing(path) as file:
                for line in transcript.lines():
                    file.write(line)
        except OSError as error:
            path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    click.echo(f"transcript  {path}  ({transcript.entries} entries)\nhead        {transcript.head}")


def _next_to(run_dir: Path) -> Path:
    """Where a transcript is written by default: the directory of a run has only what is its own."""
    resolved = run_dir.resolve()
    return resolved.with_name(f"{resolved.name}.transcript.jsonl")
