"""The command ``isthmus prove``."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from isthmus.errors import UserError

if TYPE_CHECKING:
    from isthmus_server.runs.local.fork_server import ParticipantForkServer
    from isthmus_server.storage.store import Store

_AUTHORITY = "authority.pem"
"""File with the certificate of a fleet's authority, in the state directory of each participant."""


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of the transcript. Default: RUN.transcript.jsonl, next to RUN.",
)
@click.option(
    "--replay",
    is_flag=True,
    help="Then train RUN again on this machine, and compare the model of each round.",
)
def prove(run_dir: Path, output: Path | None, replay: bool) -> None:
    """Write the transcript of the run in the directory RUN, and print its head and its check.

    It has the plans, receipts, charges and model digests of the run, and what devices have signed,
    in one chain of hashes, of which the head is the last one. `isthmus-verify` checks it on another
    machine, without Isthmus. It names the participants. RUN is only read; if a signature in it is
    not valid, no transcript is written.

    --replay carries out the recorded plans of a run of `isthmus run` in a temporary directory. It
    takes about as long as the run has taken, and ends at the first model that is another one.
    """
    if replay:
        # Before this process opens files or starts threads.
        with _forked() as fork_server:
            _write(run_dir, output)
            _replay(run_dir, fork_server)
    else:
        _write(run_dir, output)


def _write(run_dir: Path, output: Path | None) -> None:
    from isthmus_server.read.transcript import Transcript
    from isthmus_server.storage import signed_sums
    from isthmus_server.storage.checkpoints import replacing
    from isthmus_server.storage.store import Store

    with contextlib.closing(Store.open(run_dir, check=True)) as store:
        if (store.directory / signed_sums.FILE).exists():
            _check_signatures(store)
        path = _next_to(store.directory)
        if output is not None:
            _check_output(output, store.directory)
            path = output
        transcript = Transcript(store)
        try:
            # As a whole or not at all: half of one would look like a run that was cut short.
            with replacing(path) as file:
                for line in transcript.lines():
                    file.write(line)
        except OSError as error:
            path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
        check = _check_command(store, path, transcript.head)
    click.echo(f"transcript  {path}  ({transcript.entries} entries)\nhead        {transcript.head}")
    click.echo(f"check       {check}")
    if check.endswith(f"--authority {_AUTHORITY}"):
        click.echo(
            f"            {_AUTHORITY} is the certificate of the fleet's authority, which each "
            "participant has in its --state directory"
        )


def _check_command(store: Store, path: Path, head: str) -> str:
    """The call of `isthmus-verify` with all that is known of the run, for a shell."""
    from isthmus_server.storage.damage_checks import FINAL_MODEL

    words = ["isthmus-verify", str(path), "--head", head]
    model = store.directory / FINAL_MODEL
    if store.status()[2] is not None and model.exists():
        words += ["--model", str(model)]
    # Processes of the server's own user have an authority that nobody else knows.
    if store.job.federated.secure_aggregation and _had_enrolled_devices(store):
        words += ["--authority", _AUTHORITY]
    return shlex.join(words)


def _had_enrolled_devices(store: Store) -> bool:
    """Whether an authority with a certificate of its own has enrolled the run's devices."""
    from isthmus_server.storage.events import RunServed

    served = [each.deployment for each in store.events() if isinstance(each, RunServed)]
    return bool(served) and "local" not in served


def _check_signatures(store: Store) -> None:
    """Check what devices have signed: who gets the transcript can only refuse it.

    Raises:
        DamagedError, UserError: a signature does not hold, or the file cannot be read.
    """
    from isthmus_server.storage.signed_sums_check import check_signed_sums  # loads PyTorch

    try:
        check_signed_sums(store)
    except OSError as error:
        raise store.unusable(error) from error


def _forked() -> contextlib.AbstractContextManager[ParticipantForkServer]:
    from isthmus_server.runs.local.fork_server import ParticipantForkServer

    return ParticipantForkServer.fork(ranks=True)


def _replay(run_dir: Path, fork_server: ParticipantForkServer) -> None:
    from rich.console import Console

    from isthmus_server.cli.run import prepare, run_until_stopped
    from isthmus_server.runs.local.replay import Replay
    from isthmus_server.storage.store import Store

    prepare()
    with contextlib.ExitStack() as stack:
        recorded = stack.enter_context(contextlib.closing(Store.open(run_dir)))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-replay-"))
        replay = Replay.begin(recorded, Path(folder) / "run")
        work = replay.run(None, Console(stderr=True), fork_server)
        final = run_until_stopped(work, replay.leave)
    click.echo(
        f"replay      {len(replay.recording.rounds)} rounds, trained again, gave the same models; "
        f"the last is {final.model_sha256}"
    )


def _check_output(output: Path, run_dir: Path) -> None:
    """Refuse a place at which the transcript would take that of something else.

    A file that is there is replaced as a whole, and so a device such as /dev/stdout would be.

    Raises:
        UserError: it is no file, or within the run, which is only read.
    """
    if not output.name or (output.exists() and not output.is_file()):
        raise UserError(
            f"--output {str(output)!r} is not a file; a transcript replaces a file as a whole, so "
            "name a file or a new one"
        )
    if output.resolve().is_relative_to(run_dir.resolve()):
        raise UserError(
            f"{output} is in the directory of the run, which is only read; choose another --output"
        )
    if output.is_symlink():  # also /dev/stdout, where that leads to a file
        raise UserError(
            f"--output {output} is a link, which a transcript would replace; name the file itself"
        )


def _next_to(run_dir: Path) -> Path:
    """Where a transcript is written by default: the directory of a run has only what is its own."""
    resolved = run_dir.resolve()
    return resolved.with_name(f"{resolved.name}.transcript.jsonl")
