"""Devices hold frozen parameters in bfloat16, as a plain loop over such a model would."""

import logging
import re
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tests.clients.training.conftest import train
from tests.clients.training.started_runs import opening_of
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from isthmus.errors import JobError, TaskError
from isthmus.job import parse_job
from isthmus.start.manifest import StartPlace
from isthmus.task import Participant
from isthmus_clients.training.local_run import DeviceRun

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SIZES = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
}
LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
TASK = f"""
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
import isthmus

class Adapters(isthmus.Task):
    def model(self):
        config = LlamaConfig(**{SIZES!r})
        decoder = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return get_peft_model(decoder, LoraConfig(**{LORA!r}))

    def forward(self, model, tokens):
        return model(input_ids=tokens, use_cache=False).logits

    def loss(self, output, target):
        return nn.functional.cross_entropy(
            output.float().transpose(1, 2), target, reduction="none"
        ).mean(1)

    def local_data(self, participant):
        rows = torch.randint(0, 16, (8, 7), generator=torch.Generator().manual_seed(3))
        return [(row[:-1], row[1:]) for row in rows]

    def eval_data(self):
        return self.local_data(None)

    def optimizer(self, parameters, participant):
        return torch.optim.SGD(parameters, lr=0.5)
"""
JOB = """
name = "small"
[task]
source = "task.py:Adapters"
[model]
start = "base"
fresh = ["*lora_*"]
[federated]
secure_aggregation = false
batch_size = 8
local_steps = 1
frozen_dtype = "bfloat16"
"""


@pytest.fixture
def opening(tmp_path):
    """What a server, which has the base in float32, sends to open a run; and its model."""

    def opening(*overrides, task=TASK, weights=None, config=None):
        (tmp_path / "task.py").write_text(task)
        torch.manual_seed(5)
        config = config or LlamaConfig(**SIZES)
        base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        base.save_pretrained(tmp_path / "base")
        if weights is not None:
            save_file(weights, tmp_path / "base.safetensors")
            overrides = ("model.start='base.safetensors'", *overrides)
        (tmp_path / "job.toml").write_text(JOB)
        work, model, division = opening_of(tmp_path, *overrides)
        return work, division.exchanged.gather(model)

    return opening


def opened(work, start=None):
    return DeviceRun(work, Participant(name="a", regime="federated"), None, start=start)


