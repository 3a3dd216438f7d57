"""Folders of Hugging Face: into a job and out again, against transformers and PEFT."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from isthmus.errors import UserError
from isthmus.job import load_job
from isthmus.start.files import StartFiles
from isthmus.start.loading import ModelStart
from isthmus.start.plan import Exceptions
from isthmus_server.cli.export import export
from isthmus_server.python.saved_model import load_model
from isthmus_server.read.export.hugging_face import export_folder
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.store import Store

pytestmark = [
    # What PEFT asks of a model is deprecated in transformers.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

SIZES = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FEW = {"num_key_value_heads": 2, "head_dim": 8}
TEXT = AutoModelForCausalLM
ARCHITECTURES = {
    "llama": (TEXT, {**SIZES, **FEW, "tie_word_embeddings": True}),
    "mistral": (TEXT, {**SIZES, **FEW}),
    "qwen2": (TEXT, {**SIZES, "num_key_value_heads": 2}),
    "qwen3": (TEXT, {**SIZES, **FEW}),
    "gemma2": (TEXT, {**SIZES, **FEW}),
    "phi3": (TEXT, SIZES),
    "gpt2": (TEXT, {"n_embd": 16, "n_layer": 2, "n_head": 2, **SIZES}),
    "gpt_neox": (TEXT, SIZES),
    "opt": (TEXT, {"ffn_dim": 24, "word_embed_proj_dim": 16, **SIZES}),
    "mixtral": (TEXT, {**SIZES, **FEW, "num_local_experts": 4}),
    "qwen3_moe": (
        TEXT,
        {**SIZES, **FEW, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    ),
    "bert": (AutoModelForSequenceClassification, SIZES),
    "vit": (AutoModelForImageClassification, {**SIZES, "image_size": 8, "patch_size": 4}),
    "t5": (AutoModelForSeq2SeqLM, {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, **SIZES}),
}


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def outputs(kind, model):
    """What a model computes, in float32."""
    model = model.float().eval()
    words = torch.arange(3, 11).view(2, 4)
    with torch.no_grad():
        if kind is AutoModelForImageClassification:
            return model(torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)).logits
        more = {"decoder_input_ids": words} if kind is AutoModelForSeq2SeqLM else {}
        return model(input_ids=words, **more).logits


@pytest.fixture
def job(tmp_path):
    """A job that starts from the folder `start`."""

    def job(*overrides, start="start"):
        text = f'name = "a"\n[task]\nsource = "task.py:Learn"\n[model]\nstart = "{start}"\n'
        (tmp_path / "job.toml").write_text(text)
        return load_job(tmp_path / "job.toml", overrides)

    return job


def saved(path, kind, name, settings, dtype=torch.bfloat16):
    """A folder with a model, and its configuration."""
    config = AutoConfig.for_model(name, **settings)
    torch.manual_seed(1)
    kind.from_config(config).to(dtype).save_pretrained(path, max_shard_size="4KB")
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    return config


def weights(folder):
    """All tensors of a folder by name."""
    return {
        name: each
        for file in folder.glob("*.safetensors")
        for name, each in load_file(file).items()
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_folder_comes_out_as_it_went_in_but_for_what_was_trained(tmp_path, job, name):
    kind, settings = ARCHITECTURES[name]
    config = saved(tmp_path / "start", kind, name, settings)
    original = weights(tmp_path / "start")
    model = Wrapped(kind.from_config(config, dtype=torch.float32))
    ModelStart(tmp_path / "start").fill(model)
    (tmp_path / "same").mkdir()
    export_folder(job(), tmp_path, model, tmp_path / "same", merged=False)
    written = weights(tmp_path / "same")
    assert written.keys() == original.keys()
    assert all(original[name].dtype == each.dtype for name, each in written.items())
    assert all(original[name].equal(each) for name, each in written.items())
    assert (tmp_path / "same/tokenizer.json").read_text() == '{"version": "1.0"}'
    again = kind.from_pretrained(tmp_path / "same")
    assert again.dtype == torch.bfloat16
    assert outputs(kind, again).equal(outputs(kind, kind.from_pretrained(tmp_path / "start")))

    trained = max(model.named_parameters(), key=lambda pair: pair[1].numel())[1]
    with torch.no_grad():
        trained.mul_(1.001)
    (tmp_path / "trained").mkdir()
    export_folder(job(), tmp_path, model, tmp_path / "trained", merged=False)
    again = kind.from_pretrained(tmp_path / "trained")
    assert again.dtype == torch.float32
    assert outputs(kind, again).equal(outputs(kind, model.inner))
    # A trained tensor that is joined in memory is several in the files.
    kept = [each for each in weights(tmp_path / "trained").values() if each.dtype != torch.float32]
    assert len(original) - 8 <= len(kept) < len(original)


ADAPTED = {
    "llama": ["q_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc"],  # of Conv1D, whose weights are transposed
    "phi3": ["qkv_proj", "gate_up_proj"],
    "qwen2": ["q_proj", "down_proj"],  # the first has a bias
}
"""Layers with adapters by architecture."""


def adapted(config, **more):
    torch.manual_seed(3)
    lora = {"r": 3, "lora_alpha": 7, "target_modules": ADAPTED[config.model_type], **more}
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(**lora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_is_written_for_peft_and_merged_for_transformers(tmp_path, job, name):
    config = saved(tmp_path / "start", *text_model(name), dtype=torch.float32)
    model = adapted(config)
    lora = Exceptions(fresh=["*lora_*"])
    ModelStart(tmp_path / "start", exceptions=lora).fill(model)
    made = job("model.fresh=['*lora_*']")
    for folder in ("adapter", "merged"):
        (tmp_path / folder).mkdir()
    export_folder(made, tmp_path, Wrapped(model), tmp_path / "adapter", merged=False)
    expected = outputs(TEXT, model)
    untrained = outputs(TEXT, TEXT.from_pretrained(tmp_path / "start"))
    assert (expected - untrained).abs().max() > 1e-2
    names = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    written = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "start"
    base = TEXT.from_pretrained(tmp_path / "start")
    assert outputs(TEXT, PeftModel.from_pretrained(base, tmp_path / "adapter")).equal(expected)

    export_folder(made, tmp_path, Wrapped(model), tmp_path / "merged", merged=True)
    torch.testing.assert_close(
        outputs(TEXT, TEXT.from_pretrained(tmp_path / "merged")), expected, rtol=1e-5, atol=1e-6
    )
    # And a job can begin with the adapter.
    plain = TEXT.from_config(config)
    ModelStart(tmp_path / "adapter", base=tmp_path / "start").fill(plain)
    torch.testing.assert_close(outputs(TEXT, plain), expected, rtol=1e-5, atol=1e-6)


def test_adapters_that_are_active_together_are_merged_together(tmp_path, job):
    config = saved(tmp_path / "start", *text_model("llama"), dtype=torch.float32)
    model = adapted(config)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    model.base_model.set_adapter(["default", "second"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.second" in name:
                parameter.normal_()
    expected = outputs(TEXT, model)
    (tmp_path / "merged").mkdir()
    made = job("model.fresh=['*lora_*']")
    export_folder(made, tmp_path, model, tmp_path / "merged", merged=True)
    found = outputs(TEXT, TEXT.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def of_job(tmp_path, job, settings, **more):
    """A model with an adapter over the folder of a job, and the job."""
    config = saved(tmp_path / "start", *text_model("llama"), dtype=torch.float32)
    torch.manual_seed(3)
    model = get_peft_model(TEXT.from_config(config), settings, **more)
    fresh = [name for name, each in model.named_parameters() if each.requires_grad]
    ModelStart(tmp_path / "start", exceptions=Exceptions(fresh=fresh)).fill(model)
    (tmp_path / "out").mkdir()
    return model, job(f"model.fresh={fresh}")


def test_an_adapter_of_another_name_is_written_for_peft(tmp_path, job):
    settings = LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    model, made = of_job(tmp_path, job, settings, adapter_name="ferry")
    export_folder(made, tmp_path, model, tmp_path / "out", merged=False)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = PeftModel.from_pretrained(TEXT.from_pretrained(tmp_path / "start"), tmp_path / "out")
    assert outputs(TEXT, loaded).equal(outputs(TEXT, model))


def test_scales_that_no_file_has_are_refused(tmp_path, job):
    settings = LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    model, made = of_job(tmp_path, job, settings)
    model.base_model.model.model.layers[1].self_attn.q_proj.set_scale("default", 3)
    sentence = r"layers\.1\.self_attn\.q_proj' has the scale .* use --format merged"
    with pytest.raises(UserError, match=sentence):
        export_folder(made, tmp_path, model, tmp_path / "out", merged=False)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "changes no weights"),
        (
            LoraConfig(lora_bias=True, target_modules=["q_proj"]),
            "cannot merge the adapter: Impossible to merge LoRA with `lora_bias=True`",
        ),
    ],
)
def test_what_cannot_be_merged_is_a_sentence(tmp_path, job, settings, sentence):
    model, made = of_job(tmp_path, job, settings)
    with pytest.raises(UserError, match=sentence):
        export_folder(made, tmp_path, model, tmp_path / "out", merged=True)


def text_model(name):
    kind, settings = ARCHITECTURES[name]
    return kind, name, settings


def test_what_a_folder_would_not_have_is_refused(tmp_path, job):
    config = saved(tmp_path / "start", *text_model("llama"), dtype=torch.float32)
    folder = tmp_path / "out"
    folder.mkdir()

    def refuse(sentence, model, made=None, merged=False):
        with pytest.raises(UserError, match=sentence):
            export_folder(made or job(), tmp_path, model, folder, merged=merged)

    refuse("has no part that is of transformers; use --format safetensors", nn.Linear(2, 3))
    plain = TEXT.from_config(config)
    refuse("has no adapter of PEFT to merge; use --format huggingface", plain, merged=True)
    more = Wrapped(plain)
    more.scale = nn.Parameter(torch.ones(2))
    refuse("'scale' is not a part of the model's LlamaForCausalLM, whose folder would", more)
    model = adapted(config)
    refuse(
        "has the values of the seed, which no file has; use --format merged", model, job("model={}")
    )
    file = min((tmp_path / "start").glob("*.safetensors")).name
    refuse(
        f"start/{file} is no folder of Hugging Face, from which PEFT could load the model under",
        model,
        job(start=f"start/{file}"),
    )
    several = adapted(config)
    several.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    refuse("the model has 2 adapters, and a folder has one; use one", several)
    model.base_model.model.model.norm.weight.requires_grad_(True)
    refuse(r"'base_model.model.model.norm.weight' is not a part of the adapter, and has", model)
    tied = get_peft_model(TEXT.from_config(config), LoraConfig(target_modules=["embed_tokens"]))
    refuse("are one tensor, and the adapter of one would be merged into both", tied, merged=True)


def test_a_folder_that_loads_as_another_model_is_refused(tmp_path, job):
    """A buffer that the class does not know is not loaded by `from_pretrained`."""
    config = saved(tmp_path / "start", *text_model("llama"), dtype=torch.float32)
    model = TEXT.from_config(config)
    model.register_buffer("more", torch.ones(2))
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"loads another model from the folder .*: 'more' differs"):
        export_folder(job(), tmp_path, model, tmp_path / "out", merged=False)


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path, job):
    config = saved(tmp_path / "start", *text_model("llama"), dtype=torch.float32)
    folder = tmp_path / "out"
    (folder / "model.safetensors").mkdir(parents=True)
    with pytest.raises(UserError, match=r"transformers cannot write the model: .*; use --format"):
        export_folder(job(), tmp_path, TEXT.from_config(config), folder, merged=False)


DECODER = """
    def model(self):
        from transformers import AutoModelForCausalLM, LlamaConfig
        config = LlamaConfig.from_dict(self.start_config)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def forward(self, model, inputs):
        return model(inputs, use_cache=False).logits

    def loss(self, output, target):
        return nn.functional.cross_entropy(output.transpose(1, 2), target, reduction="none")

    def metrics(self, output, target):
        return {}

    def local_data(self, participant):
        words = torch.arange(60).view(12, 5) % 13
        return TensorDataset(words[:, :-1], words[:, 1:])

    def eval_data(self):
        return self.local_data(None)
    """


def invoke(*arguments):
    result = CliRunner().invoke(export, [str(argument) for argument in arguments])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("frozen", [[], ["*embed_tokens*", "*layers.0.*"]])
async def test_a_trained_run_is_exported_as_a_folder_at_once(
    deployment, job, tmp_path, monkeypatch, frozen
):
    saved(tmp_path / "start", *text_model("llama"))
    await deployment.start(DECODER)
    federated = "federated={clients=3, cohort=3, quorum=3}"
    made = job(federated, "strategy.policy=federated", "rounds=1", f"exchange.exclude={frozen}")
    store = Store.create(tmp_path / "run", made, tmp_path)
    await Coordinator(RunParts.of(store, deployment.link)).run()

    original = weights(tmp_path / "start")
    (tmp_path / "run/.huggingface.part").mkdir()  # of an export that was killed
    (tmp_path / "run/.huggingface.part/model.safetensors").write_bytes(b"")
    output = invoke(store.directory, "--format", "huggingface")
    folder = store.directory / "huggingface"
    digest = StartFiles.find(folder).digest()
    assert output == f"model   {folder}\nsha256  {digest}\ncard    {folder}/MODEL_CARD.md\n"
    assert (
        f"| file | `huggingface` |\n| SHA-256 | `{digest}` |"
        in (folder / "MODEL_CARD.md").read_text()
    )
    assert {path.name for path in folder.iterdir()} >= {"config.json", "tokenizer.json"}
    assert outputs(TEXT, TEXT.from_pretrained(folder)).equal(
        outputs(TEXT, load_model(store.directory))
    )
    kept = {name for name, each in weights(folder).items() if each.dtype == torch.bfloat16}
    assert kept == {
        name for name in original if frozen and ("embed_tokens" in name or "layers.0." in name)
    }
    assert all(weights(folder)[name].equal(original[name]) for name in kept)
    with pytest.raises(UserError, match="has files already; remove it, or name another with"):
        invoke(store.directory, "--format", "huggingface")
    with pytest.raises(UserError, match="has no adapter of PEFT to merge"):
        invoke(store.directory, "--format", "merged")
    assert not list(store.directory.glob(".*"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UserError, match=r"^\. is the directory where this command runs, and would"):
        invoke(store.directory, "--format", "huggingface", "--output", ".")
    monkeypatch.chdir(tmp_path)
    invoke(store.directory, "--format", "huggingface", "--output", "link")
    assert StartFiles.find(tmp_path / "empty").digest() == digest

    shutil.rmtree(folder)
    first = min((tmp_path / "start").glob("*.safetensors"))
    save_file({"a": torch.zeros(2)}, first)
    with pytest.raises(UserError, match=r"model.safetensors.index.json says in"):
        invoke(store.directory, "--format", "huggingface")
