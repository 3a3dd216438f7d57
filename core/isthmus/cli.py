"""The command ``isthmus``.

Subcommands are the entry points `isthmus.commands` of the installed packages. Each is imported only
when it is used, so that a device that runs ``isthmus client`` loads no server code.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import entry_points

import click

from isthmus import __version__
from isthmus.errors import IsthmusError
from isthmus.extras import install_line
from isthmus.printable import PrintableFormatter, in_lines
from isthmus.system.compiled_code import keep_compiled_code_private

log = logging.getLogger(__name__)

_EXTRAS = {"isthmus_clients": "client", "isthmus_datacenter": "datacenter"}
"""The extra that a package with commands needs, if it is not the server's."""


class _Commands(click.Group):
    """Finds a subcommand by name and imports only that one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(entry_points(group="isthmus.commands").names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for point in entry_points(group="isthmus.commands", name=cmd_name):
            try:
                command = point.load()
            except ModuleNotFoundError as error:
                extra = _EXTRAS.get(point.module.partition(".")[0], "server")
                raise click.ClickException(
                    f"`isthmus {cmd_name}` needs the package {error.name!r}, which is not "
                    f"installed; {install_line(extra)}"
                ) from error
            assert isinstance(command, click.Command)
            return command
        return None


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="isthmus")
def isthmus() -> None:
    """One model, trained by a datacenter and by a fleet of edge devices."""


def main() -> None:
    """Entry point of the console script: a user error prints one sentence; the exit code is 1.

    After a fault that may pass, such as a full disk, it is 75 (`EX_TEMPFAIL` of sysexits.h), so
    that a service manager starts a service again.
    """
    # gRPC logs every refused caller; Isthmus logs what matters in one sentence.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # PyTorch logs its caches if the process ends while PyTorch is being imported.
    logging.getLogger("torch").setLevel(logging.WARNING)
    try:
        keep_compiled_code_private()
        # Outside of standalone mode click returns the code of an `Exit` and does not raise it.
        if code := isthmus(standalone_mode=False):
            sys.exit(code)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except IsthmusError as error:
        sys.exit(show(error))
    except BrokenPipeError:  # the reader of the output closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except OSError as error:  # for example a full disk or an unreadable file
        log.debug("traceback", exc_info=True)
        where = f"{error.filename}: " if error.filename else ""
        message = error.strerror or str(error) or type(error).__name__
        click.echo(f"isthmus: {where}{message}", err=True)
        sys.exit(_exit_code(error))


def show(error: IsthmusError, then: str = "") -> int:
    """Print an error as one sentence, which ends with `then`; returns the exit code."""
    click.echo(f"isthmus: {in_lines(str(error) + then)}", err=True)
    return _exit_code(error)


def _exit_code(error: Exception) -> int:
    from isthmus.system.faults import is_transient  # rarely needed

    return os.EX_TEMPFAIL if is_transient(error) else 1


if __name__ == "__main__":
    main()
