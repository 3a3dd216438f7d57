"""What an operator's terminal shows of a server's answers."""

import json
import threading
from unittest import mock

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from tests.server.storage.records import round_record
from tests.server.transport.test_sanitize import SENT

from isthmus.wire import operator_pb2 as pb
from isthmus_server.cli import operators as operator_commands
from isthmus_server.cli.operators import OperatorClient, ServerUnreachable
from isthmus_server.storage.events import JobEnded, Paused, attempt_event


@settings(max_examples=25)
@given(SENT)
def test_what_a_server_says_about_jobs_does_not_control_the_terminal(text):
    job = pb.Job(id=text, state=text, submitted_by=text, reason=text, run_id=text)
    replies = {"Jobs": pb.JobsReply(jobs=[job]), "Cancel": pb.CancelReply(state=text)}
    client = mock.Mock(call=lambda method, *_: replies[method])
    with mock.patch.object(operator_commands, "OperatorClient", return_value=client):
        for command, arguments in (
            (operator_commands.jobs, []),
            (operator_commands.cancel, ["job-1"]),
        ):
            output = CliRunner().invoke(command, arguments, catch_exceptions=False).output
            assert all(line.isprintable() for line in output.split("\n"))


def test_jobs_are_listed_with_the_ids_of_their_runs(monkeypatch):
    """By which logs of devices name them."""
    named = pb.Job(id="digits-10", run_id="digits-4caffba7", state="running")
    of_an_older_server = pb.Job(id="digits-9", state="finished")
    reply = pb.JobsReply(jobs=[named, of_an_older_server])
    client = mock.Mock(call=lambda *_: reply)
    monkeypatch.setattr(operator_commands, "OperatorClient", lambda *_: client)
    shown = CliRunner().invoke(operator_commands.jobs, []).output.split("\n")
    first = [line.split()[0] for line in shown if line.strip()]
    assert first == ["job,", "digits-10", "digits-4caffba7", "digits-9"]
    found = json.loads(CliRunner().invoke(operator_commands.jobs, ["--json"]).output)
    assert [job["run_id"] for job in found] == ["digits-4caffba7", ""]


def sent(event):
    """An event as a server sends it."""
    return pb.Event(kind=event.kind, data=json.dumps(event.to_json()))


class Following:
    """Follows a log at one server after the other; each tells all, and then is gone."""

    def __init__(self, servers):
        self.servers = servers

    def __call__(self, *_):
        return self

    def follow(self, request):
        events = self.servers.pop(0)
        if events is None:
            raise ServerUnreachable("the server at hub cannot be reached: it was stopped")
        yield None
        yield from map(sent, events)
        if not isinstance(events[-1], JobEnded):
            raise ServerUnreachable("the server at hub cannot be reached: it was stopped")

    def close(self):
        pass


@pytest.fixture
def follow(monkeypatch):
    """The output of `isthmus logs -f` where servers are gone and come back."""
    monkeypatch.setattr(operator_commands, "_REDIAL_SECONDS", 0.0)

    def follow(*servers):
        monkeypatch.setattr(operator_commands, "OperatorClient", Following([*servers]))
        return CliRunner().invoke(operator_commands.logs, ["-f", "table-1"])

    return follow


def test_a_followed_log_goes_on_at_the_next_server_without_a_round_twice(follow):
    one, two = (attempt_event(round_record(number)) for number in (1, 2))
    ended = JobEnded(state="finished", reason="")
    found = follow([one], None, [one, two], [one, two, ended])
    assert found.exit_code == 0
    lines = found.output.splitlines()
    gone = (
        "the server at hub cannot be reached: it was stopped; the log goes on as soon as it, or "
        "the server that takes over from it, answers"
    )
    back = "a server answers: the log goes on"
    assert [line[:9] if line.startswith("round") else line for line in lines] == [
        "round   1",
        *(gone, back, "round   2"),
        *(gone, back, "table-1 finished"),
    ]


def test_a_log_says_that_an_operator_has_paused_the_job(follow):
    reason = "paused by alice, until `isthmus resume`"
    held = Paused(round=0, seconds=0.0, reason=reason)
    found = follow([held, JobEnded(state="cancelled", reason="")])
    assert found.output.splitlines() == [f"table-1 is {reason}", "table-1 cancelled"]


def test_a_log_without_a_server_is_refused_at_first_and_after_a_while(follow, monkeypatch):
    found = follow(None)
    assert found.exit_code == 1
    assert str(found.exception) == "the server at hub cannot be reached: it was stopped"
    monkeypatch.setattr(operator_commands, "_GONE_SECONDS", 0.0)
    found = follow([attempt_event(round_record(1))], None, None)
    assert isinstance(found.exception, ServerUnreachable)
    assert str(found.exception).endswith("follow the log again with  isthmus logs -f table-1")


def test_a_server_that_hangs_ends_what_follows_it(monkeypatch):
    """Its connection stays open, and says nothing."""
    monkeypatch.setattr(operator_commands, "_SILENT_SECONDS", 0.1)
    cancelled = threading.Event()

    class Silent:
        cancel = cancelled.set

        def initial_metadata(self):
            cancelled.wait()

        def is_active(self):
            return False

        def __iter__(self):
            return iter(())

    client = mock.Mock(spec=OperatorClient)
    client._channel = mock.Mock(unary_stream=lambda method: lambda request: Silent())
    client._check_answers.side_effect = (None, ServerUnreachable("it did not answer in time"))
    with pytest.raises(ServerUnreachable):
        next(OperatorClient.follow(client, pb.LogsRequest(id="table-1", follow=True)))
    assert cancelled.is_set()
