"""``isthmus doctor aggregator``: check the machine and the directory of an aggregator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from isthmus.doctor import checks
from isthmus.doctor.checks import Diagnosis, diagnose
from isthmus.doctor.commands import tell
from isthmus.identity import tls
from isthmus.identity.proxies import ProxyChoice
from isthmus.identity.proxy_options import proxy_options


@click.command("aggregator")
@click.argument("state", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@proxy_options
def doctor_aggregator(state: Path, as_json: bool, proxy: ProxyChoice) -> None:
    """Check the aggregator whose keys are in the directory DIR."""
    tell(_results(state, proxy), as_json=as_json)


def _results(state: Path, proxy: ProxyChoice) -> Iterator[Diagnosis]:
    yield from diagnose("versions", checks.versions)
    yield checks.tls_version()
    yield from diagnose("membership", lambda: checks.membership(state, (tls.AGGREGATOR,), proxy))
    if state.is_dir():
        yield from diagnose("disk", lambda: checks.disk(state))
