"""What a device has not sent yet survives failed attempts, kills and absence."""

import math
import time

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from tests.privacy.protocol import make_config

from isthmus_clients.device.residuals import MAX_RUNS, NO_SUM, Residuals
from isthmus_clients.device.secure_sessions import SecureSessions
from isthmus_clients.training.secure import SecureParticipation
from isthmus_privacy.compression.update_codec import UpdateCodec
from isthmus_privacy.crypto.keys import SigningKey
from isthmus_privacy.secagg.identity import Authority
from isthmus_privacy.slots import COMPRESSED_SLOTS
from isthmus_simulation.devices.unmasked import UnmaskedParticipation, UnmaskedSessions

CODEC = UpdateCodec(one_in=2, bits=3)
SECURE = "federated.secure_aggregation=true"
CONFIG = make_config(size=4, codec=CODEC, bits=6, levels=6, weight_max=10)


def leave(directory, committed, about, left):
    """Take part in a sum that leaves `left`, in a process of its own."""
    residual = Residuals(directory).open("run", "tablet", committed, 4)
    whole, _ = residual.add_to(torch.ones(4), 5, CONFIG)
    residual.save(about, whole - left)


def kept(directory, committed):
    return Residuals(directory).open("run", "tablet", committed, 4).vector.tolist()


def test_an_update_is_weighed_and_added_to_what_is_left(tmp_path):
    leave(tmp_path, NO_SUM, (1, 1), torch.full((4,), 0.25))
    residual = Residuals(tmp_path).open("run", "tablet", (1, 1), 4)
    whole, magnitude = residual.add_to(torch.ones(4), 5, CONFIG)
    assert whole.tolist() == [0.75] * 4
    assert 2**magnitude == pytest.approx(0.75)


@given(
    left=st.lists(st.floats(-8, 8, width=32), min_size=4, max_size=4),
    examples=st.integers(1, 12),
    trained=st.integers(0, 4),
)
def test_a_device_begins_at_the_model_that_has_everything(left, examples, trained):
    """What it then trains completes the way from the model, whatever had not been sent."""
    residuals, left = Residuals(None), torch.tensor(left)
    before = residuals.open("run", "tablet", NO_SUM, 4)
    whole, _ = before.add_to(torch.ones(4), examples, CONFIG)
    before.save((1, 1), whole - left)
    share = min(examples, 10) / 10

    model, end = torch.linspace(-1, 1, 4), torch.linspace(2, 3, 4)
    residual = residuals.open("run", "tablet", (1, 1), 4)
    start = model.clone()
    residual.step_ahead(start, trained)
    expected = torch.cat([(model - left / share)[:trained], model[trained:]])
    torch.testing.assert_close(start, expected, rtol=1e-5, atol=1e-4)
    to_send, _ = residual.add_to(start - end, examples, CONFIG)
    way = share * (model - end)
    way[trained:] += left[trained:]
    torch.testing.assert_close(to_send, way, rtol=1e-5, atol=1e-4)


def test_a_device_begins_with_a_part_of_what_was_not_sent_and_still_sends_all_of_it():
    residuals = Residuals(None)
    before = residuals.open("run", "tablet", NO_SUM, 4)
    before.add_to(torch.ones(4), 5, CONFIG)
    before.save((1, 1), torch.zeros(4))
    residual, start = residuals.open("run", "tablet", (1, 1), 4), torch.zeros(4)
    residual.step_ahead(start, 4, 0.25)
    torch.testing.assert_close(start, torch.full((4,), -0.25))
    to_send, _ = residual.add_to(torch.zeros(4), 5, CONFIG)
    torch.testing.assert_close(to_send, torch.full((4,), 0.5))


@pytest.mark.parametrize(("given", "part"), [("true", 1.0), ("false", 0.0), ("0.3", 0.3)])
def test_the_part_is_a_number_or_all_or_nothing(make_job, given, part):
    job = make_job(f"federated.compression={{step_ahead={given}}}", SECURE)
    assert job.federated.compression.step_ahead == part


def test_a_device_with_fewer_examples_than_before_does_not_begin_too_far_away(tmp_path):
    """What is left of an update of ten examples is not divided by the share of one.

    A round without a usable update in between changes nothing.
    """
    committed = NO_SUM
    for round_, (examples, value) in enumerate([(10, 1.0), (10, math.nan), (1, 1.0)], start=1):
        residual = Residuals(tmp_path).open("run", "tablet", committed, 4)
        residual.add_to(torch.full((4,), value), examples, CONFIG)
        residual.save((round_, 1), torch.zeros(4))
        committed = (round_, 1)
    start = torch.zeros(4)
    Residuals(tmp_path).open("run", "tablet", committed, 4).step_ahead(start, 4)
    torch.testing.assert_close(start, torch.full((4,), -1.1))


def test_a_sum_that_is_not_committed_consumes_nothing(tmp_path):
    leave(tmp_path, NO_SUM, (1, 1), torch.full((4,), 0.25))
    leave(tmp_path, (1, 1), (2, 1), torch.full((4,), 0.5))
    leave(tmp_path, (1, 1), (2, 2), torch.full((4,), 0.75))
    assert kept(tmp_path, (1, 1)) == [0.25] * 4
    assert kept(tmp_path, (2, 2)) == [0.75] * 4
    assert kept(tmp_path, (2, 1)) == [0.0] * 4


