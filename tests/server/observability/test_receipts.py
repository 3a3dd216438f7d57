"""A round with a rejected, a dropped and a late device is told alike wherever it is shown."""

import asyncio
import io
import json
import re
from html import unescape

from rich.console import Console
from tests.server.read.console.serving import ask, served
from tests.server.waiting import wait_until

from isthmus_server.observability.json_lines import JsonLines
from isthmus_server.observability.listener import MetricsListener
from isthmus_server.observability.metrics import RunMetrics
from isthmus_server.observability.observers import Observers
from isthmus_server.read.report.explain import explain
from isthmus_server.read.report.explanation_page import show
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import EventStream

GONE = "an operator has removed it"
LATE = "the round's 77 s were over"
RECEIPTS = {
    "a": ("accepted", False, ""),
    "b": ("rejected", False, "no power"),
    "c": ("dropped", False, GONE),
    "d": ("dropped", True, LATE),
}


async def test_a_rejected_a_dropped_and_a_late_device_are_told_apart(deployment, network, timeouts):
    await deployment.start(names="b")
    deployment.faults["b"][1, 1] = "no power"
    at_work, acknowledged = [], asyncio.Event()

    async def never_done():
        at_work.append("device")
        await asyncio.Event().wait()

    def acknowledge(request, accepted, reason):
        if request.WhichOneof("work") == "train_local":
            acknowledged.set()

    for name in "acd":
        device = deployment.device(name)
        if name == "a":
            device.acknowledged = acknowledge
        else:
            device.before_training = never_done
        network.dial(device, name)
    await wait_until(lambda: len(deployment.link.peers) == 4)
    settings = ("federated.secure_aggregation=false", "federated.cohort=4", "federated.quorum=1")
    store = deployment.create_run("run", *settings, "rounds=1", "time.round_seconds=77")
    lines, metrics = io.StringIO(), RunMetrics()
    listener = MetricsListener("127.0.0.1", 0, metrics)
    observers = Observers(Console(), lines=JsonLines(lines), metrics=listener)
    events = EventStream()
    async with observers.watching(store, events, "job"):
        running = asyncio.create_task(
            Coordinator(RunParts.of(store, deployment.link, events)).run()
        )
        await wait_until(lambda: len(at_work) == 2)
        deployment.link.disconnect("c", GONE)
        await acknowledged.wait()
        await timeouts.expire(77)
        await running

    (record,) = json.loads(json.dumps(read_report(store).to_json()))["rounds"]
    shown = {
        receipt["participant"]: (receipt["status"], receipt["late"], receipt["reason"])
        for receipt in record["receipts"]
    }
    assert shown == RECEIPTS

    text = metrics.text().decode()
    for outcome in ("accepted", "rejected", "dropped", "late"):
        assert f'isthmus_receipts_total{{job="job",outcome="{outcome}"}} 1.0' in text

    page = io.StringIO()
    show(explain(store, 1), Console(file=page, width=200))
    assert "1 of 4 took part, 1 rejected, 1 dropped, 1 late" in page.getvalue()
    for line in ("b rejected: no power", f"c dropped: {GONE}", f"d late: {LATE}"):
        assert line in page.getvalue()

    with served(store.directory) as console:
        for path in ("/runs/run", "/runs/run/rounds/1"):
            _, _, html = ask(console, path)
            rows = re.findall(r"<tr>.*?</tr>", html.partition('id="receipts"')[2], re.DOTALL)[1:]
            told = {}
            for row in rows:
                name, outcome, reason = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)[-8:-5]
                told[name] = re.sub("<.*?>", "", outcome), unescape(reason)
            assert told == {
                name: ("late" if late else status, reason)
                for name, (status, late, reason) in RECEIPTS.items()
            }

    (committed,) = [
        line
        for line in map(json.loads, lines.getvalue().splitlines())
        if line["event"] == "committed"
    ]
    assert [receipt["participant"] for receipt in committed["record"]["receipts"]] == list("bcd")
