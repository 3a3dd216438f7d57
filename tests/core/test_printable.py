"""Text from elsewhere is escaped before it reaches a terminal or a log, whatever it contains."""

import logging

import grpc
import grpc.aio
from hypothesis import given
from hypothesis import strategies as st

from isthmus.grpc_errors import details_of, short_message
from isthmus.identity.joining import _failure_message
from isthmus.identity.proxies import Road
from isthmus.printable import MAX_LINE, PrintableFormatter, in_a_line, in_lines

ANY_TEXT = st.text(st.characters() | st.sampled_from("\n\r\x1b\x00\x7f\x9b\u202e\u2066\u2028"))
FORGED = "a\n2026-01-01 INFO \x1b[2J\x9b1m\u202eforged\u2066\u2028\r"


@given(ANY_TEXT)
def test_any_text_becomes_one_printable_line(text):
    line = in_a_line(text)
    assert line.isprintable()
    if text.isprintable() and len(text) <= MAX_LINE:
        assert line == text.strip()
    assert all(part.isprintable() for part in in_lines(text).split("\n"))


def test_what_was_there_can_be_read():
    assert in_a_line(FORGED) == (r"a\n2026-01-01 INFO \x1b[2J\x9b1m\u202eforged\u2066\u2028\r")
    assert in_a_line("x" * 5000) == "x" * MAX_LINE + "..."


@given(ANY_TEXT, st.sampled_from([grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED]))
def test_the_details_of_a_servers_refusal_are_one_line(text, code):
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=text)
    assert details_of(error).isprintable()
    assert short_message(text).isprintable()
    assert _failure_message(Road("127.0.0.1:1"), error).isprintable()


@given(ANY_TEXT)
def test_a_log_record_is_one_line_and_a_traceback_keeps_its_lines(text):
    formatter = PrintableFormatter("%(levelname)s %(message)s")
    record = logging.LogRecord("x", logging.INFO, "", 0, "said: %s", (text,), None)
    assert formatter.format(record).isprintable()
    try:
        raise ValueError(text)
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    lines = formatter.format(record).split("\n")
    assert lines[1].startswith("Traceback")
    assert all(line.isprintable() for line in lines)
