"""The example trains adapters on answers as transformers and PEFT do by themselves."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from isthmus.job import load_job
from isthmus.task import load_task
from isthmus.task.scoring import build_start_model

from .conftest import DATACENTER, EXAMPLES

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

WORDS = ["<pad>", "<user>", "<bot>", "<end>", "plus", *map(str, range(10))]
TEMPLATE = (
    "{% for each in messages %}<{{ 'user' if each.role == 'user' else 'bot' }}> "
    "{{ each.content }} <end> {% endfor %}{% if add_generation_prompt %}<bot> {% endif %}"
)
LENGTH = 9


@pytest.fixture
def example(tmp_path):
    """A copy of the example with a small decoder as its base, and dialogues about sums."""
    example = tmp_path / "example"
    shutil.copytree(EXAMPLES / "finetune", example)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE)
    tokenizer.save_pretrained(example / "base")
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(example / "base")
    (example / "dialogues").mkdir()
    write(example, "train", [dialogue(a, b) for a in range(10) for b in range(8)])
    write(example, "held_out", [dialogue(a, 9) for a in range(10)])
    return example


def dialogue(a, b):
    return [
        {"role": "user", "content": f"{a} plus {b}"},
        {"role": "assistant", "content": str((a + b) % 10)},
    ]


def write(example, name, dialogues):
    lines = [json.dumps({"messages": each}) for each in dialogues]
    (example / f"dialogues/{name}.jsonl").write_text("\n".join(lines) + "\n")


def loaded(example, *overrides):
    job = load_job(example / "job.toml", [f"task.settings.length={LENGTH}", *overrides])
    task = load_task(job.task.source, job.task.settings, base=example, data=example / "dialogues")
    return job, task


def test_only_answers_are_learned(example):
    _, task = loaded(example)
    inputs, target = task.eval_data()[3]
    assert [WORDS[each] for each in inputs] == [
        "<user>",
        "3",
        "plus",
        "9",
        "<end>",
        "<bot>",
        "2",
        "<end>",
        "<pad>",
    ]
    assert target[5:7].tolist() == [WORDS.index("2"), WORDS.index("<end>")]
    assert (target[:5] == -100).all()
    assert (target[7:] == -100).all()


def test_a_dialogue_is_a_line_whatever_its_text_has(example):
    _, task = loaded(example)
    spaced = dialogue(3, 4)
    spaced[0]["content"] = "3 \u2028 plus \x85 4"  # ends of lines for str.splitlines()
    row = json.dumps({"messages": spaced}, ensure_ascii=False)
    path = example / "dialogues/held_out.jsonl"
    path.write_bytes(f"{row}\r\n\r\n{row}".encode())
    (first, _), (second, _) = task.eval_data()
    assert [WORDS[each] for each in first][:5] == ["<user>", "3", "plus", "4", "<end>"]
    assert first.equal(second)


def test_the_loss_is_that_of_transformers_with_labels(example):
    _, task = loaded(example)
    rows = task.local_data(DATACENTER)[:12]
    inputs = torch.stack([row[0] for row in rows])
    target = torch.stack([row[1] for row in rows])
    torch.manual_seed(2)
    model = task.model()
    values, scored = task.loss(model(inputs), target)
    expected = model.decoder(input_ids=inputs, shift_labels=target, labels=target).loss
    torch.testing.assert_close(values[scored].mean(), expected)


def test_a_run_trains_the_adapters_like_a_plain_loop_and_peft_loads_them(example):
    # Another optimizer than Adam, which makes rounding of gradients near zero as large as a step.
    (example / "plain.py").write_text(
        "import torch\n"
        "from task import Finetune\n"
        "class Plain(Finetune):\n"
        "    def optimizer(self, parameters, participant):\n"
        "        return torch.optim.SGD(parameters, lr=0.5)\n"
    )
    write(example, "train", [dialogue(a, b) for a in range(2) for b in range(4)])
    small = {
        "task.source": '"plain.py:Plain"',
        "task.settings.length": LENGTH,
        "rounds": 1,
        "datacenter.steps": 3,
        "datacenter.batch_size": 4,
        "datacenter.clip_norm": 1e9,
    }
    changes = [f"--set={key}={value}" for key, value in small.items()]
    run = example / "run"
    call("run", example / "job.toml", "--run-dir", run, *changes)
    call("export", run, "--format", "huggingface")

    job, task = loaded(example, *(change.removeprefix("--set=") for change in changes))
    model = build_start_model(task, job, example)
    # Each step has all eight dialogues, so that their order does not matter.
    inputs, target = (torch.stack(each) for each in zip(*task.local_data(DATACENTER), strict=True))
    before = model(inputs).detach()
    optimizer = task.optimizer([each for each in model.parameters() if each.requires_grad], None)
    for _ in range(3):
        optimizer.zero_grad()
        scores = model(inputs).flatten(end_dim=1)
        torch.nn.functional.cross_entropy(scores, target.flatten()).backward()
        optimizer.step()
    expected = model(inputs).detach()
    base = AutoModelForCausalLM.from_pretrained(example / "base", dtype=torch.float32)
    torch.testing.assert_close(before, base(input_ids=inputs).logits)
    found = PeftModel.from_pretrained(base, run / "huggingface")(input_ids=inputs).logits
    moved = (expected - before).abs().max()
    assert moved > 0.01
    assert (found - expected).abs().max() < 1e-4 * moved


def test_dialogues_that_do_not_fit_are_refused(example):
    _, task = loaded(example, "task.settings.length=6")
    with pytest.raises(ValueError, match=r"a dialogue has 8 tokens; raise task\.settings\.length"):
        task.eval_data()
    without = TEMPLATE.replace("<bot> {% endif %}", "<user> {% endif %}")
    (example / "base/chat_template.jinja").write_text(without)
    _, task = loaded(example)
    with pytest.raises(ValueError, match="has no generation prompt before its answers"):
        task.eval_data()


def call(*arguments):
    command = [sys.executable, "-m", "isthmus.cli", *map(str, arguments)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=55)
    assert ended.returncode == 0, ended.stderr
