import pytest
from click.testing import CliRunner

from isthmus.errors import Refused, UserError
from isthmus.task import Participant
from isthmus_clients.agent import serve
from isthmus_clients.commands import client


@pytest.mark.parametrize(
    ("shard", "sentence"),
    [
        ("1", r"^--shard '1' is not of the form I/N, such as 0/8$"),
        ("a/b", r"is not of the form I/N"),
        ("1/2/3", r"is not of the form I/N"),
        ("2/2", r"^--shard '2/2': I must be at least 0 and below N$"),
        ("-1/2", r"I must be at least 0 and below N$"),
    ],
)
def test_a_shard_of_another_form_is_one_sentence(shard, sentence):
    arguments = ["start", "--server", "127.0.0.1:1", "--name", "a", "--shard", shard]
    result = CliRunner().invoke(client, arguments)
    assert isinstance(result.exception, UserError)
    with pytest.raises(UserError, match=sentence):
        raise result.exception


async def test_a_server_that_refuses_ends_the_client():
    from isthmus_server.link import Link

    link = Link(10.0)
    port = await link.start()
    try:
        with pytest.raises(Refused, match=r"a hello needs a name of 1 to 128 characters"):
            await serve(
                f"127.0.0.1:{port}", Participant(name="x" * 200, regime="federated"), None, 1
            )
    finally:
        await link.stop()