def in_bfloat16(folder):
    """The model of the task by transformers and PEFT themselves, with a base in bfloat16."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return get_peft_model(base, LoraConfig(**LORA))


def in_order(run, round_=1):
    """The batches of a round, as this device goes through them."""
    steps = run.data.steps(run.seed_of(round_), round_, run.job.federated)
    return [part.batch for step in steps for part in step]


def movement(run, start, reference, batches, optimizer=torch.optim.SGD, lr=0.5):
    """What a plain loop over a model changes, from the model of a round."""
    run.layout.scatter(start, reference)
    reference.train()
    made = optimizer([each for each in reference.parameters() if each.requires_grad], lr=lr)
    for inputs, target in batches:
        made.zero_grad()
        run.task.loss(run.task.forward(reference, inputs), target).mean().backward()
        made.step()
    return start - run.layout.gather(reference)


def distance(one, other):
    """How far two movements are apart, as a share of the second one."""
    return float((one - other).norm() / other.norm())


def test_a_device_holds_what_transformers_and_peft_hold(opening, tmp_path):
    work, _ = opening()
    held = dict(opened(work).model.named_parameters())
    for name, parameter in in_bfloat16(tmp_path / "base").named_parameters():
        assert held[name].dtype == parameter.dtype
        if not parameter.requires_grad:
            assert held[name].equal(parameter)
    assert {each.dtype for each in held.values() if each.requires_grad} == {torch.float32}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_steps_are_those_of_transformers_and_peft_with_a_base_in_bfloat16(
    opening, tmp_path, optimizer
):
    work, start = opening(
        "federated.batch_size=4",
        "federated.local_steps=5",
        task=TASK.replace("torch.optim.SGD", f"torch.optim.{optimizer}"),
    )
    run = opened(work)
    update, _, _ = train(run, start=start.clone())
    reference = in_bfloat16(tmp_path / "base")
    made = getattr(torch.optim, optimizer)
    expected = movement(run, start, reference, in_order(run), made)
    assert expected.abs().max() > 1e-3
    assert distance(update, expected) < 1e-6  # the same bits, where this was written


def test_a_step_does_not_depend_on_the_order_within_its_batch(opening, tmp_path):
    """Sums are rounded otherwise, by what float32 has."""
    work, start = opening()
    run = opened(work)
    update, _, _ = train(run, start=start.clone())
    rows = [torch.stack(each) for each in zip(*run.task.local_data(None), strict=True)]
    assert not rows[0].equal(in_order(run)[0][0])
    expected = movement(run, start, in_bfloat16(tmp_path / "base"), [rows])
    assert distance(update, expected) < 1e-5


WORDS = {"vocab_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
INNER = {"intermediate_size": 48}
NO_DROPOUT = {
    "GPT2Config": {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "BertConfig": {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    "MixtralConfig": {},
}
OTHERS = {
    # Its matrices are those of Conv1D, and the embedding is its last layer.
    "GPT2Config": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    # It asks for its own type.
    "BertConfig": {**LAYERS, **INNER, "is_decoder": True},
    # Its files have a tensor for each expert, and the model one for all.
    "MixtralConfig": {**LAYERS, **INNER, "num_key_value_heads": 4, "num_local_experts": 4},
}
ADAPTED = {
    "GPT2Config": {**LORA, "fan_in_fan_out": True},
    "BertConfig": LORA,
    "MixtralConfig": {**LORA, "target_modules": ["q_proj"]},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_of_transformers_are_right_or_refused(opening, tmp_path, kind):
    sizes = {**WORDS, **OTHERS[kind], **NO_DROPOUT[kind]}
    task = TASK.replace("import isthmus\n", f"from transformers import {kind}\nimport isthmus\n")
    task = task.replace(f"LlamaConfig(**{SIZES!r})", f"{kind}(**{sizes!r})")
    task = task.replace(f"{LORA!r}", f"{ADAPTED[kind]!r}")
    work, start = opening(task=task, config=getattr(transformers, kind)(**sizes))
    if kind == "MixtralConfig":
        said = r"as they are in the files of model\.start: .* tensors of the model are not in it"
        with pytest.raises(JobError, match=said):
            opened(work)
        return
    run = opened(work)
    update, _, _ = train(run, start=start.clone())
    models = [
        get_peft_model(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype),
            LoraConfig(**ADAPTED[kind]),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]
    run.layout.scatter(start, models[0].eval())
    [(inputs, target)] = in_order(run)
    with torch.no_grad():
        full = run.task.loss(run.task.forward(models[0], inputs), target).mean()
    assert run.difference.full == pytest.approx(float(full), rel=1e-6)
    expected = movement(run, start, models[1], in_order(run))
    assert expected.abs().max() > 1e-3
    assert distance(update, expected) < 1e-6


DORA = {**LORA, "target_modules": ["q_proj", "down_proj"], "use_dora": True}


@pytest.mark.parametrize("choice", ["bfloat16", "int8"])
def test_adapters_with_lengths_read_the_values_of_the_weights_under_them(opening, tmp_path, choice):
    """PEFT computes them, of DoRA, from the weight itself, and not by calling its layer."""
    opening()
    torch.manual_seed(7)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    get_peft_model(base, LoraConfig(**DORA)).save_pretrained(tmp_path / "adapter")
    folders = ("model.start='adapter'", "model.base='base'", "model.fresh=[]")
    task = TASK.replace(f"{LORA!r}", f"{DORA!r}")
    work, start = opening(*folders, f"federated.frozen_dtype='{choice}'", task=task)
    run = opened(work)
    update, _, _ = train(run, start=start.clone())
    dtype = torch.float32 if choice == "int8" else torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    reference = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    expected = movement(run, start, reference, in_order(run))
    assert expected.abs().max() > 1e-3
    assert distance(update, expected) < (0.05 if choice == "int8" else 1e-6)


def test_the_loss_in_float32_is_that_of_the_whole_model(opening, tmp_path, caplog):
    work, start = opening()
    run = opened(work)
    before = {name: each.clone() for name, each in run.model.named_parameters()}
    with caplog.at_level(logging.INFO):
        train(run, start=start.clone())
    small = run.difference.small
    full = run.difference.full
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    expected = []
    for base in (in_bfloat16(tmp_path / "base"), get_peft_model(whole, LoraConfig(**LORA))):
        run.layout.scatter(start, base)
        rows = run.task.local_data(None)
        inputs = torch.stack([row[0] for row in rows])
        target = torch.stack([row[1] for row in rows])
        with torch.no_grad():
            output = run.task.forward(base.eval(), inputs)
            expected.append(float(run.task.loss(output, target).mean()))
    assert (small, full) == pytest.approx(tuple(expected), rel=1e-6)
    assert small != full
    assert "the frozen parameters are in bfloat16: the loss of the first batch is" in caplog.text
    for name, each in run.model.named_parameters():
        assert each.requires_grad or each.equal(before[name])


def test_a_base_that_is_too_different_is_not_trained(opening):
    for secure in ("false", "true"):
        work, start = opening(
            "federated.frozen_tolerance=0", f"federated.secure_aggregation={secure}"
        )
        run = opened(work)
        said = r"in the smaller type and .* in float32, a difference of .* allows 0\.00%"
        for _ in range(2):
            with pytest.raises(TaskError, match=said):
                train(run, start=start.clone())


def test_a_file_in_bfloat16_is_mapped_and_never_in_memory(opening, tmp_path):
    opening()
    stored = load_file(tmp_path / "base/model.safetensors")
    work, start = opening(weights={name: each.bfloat16() for name, each in stored.items()})
    path = tmp_path / "base.safetensors"
    run = opened(work, StartPlace(path, None, (path,), mapped=True))
    train(run, start=start.clone())
    sections = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    lines = [line for each in sections if str(path) in each for line in each.splitlines()]
    own = sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    shared = sum(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
    assert (own, shared > 0) == (0, True)


def test_other_frozen_values_than_the_servers_are_still_refused(opening):
    work, _ = opening()
    name = next(each for each in work.frozen if "norm" in each)
    work.frozen[name].values[0] += 0.05
    with pytest.raises(TaskError, match="has other values here than there"):
        opened(work)


def test_a_frozen_parameter_that_no_file_has_is_refused(opening, tmp_path):
    opening()
    weights = load_file(tmp_path / "base/model.safetensors")
    del weights["model.norm.weight"]
    work, _ = opening("model.fresh=['*lora_*', '*.model.norm.weight']", weights=weights)
    with pytest.raises(JobError, match=r"model\.norm\.weight' is frozen and not in the files"):
        opened(work)


def test_a_model_that_refuses_mixed_types_is_one_sentence(opening):
    head = """
    def model(self):
        return nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))

    def forward(self, model, tokens):
        return model(tokens[:, :4].float())

    def loss(self, output, target):
        return output.square().mean(1)
"""
    task = TASK.replace("    def local_data", f"{head}\n    def local_data")
    weights = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).state_dict()
    work, start = opening("model.fresh=[]", task=task, weights=weights)
    run = opened(work)
    said = "cannot be computed with its frozen parameters in bfloat16 and the others in float32"
    with pytest.raises(TaskError, match=said):
        train(run, start=start)


def test_jobs_that_cannot_have_it_are_refused():
    text = 'name = "a"\n[task]\nsource = "task.py:A"'
    with pytest.raises(JobError, match="read from files, and the job names none; set "):
        parse_job(text, ["federated.frozen_dtype='bfloat16'"])
    with pytest.raises(JobError, match=r"frozen_tolerance has no effect with .*'float32'"):
        parse_job(text, ["federated.frozen_tolerance=0.1"])
