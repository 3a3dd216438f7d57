"""Linear layers in float8 are refused where they cannot be, before anything is trained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from isthmus.errors import TaskError
from isthmus.job.datacenter import DatacenterSection
from isthmus_datacenter.parallel.float8_layers import use_float8


def test_processors_are_refused(make_setup: Any, on_ranks: Any, tmp_path: Path) -> None:
    opening = make_setup("Gpt", float8=True).open_command()
    for (message,) in on_ranks(2, "refusals", [opening], str(tmp_path / "state")):
        assert message == (
            "datacenter.float8 needs GPUs of compute capability 8.9 or higher, and processors have "
            "none; set float8 = false"
        )


def test_a_model_without_such_layers_is_refused() -> None:
    block = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16))
    model = nn.Sequential(nn.Linear(16, 16), block)
    with pytest.raises(TaskError, match="has widths that are multiples of 16; set float8 = false"):
        use_float8(model, [block])


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"tensor_parallel": 2}, "float8 needs tensor_parallel = 1"),
        ({"context_parallel": 2}, "float8 needs context_parallel = 1"),
        ({"precision": "fp16"}, 'float8 does not work with precision = "fp16"'),
    ],
)
def test_what_was_not_compared_is_refused(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        DatacenterSection.model_validate({"float8": True, **section})
