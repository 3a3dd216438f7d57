"""The level of protection of a run, as its report and both of its pages say it."""

import html
import json
from io import StringIO

import pytest
from click.testing import CliRunner
from rich.console import Console
from tests.server.read.console.serving import ask, served

from isthmus.job.promises import CURIOUS, LYING, NOTHING, level_of
from isthmus_server.cli import run as commands
from isthmus_server.read.pages.report_page import html_page
from isthmus_server.read.report import report
from isthmus_server.read.report.report import level_of_run, read_report
from isthmus_server.storage.events import RunServed
from isthmus_server.storage.store import Store

DISTRIBUTED = (
    "federated.secure_aggregation=true",
    'privacy={mechanism="distributed", epsilon=8.0, delta=1e-5}',
)


@pytest.mark.parametrize(
    ("served_by", "name"),
    [(["separate"], LYING), (["separate", "one"], CURIOUS), (["local"], NOTHING), ([], LYING)],
)
def test_the_report_and_both_pages_say_the_same(make_job, tmp_path, served_by, name):
    job = make_job(*DISTRIBUTED)
    store = Store.create(tmp_path / "run", job, tmp_path)
    for deployment in served_by:
        store.log_event(RunServed(deployment=deployment))
    level = level_of_run(job, store.events())
    assert level.name == name
    assert (level == level_of(job)) == (not served_by)  # without: as `isthmus job check` says it
    output = StringIO()
    report.show(read_report(store), Console(file=output, width=4000))
    assert f"level: {level.sentence}" in output.getvalue()
    assert level.sentence in html.unescape(html_page(read_report(store)))
    store.close()
    printed = CliRunner().invoke(commands.report, [str(tmp_path / "run"), "--json"]).output
    assert json.loads(printed)["level"] == {"name": level.name, "claim": level.claim}
    with served(tmp_path / "run") as listener:
        page = html.unescape(ask(listener, "/runs/run")[2])
    assert f"Level: {level.name}" in page
    assert level.claim in page


def test_all_say_what_the_job_needs_of_owners(make_job, tmp_path):
    needs = 'weights = "exact"'
    secure = ("federated.secure_aggregation=true", "federated.cohort=15")
    job = make_job(*secure, 'federated.weights="exact"')
    store = Store.create(tmp_path / "run", job, tmp_path)
    assert list(read_report(store).owners_need) == [needs]
    output = StringIO()
    report.show(read_report(store), Console(file=output, width=4000))
    line = f"devices need in policy.toml: {needs}"
    assert line in output.getvalue()
    assert line in html.unescape(html_page(read_report(store)))
    store.close()
    with served(tmp_path / "run") as listener:
        assert needs in html.unescape(ask(listener, "/runs/run")[2])


async def test_a_run_on_this_machine_claims_nothing(deployment):
    await deployment.start()
    found, _ = await deployment.run("run", "rounds=1")
    assert [event["deployment"] for event in found["events"] if event["kind"] == "served"] == [
        "local"
    ]
    assert found["level"]["name"] == NOTHING
