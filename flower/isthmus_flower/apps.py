"""Load the ClientApps and ServerApps that a job names, and say what they have functions for."""

from __future__ import annotations

from pathlib import Path

from isthmus.errors import TaskError
from isthmus.job import Job
from isthmus.job.flower import APP, SERVER_APP
from isthmus.task.loading import load_named
from isthmus_flower.messages import ClientApp, ServerApp


def project_root(source: str, base: Path, *, installed: bool) -> Path:
    """The directory that modules of an app's project are imported from.

    Args:
        source: the app as the job names it.
        base: directory of the job's relative paths.
        installed: whether `base` is a directory of installed tasks, each in a folder of its own;
            otherwise it is the job's own folder.

    >>> project_root("quickstart/app/client.py:app", Path("tasks"), installed=True)
    PosixPath('tasks/quickstart')
    """
    folder, separator, _ = source.rpartition(":")[0].partition("/")
    return base / folder if installed and separator else base


def load_app(source: str, *, base: Path, installed: bool = False) -> ClientApp:
    """Load the ClientApp that a job names; see `project_root` for the arguments.

    Raises:
        TaskError: it cannot be loaded, or is not a ClientApp.
    """
    root = project_root(source, base, installed=installed)
    app = load_named(source, APP, base=base, root=root)
    if not isinstance(app, ClientApp):
        kind = type(app).__name__
        raise TaskError(f"{APP}={source!r} is of type {kind}, not a flwr.clientapp.ClientApp")
    return app


def load_server_app(source: str, *, base: Path, installed: bool = False) -> ServerApp:
    """Load the ServerApp that a job names; see `project_root` for the arguments.

    Raises:
        TaskError: it cannot be loaded, is not a ServerApp, or has no function under `@app.main()`.
    """
    root = project_root(source, base, installed=installed)
    app = load_named(source, SERVER_APP, base=base, root=root)
    if not isinstance(app, ServerApp):
        kind = type(app).__name__
        raise TaskError(
            f"{SERVER_APP}={source!r} is of type {kind}, not a flwr.serverapp.ServerApp"
        )
    if app._main is None:
        raise TaskError(
            f"{SERVER_APP}={source!r} has no function under @app.main(): one made from a server_fn "
            "sends messages of Flower's older format, which are not supported"
        )
    return app


def check_apps(job: Job, base: Path) -> None:
    """Load the apps of a job, for `isthmus job check`.

    Raises:
        TaskError: one of them cannot be loaded, or is not usable.
    """
    assert job.federated.app is not None
    load_app(job.federated.app, base=base)
    if job.federated.server_app is not None:
        load_server_app(job.federated.server_app, base=base)


def has_client_fn(app: ClientApp) -> bool:
    """Whether an app is made from a `client_fn`, as with `NumPyClient`."""
    return app._call is not None


def handles(app: ClientApp, kind: str) -> bool:
    """Whether an app has a function for messages of a kind (`train`, `query.histogram`)."""
    if has_client_fn(app):
        return kind in ("train", "evaluate")
    category, _, action = kind.partition(".")
    return f"{category}.{action or 'default'}" in app._registered_funcs


def no_function(app: ClientApp, kind: str) -> str:
    """Says that an app has no function for messages of a kind, and which ones it has."""
    if has_client_fn(app):
        return f"the app is made from a client_fn, which has no function for {kind!r} messages"
    known = sorted(name.removesuffix(".default") for name in app._registered_funcs)
    category, _, action = kind.partition(".")
    wanted = f'@app.{category}("{action}")' if action else f"@app.{category}()"
    return (
        f"the app has no function under {wanted} for {kind!r} messages; it has functions for "
        f"{', '.join(known) or 'none'}"
    )
