"""Dropout differs between tensor-parallel ranks where activations do, and is the same elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.datacenter.task_models import DroppingDecoder
from torch import nn

from isthmus.errors import TaskError
from isthmus_datacenter.parallel.random_draws import (
    DrawingModules,
    FixedDraws,
    draw_apart,
    drawing_modules,
)

SHARDED = ("weights", "inner")
CPU = torch.device("cpu")


def test_sharded_activations_have_masks_of_their_own(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    command = make_setup("Dropping", tensor_parallel=2, batch_size=8).open_command()
    (first, number), (second, other) = on_ranks(2, "masks", command, str(tmp_path))
    assert first.keys() == second.keys()
    assert len(first) == 6
    for place in first:
        left, right = torch.tensor(first[place]), torch.tensor(second[place])
        assert 0.3 < float(left.double().mean()) < 0.7, place
        agree = float((left == right).double().mean())
        if place.split()[1] in SHARDED:
            # Half of the values agree by chance; these are at least 288.
            assert 0.3 < agree < 0.7, place
        else:
            assert agree == 1.0, place
    # A stream of a rank's own leaves the common one as it is on all ranks.
    assert number == other
    assert not torch.equal(torch.tensor(first["0 inner"]), torch.tensor(first["1 inner"]))


def test_masks_are_the_same_recomputed_and_beside_compiled_code(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    operations = []
    files = []
    for number, more in enumerate(({}, {"checkpoint_activations": True}, {"compile": True})):
        prepared = make_setup(
            "Dropping",
            {"optimizer": "SGD", "options": {"lr": 0.2}},
            tensor_parallel=2,
            batch_size=8,
            **more,
        )
        files.append(tmp_path / f"{number}")
        files[-1].write_bytes(prepared.layout.header + bytes(4 * prepared.layout.size))
        command = {"op": "train_steps", "run_id": "run", "until_step": 3, "result": str(files[-1])}
        operations.append((prepared.open_command(), command, f"{files[-1]}.state"))
    on_ranks(2, "train", operations)
    first, *others = (file.read_bytes() for file in files)
    assert others == [first, first]


def test_one_dropout_for_sharded_and_whole_activations_is_refused(
    make_setup: Any, on_ranks: Any, tmp_path: Path
) -> None:
    command = make_setup("Dropping", {"shared": True}, tensor_parallel=2).open_command()
    for (message,) in on_ranks(2, "refusals", [command], str(tmp_path)):
        assert message == (
            "with its matrices sharded module 'blocks.0.inner' draws random numbers (dropout) for "
            "activations that are sharded and for others that are whole; use a module for each, "
            "such as two nn.Dropout, or set tensor_parallel = 1"
        )


def test_unequal_numbers_of_draws_are_refused() -> None:
    with pytest.raises(TaskError, match="'a' draws random numbers 2 times, and 1 times as a whole"):
        drawing_modules({"a": [(2, 4)]}, {"a": [(2, 4), (2, 4)]})


def test_draws_are_fixed_and_recorded_by_module() -> None:
    model = DroppingDecoder(0.5, shared=False).train()
    words = torch.arange(12).view(2, 6)
    with FixedDraws(model) as fixed:
        output = model(words)
    assert torch.allclose(output, model.eval()(words), atol=1e-6)
    assert fixed.draws == {
        f"blocks.{at}{name}": shapes
        for at in range(2)
        for name, shapes in (
            ("", [(2, 4, 6, 6)]),
            (".outer", [(2, 6, 8), (2, 6, 8)]),
            (".inner", [(2, 6, 16)]),
        )
    }
    model = nn.Sequential(nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True))
    hidden = torch.randn(2, 3, 8, requires_grad=True)
    with FixedDraws(model) as fixed:
        first, second = (model[0](hidden, hidden, hidden, need_weights=False)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert fixed.draws == {"0": [(2, 2, 3, 3)] * 2}


class _Between(nn.Module):
    """Draws, has a child draw, and draws again."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Dropout(0.5)

    def forward(self, ones: torch.Tensor) -> torch.Tensor:
        drop = nn.functional.dropout
        return torch.stack([drop(ones, 0.5), self.child(ones), drop(ones, 0.5)])


def test_streams_nest() -> None:
    """A child for whole activations draws from the common stream, which then goes on."""
    ones = torch.ones(256)
    drawn = []
    for rank in range(2):
        model = _Between()
        draw_apart(model, DrawingModules(frozenset({""}), frozenset({"child"})), rank, CPU)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            drawn.append((model(ones), model(ones), torch.rand(4)))
            model.eval()
            before = torch.get_rng_state()
            torch.testing.assert_close(model.child(ones), ones)
            assert torch.equal(torch.get_rng_state(), before)
    (left, again, number), (right, _, other) = drawn
    assert torch.equal(left[1], right[1])
    assert torch.equal(number, other)
    rows = [left[0], left[2], right[0], right[2], left[1], again[0], again[1], again[2]]
    for at, row in enumerate(rows):
        for earlier in rows[:at]:
            assert 0.3 < float((row == earlier).double().mean()) < 0.7
