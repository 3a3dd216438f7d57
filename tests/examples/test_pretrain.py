"""The example trains a decoder on text from disk like one process, in each layout."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.warm_ranks import Ranks

from isthmus.errors import TaskError
from isthmus.job import load_job
from isthmus.task import load_task

from .conftest import DATACENTER, EXAMPLES, train

ON_RANKS = Path(__file__).parents[1] / "datacenter" / "ranks.py"
STEPS = 3
BATCH = 8
SMALL = {
    "task.settings.length": "16",
    "task.settings.held_out": "4",
    "task.settings.decoder": "{model_type='llama', vocab_size=260, hidden_size=16, "
    "intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, "
    "max_position_embeddings=16}",
    "datacenter.log_steps": "0",
    "datacenter.clip_norm": "1e9",
    "learning_rate.schedule": "'constant'",
    "learning_rate.warmup_steps": "0",
}
# Another optimizer than Adam, which makes rounding of gradients near zero as large as a step.
TASK = """
import torch
from task import Pretrain

class Plain(Pretrain):
    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.2)
"""
LAYOUTS = {
    "zero-3": {},
    "heads": {"tensor_parallel": 2},
    "stages": {"pipeline_parallel": 2},
    "recomputed": {"checkpoint_activations": "true"},
}


@pytest.fixture
def folder(tmp_path):
    """A folder of text: documents in plain text, and others in JSON lines."""
    folder = tmp_path / "text"
    folder.mkdir()
    plays = [f"Scene {number}. To be, or not to be: that is the question." for number in range(20)]
    (folder / "plays.txt").write_text("\n\n".join(plays))
    poems = [json.dumps({"text": f"Shall I compare thee to day {number}?"}) for number in range(20)]
    (folder / "poems.jsonl").write_text("\n".join(poems))
    return folder


def loaded(folder, *more, base=EXAMPLES / "pretrain"):
    overrides = [f"{key}={value}" for key, value in SMALL.items()]
    job = load_job(base / "job.toml", [*overrides, *more])
    return job, load_task(job.task.source, job.task.settings, base=base, data=folder)


def test_every_layout_trains_like_one_process(folder, tmp_path):
    base = tmp_path / "example"
    shutil.copytree(EXAMPLES / "pretrain", base)
    (base / "plain.py").write_text(TASK)
    openings = []
    for section in LAYOUTS.values():
        replicas = 1 if len(section) and "checkpoint_activations" not in section else 2
        keys = {"datacenter.batch_size": BATCH // replicas, "datacenter.global_batch": BATCH}
        keys |= {f"datacenter.{key}": value for key, value in section.items()}
        keys["task.source"] = '"plain.py:Plain"'
        job, _ = loaded(folder, *(f"{key}={value}" for key, value in keys.items()), base=base)
        where = {"base": str(base), "data": str(folder)}
        openings.append({"op": "open", "run_id": "run", "job": job.model_dump_json(), **where})
    with Ranks(2) as ranks:
        results, repeated = ranks.run(
            ON_RANKS, "compare_with_one_process", openings, STEPS, BATCH, str(tmp_path)
        )
    assert results == repeated
    for name, (difference, note) in zip(LAYOUTS, results, strict=True):
        assert difference < 1e-5, name
        assert note == "", name


def test_it_learns_what_the_next_byte_is(folder):
    _, task = loaded(folder, "task.settings.lr=0.01")
    before, after = train(task, DATACENTER, epochs=2, batch_size=8)
    assert after["loss"] < 0.8 * before["loss"]


def test_held_out_sequences_are_not_trained_on(folder):
    _, task = loaded(folder)
    held_out = task.eval_data()
    trained = task.local_data(DATACENTER)
    assert len(held_out) == 4
    assert len(trained) == len(task.text) - 4
    line = torch.cat([inputs for inputs, _ in held_out] + [inputs for inputs, _ in trained])
    assert bytes(line[:30].tolist()) == b"Scene 0. To be, or not to be: "
    assert int((line == 256).sum()) == 39  # the last document ends after the last sequence


def test_a_tokenizer_of_the_folder_is_used(folder):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["<unk>", "<end>"])
    tokenizer.train([str(folder / "plays.txt")], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = ['task.settings.tokenizer="tokenizer.json"', 'task.settings.end="<end>"']
    _, task = loaded(folder, *named)
    first = task.text[0][0].tolist()
    assert tokenizer.decode(first).startswith("Scene 0 . To be , or not to be")
    (folder / "tokenizer.json").unlink()
    _, task = loaded(folder, *named)
    with pytest.raises(TaskError, match=r"there is no tokenizer file .*tokenizer\.json"):
        task.local_data(DATACENTER)
