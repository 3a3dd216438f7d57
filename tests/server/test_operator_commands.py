"""What an operator's terminal shows of a server's answers."""

from unittest import mock

from click.testing import CliRunner
from hypothesis import given, settings
from tests.server.transport.test_sanitize import SENT

from isthmus.wire import operator_pb2 as pb
from isthmus_server.cli import operators as operator_commands


@settings(max_examples=25)
@given(SENT)
def test_what_a_server_says_about_jobs_does_not_control_the_terminal(text):
    job = pb.Job(id=text, state=text, submitted_by=text, reason=text)
    replies = {"Jobs": pb.JobsReply(jobs=[job]), "Cancel": pb.CancelReply(state=text)}
    client = mock.Mock(call=lambda method, *_: replies[method])
    with mock.patch.object(operator_commands, "OperatorClient", return_value=client):
        for command, arguments in (
            (operator_commands.jobs, []),
            (operator_commands.cancel, ["job-1"]),
        ):
            output = CliRunner().invoke(command, arguments, catch_exceptions=False).output
            assert all(line.isprintable() for line in output.split("\n"))
