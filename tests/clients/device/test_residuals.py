"""What a device has not sent yet survives failed attempts, kills and absence."""

import pytest
import torch
from tests.privacy.protocol import make_config

from isthmus_clients.device.residuals import MAX_RUNS, NO_SUM, Residuals
from isthmus_privacy.compression.update_codec import UpdateCodec

CODEC = UpdateCodec(one_in=2, bits=3)
CONFIG = make_config(size=4, codec=CODEC, bits=6, levels=7, weight_max=10)


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
