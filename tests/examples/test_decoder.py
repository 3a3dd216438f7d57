"""A decoder of Hugging Face's transformers, sharded only by the fallback plans."""

import shutil
from pathlib import Path

import pytest
from tests.warm_ranks import Ranks

from isthmus.job import load_job

from .conftest import EXAMPLES

ON_RANKS = Path(__file__).parents[1] / "datacenter" / "ranks.py"
STEPS, BATCH = 3, 8
TASK = """
import torch
from decoder import Decoder

class Plain(Decoder):
    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.2)
"""
CHANGES = {
    "task.source": '"plain.py:Plain"',
    "task.settings.public_speakers": '["DUKE"]',
    "task.settings.public_held_out": "[]",
    "task.settings.minimum_characters": "100",
    "task.settings.context": "12",
    "datacenter.tensor_parallel": "1",
}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 12,
}
GPT2 = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 12} | dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)
CASES = {
    "zero-3": ("llama", LLAMA, {"zero_stage": 3}, ""),
    "heads": ("llama", LLAMA | {"tie_word_embeddings": True}, {"tensor_parallel": 2}, ""),
    "stages": ("llama", LLAMA, {"pipeline_parallel": 2}, ""),
    "one group": (
        "llama",
        LLAMA | {"num_key_value_heads": 1},
        {"tensor_parallel": 2},
        "'decoder.model.layers.0.self_attn' and 1 more cannot be sharded by heads into "
        "tensor_parallel=2 equal parts (queries are 16 wide, keys 4): the output "
        "of each of its layers is gathered separately",
    ),
    "transposed": ("gpt2", GPT2, {"tensor_parallel": 2}, ""),
}
"""Cases on two ranks: model, its settings, the layout, and the expected note."""


@pytest.fixture
def base(tmp_path):
    """The example with another optimizer, and two speakers."""
    for name in ("task.py", "decoder.py", "decoder.toml"):
        shutil.copy(EXAMPLES / "shakespeare" / name, tmp_path)
    (tmp_path / "plain.py").write_text(TASK)
    words = "To be, or not to be: that is the question. " * 12
    (tmp_path / "play.txt").write_text(f"DUKE:\n{words}\n\nROSE:\n{words}\n")
    return tmp_path


def opening(base, kind, model, section):
    """How ranks open the job of the example, changed."""
    pairs = ", ".join(f"{key} = {str(value).lower()}" for key, value in model.items())
    replicas = 2 if "zero_stage" in section else 1
    changes = CHANGES | {
        "task.settings.decoder": f'"{kind}"',
        "task.settings.model": f"{{{pairs}}}",
        "datacenter.batch_size": str(BATCH // replicas),
        **{f"datacenter.{key}": str(value) for key, value in section.items()},
    }
    job = load_job(base / "decoder.toml", [f"{key}={value}" for key, value in changes.items()])
    where = {"base": str(base), "data": str(base / "play.txt")}
    return {"op": "open", "run_id": "run", "job": job.model_dump_json(), **where}


def test_every_layout_trains_like_one_process(base):
    openings = [opening(base, *case[:3]) for case in CASES.values()]
    with Ranks(2) as ranks:
        results, repeated = ranks.run(
            ON_RANKS, "compare_with_one_process", openings, STEPS, BATCH, str(base)
        )
    assert results == repeated
    for (name, case), (difference, note) in zip(CASES.items(), results, strict=True):
        assert difference < 1e-5, name
        assert note == case[3], name
