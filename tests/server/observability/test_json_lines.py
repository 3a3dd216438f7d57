"""JSON lines: one object per event and per record of the log."""

import io
import json
import logging
import os
import subprocess
import sys

from rich.console import Console
from tests.server.storage.records import round_record

from isthmus_server.observability.json_lines import (
    CAPACITY,
    JsonConsoleFile,
    JsonEventSink,
    JsonLines,
    JsonLogHandler,
)
from isthmus_server.storage.events import ParticipantProgress, RoundCommitted, RunFailed
from isthmus_server.storage.records import Receipt


def written(file):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in file.getvalue().splitlines()]


def test_events_are_objects_with_their_job_and_explained_receipts():
    file = io.StringIO()
    sink = JsonEventSink(JsonLines(file), "digits-1")
    receipts = (
        Receipt(participant="a", regime="federated", status="accepted"),
        Receipt(participant="b", regime="federated", status="rejected", reason="no\x1b[2J power"),
    )
    sink(RoundCommitted(record=round_record(1, receipts), at=1.5))
    sink(ParticipantProgress(participant="a", loss=float("inf"), at=2.0))
    sink(RunFailed(reason="the disk is full", at=3.0))
    committed, progress, failed = written(file)
    assert committed["time"] == "1970-01-01T00:00:01.500Z"
    assert (committed["level"], committed["job"]) == ("info", "digits-1")
    assert committed["event"] == "committed"
    assert [receipt["participant"] for receipt in committed["record"]["receipts"]] == ["b"]
    assert committed["record"]["participants"]["accepted"] == 1
    assert progress["loss"] == "inf"
    assert (failed["level"], failed["reason"]) == ("error", "the disk is full")
    assert "\x1b" not in file.getvalue()


def test_records_of_the_log_and_printed_lines_are_objects_too():
    file = io.StringIO()
    lines = JsonLines(file)
    logger = logging.Logger("isthmus_server.test")
    logger.addHandler(JsonLogHandler(lines))
    try:
        raise OSError("no space")
    except OSError:
        logger.exception("round %d", 3)
    console = Console(file=JsonConsoleFile(lines), width=10_000)
    console.print("digits-1 is [bold]paused[/bold]\nuntil noon", highlight=False)
    lines.drain(30.0)
    record, first, second = written(file)
    assert (record["level"], record["message"]) == ("error", "round 3")
    assert record["logger"] == "isthmus_server.test"
    assert record["traceback"].endswith("OSError: no space")
    assert [first["message"], second["message"]] == ["digits-1 is paused", "until noon"]


def test_a_reader_that_stops_holds_nobody_up_and_learns_what_it_missed():
    reads, writes = os.pipe()
    lines = JsonLines(os.fdopen(writes, "w"))
    for number in range(CAPACITY + 2000):  # more than the pipe and the queue take
        lines.post(0.0, "info", {"message": str(number)})
    missed = 0
    with os.fdopen(reads) as reader:
        for read, line in enumerate(reader):
            message = json.loads(line)["message"]
            if message.endswith("were dropped: standard output was not read in time"):
                missed = int(message.split()[0])
                break
            assert message == str(read) or read > CAPACITY
    assert 0 < missed <= 2000


BLOCKED = """
import logging
from isthmus_server.observability import json_lines
json_lines.DRAIN_SECONDS = 0.1
lines = json_lines.JsonLines(json_lines.standard_output())
logging.getLogger().addHandler(json_lines.JsonLogHandler(lines))
for number in range(2000):
    logging.warning("x" * 100)
"""


def test_a_process_whose_reader_has_stopped_ends():
    reads, writes = os.pipe()
    try:
        ended = subprocess.run([sys.executable, "-c", BLOCKED], stdout=writes, timeout=50)
    finally:
        os.close(reads)
        os.close(writes)
    assert ended.returncode == 0
