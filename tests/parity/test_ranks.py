"""Models train on ranks like in one process, or are refused before training.

`benchmarks/parity.py` compares more models and layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.parity.comparison import Cell, Result, compare
from tests.warm_ranks import Ranks

TENSOR: dict[str, Any] = {"tensor_parallel": 2}
TWO_RANKS = {
    "a PReLU between sharded layers": Cell("prelu", TENSOR),
    "a scale that begins as zero": Cell("zero-scale", TENSOR),
    "a product of matrices, one of them zero": Cell("low-rank", TENSOR),
    "norms within heads": Cell("qwen3", TENSOR),
    "norms within heads, compiled": Cell("qwen3", {**TENSOR, "compile": True}),
    "norms over all heads": Cell("olmo2", TENSOR),
    "an embedding with an own forward()": Cell("opt", TENSOR),
    "a bias that a head and another module share": Cell("bert", TENSOR),
    "weights that are computed from others": Cell("weight-norm", TENSOR, "AdamW"),
    "experts": Cell("qwen3_moe", TENSOR),
    "experts of which a batch calls a part, sharded": Cell("qwen3_moe", {"zero_stage": 3}, "AdamW"),
    "experts that ranks divide": Cell("mixtral", {"expert_parallel": 2}),
    "running statistics of parts of a batch": Cell("batch-norm", {}, "SGD, accumulated"),
    "running statistics and sharded matrices": Cell("resnet", TENSOR, "SGD, accumulated"),
    "running statistics of recomputed blocks": Cell("resnet", {"checkpoint_activations": True}),
    "spectral norm of recomputed blocks": Cell(
        "spectral-norm", {"checkpoint_activations": True}, "SGD, accumulated"
    ),
    "a recurrent layer, a schedule and clipping": Cell("lstm", {}, "AdamW, cosine, clipped"),
    "an encoder in a pipeline": Cell("bert", {"pipeline_parallel": 2}),
}
FOUR_RANKS = {
    "experts that ranks divide and shard": Cell(
        "qwen3_moe", {"expert_parallel": 2, "zero_stage": 3}, "AdamW"
    ),
    "ZeRO-0": Cell("prelu", {**TENSOR, "zero_stage": 0}),
    "ZeRO-1": Cell("prelu", {**TENSOR, "zero_stage": 1}),
    "ZeRO-3, norms within heads": Cell("qwen3", {**TENSOR, "zero_stage": 3}),
    "a pipeline": Cell("qwen3", {**TENSOR, "pipeline_parallel": 2}),
}
REFUSED = {
    "a whole gate of sharded activations": (
        Cell("gated", TENSOR),
        "with its matrices sharded the model gives parameter 'blocks.0.fc2.bias' another gradient",
    ),
    "running statistics": (
        Cell("batch-norm", {"pipeline_parallel": 2}),
        "cannot be kept with pipeline_parallel above 1; set it to 1, or exchange.buffers",
    ),
    "a buffer that each call changes": (
        Cell("spectral-norm", {"pipeline_parallel": 2}),
        "each call of the model in training changes its buffer 'blocks.0.fc1.parametrizations.",
    ),
    "one scale for sharded and whole activations": (
        Cell("twice", TENSOR),
        "with its matrices sharded the model gives parameter 'blocks.1.inner.act.by' another",
    ),
}


def _only(results: Any) -> Result:
    (result,) = results
    return result


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_train_like_one_process(
    name: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    result = _only(compare(ranks(2), [TWO_RANKS[name]], tmp_path))
    assert result.equal, str(result)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_train_like_one_process(
    name: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    result = _only(compare(ranks(4), [FOUR_RANKS[name]], tmp_path))
    assert result.equal, str(result)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_train_differently_is_refused(
    name: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    cell, sentence = REFUSED[name]
    result = _only(compare(ranks(2), [cell], tmp_path))
    assert sentence in result.refusal
    assert "\n" not in result.refusal
