"""Tokens for many devices: how many join, under which names, until when, and their end."""

import contextlib

import pytest
from click.testing import CliRunner

from isthmus.errors import AdmissionRefused, DamagedError, UserError
from isthmus.identity import joining, tls
from isthmus_server.cli.server import server
from isthmus_server.fleet.authority import initialise
from isthmus_server.fleet.registry import REPEAT_SECONDS, Registry
from isthmus_server.fleet.registry_file import refuse_lost_revocations
from isthmus_server.service.server import ControlPlaneServer
from isthmus_server.storage import audit


class Clock:
    now = 1e9

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry(tmp_path, clock):
    with contextlib.closing(Registry(tmp_path, now=clock)) as registry:
        registry.add_token(b"t", name="edge", kind="client", expires=clock.now + 3600, uses=2)
        yield registry


def join(registry, identity, kind="client", digest=b"t"):
    def issue(name):
        return identity + b" of " + name.encode(), tls.Subject(
            kind, name, identity, identity.hex(), registry._now() + 1e6
        )

    return registry.redeem(digest, kind, identity, issue)


def test_a_token_admits_as_many_as_it_is_for_under_names_of_their_own(registry, clock):
    assert join(registry, b"a")[0] == "edge-1"
    assert join(registry, b"b")[0] == "edge-2"
    sentence = "this token was for 2 participants, and 2 have joined with it"
    with pytest.raises(AdmissionRefused, match=sentence):
        join(registry, b"c")
    registry.revoke("edge-1")
    with pytest.raises(AdmissionRefused, match=sentence):  # its place is not free again
        join(registry, b"c")
    assert [entry.rollout for entry in registry.participants()] == ["edge", "edge"]


def test_a_join_is_repeated_for_a_while_and_counts_once(registry, clock):
    assert join(registry, b"a") == join(registry, b"a") == ("edge-1", b"a of edge-1")
    clock.now += REPEAT_SECONDS + 1
    with pytest.raises(AdmissionRefused, match="belongs to a participant already"):
        join(registry, b"a")
    assert join(registry, b"b")[0] == "edge-2"


def test_a_name_that_is_taken_is_passed_over(registry, clock):
    registry.add_token(b"own", name="edge-1", kind="client", expires=clock.now + 9)
    assert join(registry, b"x", digest=b"own")[0] == "edge-1"
    assert [join(registry, key)[0] for key in (b"a", b"b")] == ["edge-2", "edge-3"]


def test_it_ends_and_is_for_one_kind(registry, clock):
    with pytest.raises(AdmissionRefused, match="for participants of kind 'client', not 'operator'"):
        join(registry, b"a", "operator")
    clock.now += 3601
    with pytest.raises(AdmissionRefused, match="this token ended at"):
        join(registry, b"a")


def test_revoking_a_rollout_ends_its_token_and_its_participants(registry, clock):
    join(registry, b"a")
    registry.add_token(b"own", name="other", kind="client", expires=clock.now + 9)
    join(registry, b"x", digest=b"own")
    assert registry.revoke_rollout("edge") == ["edge-1"]
    with pytest.raises(AdmissionRefused, match="this token has been revoked"):
        join(registry, b"b")
    assert registry.revoked_identities() == {b"a"}
    states = {entry.name: entry.revoked is None for entry in registry.participants()}
    assert states == {"edge-1": False, "other": True}
    for name, sentence in (("edge", "is revoked already"), ("no", "there is no rollout named")):
        with pytest.raises(UserError, match=sentence):
            registry.revoke_rollout(name)
    with pytest.raises(UserError, match="there was a rollout 'edge' already"):
        registry.add_token(b"again", name="edge", kind="client", expires=2e9, uses=2)


def test_names_that_would_be_too_long_are_refused(registry):
    with pytest.raises(UserError, match="are too long"):
        registry.add_token(b"u", name="x" * 60, kind="client", expires=2e9, uses=10_000)


async def test_every_use_is_in_the_audit_log(tmp_path):
    """Over real TLS; an older registry that would admit the revoked ones again is refused."""
    state = tmp_path / "fleet"
    initialise(state, ["localhost"])
    arguments = ["token", "create", str(state), "--name", "edge", "--uses", "2", "--expires", "7d"]
    text = CliRunner().invoke(server, arguments).output.strip()
    running = ControlPlaneServer(state)
    async with running.listening("127.0.0.1", 0):
        url = f"localhost:{running.join_port}"
        for folder in ("a", "b"):
            token = joining.Token.given(text, None)
            await joining.join(url, token, tmp_path / folder, "client")
    older = {path.name: path.read_bytes() for path in state.glob("fleet.*")}
    output = CliRunner().invoke(server, ["revoke", str(state), "edge", "--rollout"]).output
    assert output == "the token edge and its 2 participants are revoked\n"
    made, *rest = audit.read(state)
    assert (made.action, made.details["uses"]) == ("token", "2")
    assert made.details["expires"].endswith(" UTC")
    assert [(entry.action, entry.by) for entry in rest[:2]] == [
        ("join", "edge-1"),
        ("join", "edge-2"),
    ]
    assert {entry.details["token"] for entry in rest[:2]} == {made.details["token"]}
    names = [entry.details["name"] for entry in rest[2:]]
    assert names == ["edge", "edge-1", "edge-2"]
    refuse_lost_revocations(state)
    for path in state.glob("fleet.*"):
        path.unlink()
    for name, data in older.items():
        (state / name).write_bytes(data)
    with pytest.raises(DamagedError, match="accepts 'edge"):
        refuse_lost_revocations(state)


async def test_tokens_that_share_names_with_a_rollout_leave_a_server_that_starts(tmp_path):
    state = tmp_path / "fleet"
    initialise(state, ["localhost"])

    def command(*words):
        result = CliRunner().invoke(server, [*words[:-1], str(state), *words[-1]])
        assert result.exit_code == 0, result.output
        return result.output.strip()

    first = command("token", "create", ["--name", "edge", "--uses", "2"])
    single = command("token", "create", ["--name", "edge"])
    command("token", "create", ["--name", "edge-1"])
    running = ControlPlaneServer(state)
    async with running.listening("127.0.0.1", 0):
        for text in (first, single):
            token = joining.Token.given(text, None)
            url = f"localhost:{running.join_port}"
            await joining.join(url, token, tmp_path / text, "client")
    command("revoke", ["edge", "--rollout"])
    refuse_lost_revocations(state)
    with contextlib.closing(Registry(state)) as registry:
        joined = {entry.name: entry.revoked is None for entry in registry.participants()}
    assert joined == {"edge-1": False, "edge": True}
    command("revoke", ["edge"])
    refuse_lost_revocations(state)
