"""What compressed updates leave is kept for the round it belongs to, and is used once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isthmus.errors import UpdateError
from isthmus.job import parse_job
from isthmus.tensors.exchange_set import TensorLayout
from isthmus_datacenter.checkpointing.unsent import NO_ROUND, UnsentUpdates
from isthmus_privacy.compression.block_top_k import BlockTopK
from isthmus_privacy.compression.single_updates import DatacenterMessages

LAYOUT = TensorLayout.from_shapes({"bias": (50,), "weight": (90, 100), "mean": (3,)}, ["mean"])
BLOCKS = BlockTopK.of(LAYOUT, 64)
"""The same bytes as those of the messages, and the same decoding."""
JOB = """
name = "small"
[task]
source = "task.py:Learn"
[strategy]
policy = "datacenter"
[datacenter.compression]
keep = 64
"""
START = torch.zeros(LAYOUT.size)


def messages() -> DatacenterMessages:
    made = DatacenterMessages.of(parse_job(JOB), LAYOUT)
    assert made is not None
    return made


def update(seed: int) -> torch.Tensor:
    return torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed))


class Sender:
    """A datacenter whose services end after each update."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def send(
        self, about: tuple[int, int], committed: tuple[int, int], vector: torch.Tensor
    ) -> tuple[torch.Tensor, list[str]]:
        unsent = UnsentUpdates(self.state, LAYOUT, messages())
        before, after = LAYOUT.encode(START), LAYOUT.encode(START - vector)
        payload, notes = unsent.compress(about, committed, before, after)
        decoded = messages().decode(payload, about[0])
        assert torch.equal(decoded, BLOCKS.decode(payload))
        return decoded, notes

    def left(self, about: tuple[int, int]) -> torch.Tensor:
        data = (self.state / f"unsent-{about[0]}-{about[1]}").read_bytes()
        return torch.frombuffer(bytearray(data[:-32]), dtype=torch.float32)


@pytest.fixture
def sender(tmp_path: Path) -> Sender:
    return Sender(tmp_path)


def test_what_is_sent_and_left_adds_up_over_committed_rounds(sender: Sender) -> None:
    committed, total, received = NO_ROUND, torch.zeros(LAYOUT.size), torch.zeros(LAYOUT.size)
    for round_ in range(1, 6):
        total += update(round_)
        sent, notes = sender.send((round_, 1), committed, update(round_))
        assert not notes
        received += sent
        committed = round_, 1
        torch.testing.assert_close(received + sender.left(committed), total)
    assert len(list(sender.state.iterdir())) == 2


def test_an_attempt_that_failed_loses_and_repeats_nothing(sender: Sender) -> None:
    sender.send((1, 1), NO_ROUND, update(1))
    expected = sender.send((2, 1), (1, 1), update(2))[0]
    after = sender.left((2, 1))
    for attempt in (2, 3):  # whatever the earlier attempts trained
        sender.send((2, attempt), (1, 1), update(90 + attempt))
    again, notes = sender.send((2, 4), (1, 1), update(2))
    assert not notes
    assert again.equal(expected)
    assert sender.left((2, 4)).equal(after)


def test_the_remainder_waits_for_rounds_without_this_datacenter(sender: Sender) -> None:
    sender.send((1, 1), NO_ROUND, update(1))
    left = sender.left((1, 1))
    sent, notes = sender.send((9, 2), (1, 1), update(2))
    assert not notes
    torch.testing.assert_close(sent + sender.left((9, 2)), left + update(2))


@pytest.mark.parametrize("how", ["deleted", "cut", "changed", "longer"])
def test_a_remainder_that_cannot_be_used_is_reported_and_left_out(how: str, sender: Sender) -> None:
    expected = sender.send((1, 1), NO_ROUND, update(2))[0]
    path = sender.state / "unsent-1-1"
    data = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    else:
        data[100] ^= how == "changed"
        path.write_bytes({"cut": data[:99], "changed": data, "longer": data + b"x"}[how])
    sent, (note,) = sender.send((2, 1), (1, 1), update(2))
    assert sent.equal(expected)
    assert "what was not sent up to round 1 is lost" in note
    assert "\n" not in note


def test_training_begins_with_what_was_left(sender: Sender) -> None:
    sender.send((1, 1), NO_ROUND, update(1))
    unsent, model = UnsentUpdates(sender.state, LAYOUT, messages()), LAYOUT.encode(update(2))
    assert unsent.apply(NO_ROUND, model) == ""
    assert LAYOUT.decode(model).equal(update(2))
    first = unsent.apply((1, 1), model)
    assert LAYOUT.decode(model).equal(update(2) - sender.left((1, 1)))
    sender.send((2, 1), (1, 1), update(3))
    assert first != unsent.apply((2, 1), model)  # states that began with another are not resumed

    (sender.state / "unsent-2-1").write_bytes(b"damaged")
    model = LAYOUT.encode(update(2))
    assert unsent.apply((2, 1), model) == ""
    assert LAYOUT.decode(model).equal(update(2))


def test_an_update_that_is_not_finite_leaves_what_was_there(sender: Sender) -> None:
    sender.send((1, 1), NO_ROUND, update(1))
    left = sender.left((1, 1))
    with pytest.raises(UpdateError, match="not finite"):
        sender.send((2, 1), (1, 1), torch.full((LAYOUT.size,), torch.nan))
    assert [path.name for path in sender.state.iterdir()] == ["unsent-1-1"]
    assert sender.left((1, 1)).equal(left)