def test_a_device_that_was_away_continues_with_its_last_committed_sum(tmp_path):
    leave(tmp_path, NO_SUM, (1, 1), torch.full((4,), 0.25))
    leave(tmp_path, (1, 1), (40, 1), torch.full((4,), 0.5))
    assert kept(tmp_path, (40, 1)) == [0.5] * 4


def test_without_a_usable_update_nothing_is_lost(tmp_path):
    leave(tmp_path, NO_SUM, (1, 1), torch.full((4,), 0.25))
    residual = Residuals(tmp_path).open("run", "tablet", (1, 1), 4)
    residual.add_to(torch.tensor([1.0, float("nan"), 1.0, 1.0]), 5, CONFIG)
    residual.save((2, 1), torch.zeros(4))
    assert kept(tmp_path, (2, 1)) == [0.25] * 4
    model = torch.ones(4)  # the next training begins at the round's model, which may be better
    Residuals(tmp_path).open("run", "tablet", (2, 1), 4).step_ahead(model, 4)
    assert model.tolist() == [1.0] * 4


def real(config):
    """The sessions of a device, and its part in a sum."""
    identity, authority = SigningKey(bytes(32)), Authority(bytes(32))
    sessions = SecureSessions(
        "tablet", Ed25519PrivateKey.from_private_bytes(bytes(32)), None, None, threads=1
    )
    credentials = sessions._enrolled()
    enrolled = authority.enrol("tablet", identity.public, not_after=2**40)
    credentials.welcomed(authority.public, enrolled.to_bytes())
    about = (config.run_id, config.round, config.attempt)
    hashes = config.model_hash, config.purpose
    encoded = config.to_bytes()
    return sessions, SecureParticipation(about, encoded, *hashes, COMPRESSED_SLOTS, credentials)


def simulated(config):
    """The same of a simulated device."""
    about, encoded = (config.run_id, config.round, config.attempt), config.to_bytes()
    attempt = UnmaskedParticipation(about, encoded, COMPRESSED_SLOTS, whole=0)
    return UnmaskedSessions("tablet", Residuals(None)), attempt


@pytest.mark.parametrize("sessions_of", [real, simulated])
@pytest.mark.parametrize(
    ("loss", "update", "left"),
    [(float("nan"), 1.0, 0.25), (float("inf"), 1.0, 0.25), (0.5, 3e38, 3e38)],
)
def test_an_update_that_cannot_be_encoded_leaves_what_was_left_before(
    tmp_path, sessions_of, loss, update, left
):
    """The server does not count it, so that a part of it must not be sent later either.

    In the last case the update and what is left are finite, and their sum is not: once it was
    stored, no later update could be sent.
    """
    leave(tmp_path, NO_SUM, (1, 1), torch.full((4,), 0.25))
    before = Residuals(tmp_path).open("run", "tablet", (1, 1), 4)
    before.vector.fill_(left)
    before.save((2, 1), None)
    residual = Residuals(tmp_path).open("run", "tablet", (2, 1), 4)
    config = make_config(
        round=3,
        attempt=1,
        slots=COMPRESSED_SLOTS,
        codec=CODEC,
        bits=6,
        levels=6,
        draw=int(time.time()),
    )
    sessions, attempt = sessions_of(config)
    whole, magnitude = residual.add_to(torch.full((4,), update), 10, config)
    figures = {
        "loss": loss,
        "magnitude": magnitude,
        "over_range": 0.0,
        "other_weight": 0.0,
        "over_weight": 0.0,
        "unusable": 0.0,
    }
    sessions.join(attempt, whole, 10, figures, bytes(32))
    residual.save((3, 1), attempt.sent)
    after = Residuals(tmp_path).open("run", "tablet", (3, 1), 4)
    assert after.vector.tolist() == torch.full((4,), left).tolist()
    model = torch.ones(4)
    after.step_ahead(model, 4)
    assert model.tolist() == [1.0] * 4


def test_a_damaged_residual_is_reported_and_not_used(tmp_path, caplog):
    leave(tmp_path, NO_SUM, (1, 1), torch.full((4,), 0.25))
    (file,) = tmp_path.glob("*/*/*.safetensors")
    assert file.stat().st_mode & 0o077 == 0
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert kept(tmp_path, (1, 1)) == [0.0] * 4
    assert "is damaged" in caplog.text


def test_only_runs_that_were_used_last_are_kept(tmp_path):
    for number in range(MAX_RUNS + 3):
        Residuals(tmp_path).open(f"run-{number}", "tablet", NO_SUM, 4).save((1, 1), None)
    assert len(list(tmp_path.glob("*/*"))) == MAX_RUNS


def test_devices_that_share_a_directory_keep_their_own(tmp_path):
    names = [f"client-{number}" for number in range(MAX_RUNS + 3)]
    for value, name in enumerate(names):
        residual = Residuals(tmp_path).open("run", name, NO_SUM, 4)
        residual.vector += value
        residual.save((1, 1), None)
    for value, name in enumerate(names):
        kept_of_it = Residuals(tmp_path).open("run", name, (1, 1), 4).vector
        assert kept_of_it.tolist() == [value] * 4
