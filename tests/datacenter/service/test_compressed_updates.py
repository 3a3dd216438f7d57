"""A service with real ranks sends compressed updates, and says when it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.datacenter.conftest import random_model

from isthmus.errors import UserError
from isthmus.job import with_changes
from isthmus_privacy.compression.block_top_k import BlockTopK

KEEP = 512
ROUND = {"round": 1, "attempt": 1, "hand_back": True}


def compressing(setup: Any) -> Any:
    changes = {"datacenter.compression.keep": KEEP, "strategy.policy": "datacenter"}
    return type(setup)(with_changes(setup.job, changes))


def test_a_compressed_update_is_that_of_the_same_steps(
    warm_datacenter: Any, make_setup: Any, decode: Any
) -> None:
    setup = make_setup("Table")
    model = random_model(setup.layout, 1)
    warm_datacenter.open("whole", setup)
    _, after = warm_datacenter.train("whole", 0, 4, model, **ROUND)
    update = decode(model, setup.layout) - decode(after, setup.layout)

    codec, state = BlockTopK.of(setup.layout, KEEP), warm_datacenter.service.state / "small"
    warm_datacenter.open("small", compressing(setup))
    trained, message = warm_datacenter.train("small", 0, 4, model, compressed=True, **ROUND)
    assert trained.result.size == len(message) == codec.nbytes
    expected = update.clone()
    assert message == codec.encode(expected)
    left = torch.frombuffer(bytearray((state / "unsent-1-1").read_bytes()), dtype=torch.float32)
    assert left[: setup.layout.size].equal(expected)

    # The checkpoints of the next round leave it alone; that round begins with it and sends it.
    more = {"round": 2, "attempt": 1, "summed_round": 1, "summed_attempt": 1, "hand_back": True}
    begins = decode(model, setup.layout) - expected
    own = setup.layout.encode(begins)
    _, whole = warm_datacenter.train("small", 4, 8, own, round=2, hand_back=True)
    _, second = warm_datacenter.train("small", 4, 8, model, compressed=True, **more)
    both = begins - decode(whole, setup.layout) + expected
    assert second == codec.encode(both)


def test_a_compressed_update_of_nothing_is_refused(warm_datacenter: Any, make_setup: Any) -> None:
    setup = make_setup("Table")
    for run, job in (("plain", setup), ("compressing", compressing(setup))):
        model = random_model(setup.layout, 1) if run == "plain" else None
        warm_datacenter.open(run, job)
        with pytest.raises(UserError, match="a compressed update needs a job with"):
            warm_datacenter.train(run, 0, 1, model, compressed=True, **ROUND)
