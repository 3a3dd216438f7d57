"""Models that are filled from files: against `load_state_dict`, transformers and PEFT."""

import json
import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig

from isthmus.errors import JobError, UserError
from isthmus.start.files import StartFiles, digest_of_all
from isthmus.start.loading import ModelStart
from isthmus.start.plan import Exceptions

# What PEFT asks of a model is deprecated in transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
NUMBERS = torch.arange(8).view(2, 4)


class Wrapped(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder


@pytest.fixture
def llama(tmp_path):
    """A folder with a model of transformers, and a new model of the same configuration."""

    def llama(*, shards="1GB", dtype=torch.float32, **config):
        torch.manual_seed(1)
        saved = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, **config)).to(dtype)
        saved.save_pretrained(tmp_path / "llama", max_shard_size=shards)
        torch.manual_seed(2)
        return tmp_path / "llama", AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, **config))

    return llama


def equal_states(one, other):
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_sharded_folder_is_loaded_as_transformers_does(llama, dtype):
    folder, model = llama(shards="4KB", dtype=dtype)
    assert len(list(folder.glob("*.safetensors"))) > 2
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ModelStart(folder).fill(model)
    assert equal_states(model, expected)
    assert model(NUMBERS).logits.equal(expected(NUMBERS).logits)


def test_tied_weights_need_one_of_their_names(llama, tmp_path):
    folder, model = llama(tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    ModelStart(folder).fill(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert equal_states(model, AutoModelForCausalLM.from_pretrained(folder))

    both = load_file(folder / "model.safetensors")
    both["lm_head.weight"] = both["model.embed_tokens.weight"].clone()
    save_file(both, tmp_path / "both.safetensors")
    _, model = llama(tie_word_embeddings=True)
    ModelStart(tmp_path / "both.safetensors").fill(model)
    assert equal_states(model, AutoModelForCausalLM.from_pretrained(folder))
    both["lm_head.weight"][3, 5] += 1
    save_file(both, tmp_path / "both.safetensors")
    sentence = "'model.embed_tokens.weight' and 'lm_head.weight' have other values, and are one"
    with pytest.raises(JobError, match=sentence):
        ModelStart(tmp_path / "both.safetensors").fill(model)


def test_a_wrapper_and_a_file_may_have_prefixes_that_the_other_has_not(llama):
    folder, model = llama()
    expected = AutoModelForCausalLM.from_pretrained(folder)
    wrapped = Wrapped(model)
    ModelStart(folder).fill(wrapped)
    assert equal_states(wrapped.decoder, expected)

    backbone = Wrapped(AutoModel.from_config(LlamaConfig(**SIZES)))
    with pytest.raises(JobError, match=r"1 tensors in it are not in the model \(lm_head.weight\)"):
        ModelStart(folder).fill(backbone)
    ModelStart(folder, exceptions=Exceptions(unused=["lm_head.*"])).fill(backbone)
    assert equal_states(backbone.decoder, expected.model)


def test_a_new_head_has_the_values_of_the_seed_if_the_job_says_so(llama, tmp_path):
    folder, model = llama()
    backbone = AutoModel.from_pretrained(folder)
    backbone.save_pretrained(tmp_path / "backbone")
    head = model.lm_head.weight.clone()
    sentence = (
        r"^model.start: .*backbone: 1 tensors of the model are not in it \(lm_head.weight\); .*"
        "list in model.fresh"
    )
    with pytest.raises(JobError, match=sentence):
        ModelStart(tmp_path / "backbone").fill(model)
    ModelStart(tmp_path / "backbone", exceptions=Exceptions(fresh=["lm_head.*"])).fill(model)
    assert model.lm_head.weight.equal(head)
    assert equal_states(model.model, backbone)


def test_missing_and_unexpected_tensors_are_both_named(tmp_path):
    save_file({"c": torch.zeros(2), "d": torch.zeros(2)}, tmp_path / "model.safetensors")
    model = nn.ParameterDict({"a": torch.ones(2), "c": torch.ones(2)})
    plan = ModelStart(tmp_path).compare(model).plan
    assert plan.missing == ("a",)
    assert plan.unexpected == ("d",)
    with pytest.raises(JobError) as refused:
        ModelStart(tmp_path).fill(model)
    assert "1 tensors of the model are not in it (a)" in str(refused.value)
    assert "1 tensors in it are not in the model (d)" in str(refused.value)
    ModelStart(tmp_path, exceptions=Exceptions(["a"], ["d"])).fill(model)
    assert [model["a"].tolist(), model["c"].tolist()] == [[1, 1], [0, 0]]


def test_the_task_may_name_the_tensors(tmp_path):
    save_file({"x": torch.zeros(2), "y": torch.full((2,), 7.0)}, tmp_path / "model.safetensors")
    model = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})
    ModelStart(tmp_path).fill(model, {"a": "y", "b": "x"})
    assert [model["a"].tolist(), model["b"].tolist()] == [[7, 7], [0, 0]]
    ModelStart(tmp_path, exceptions=Exceptions(unused=["y"])).fill(model, {"a": "x", "b": "x"})
    assert [model["a"].tolist(), model["b"].tolist()] == [[0, 0], [0, 0]]
    with pytest.raises(JobError, match=r"names 'z', which the model does not have"):
        ModelStart(tmp_path).fill(model, {"z": "y"})
    with pytest.raises(JobError, match=r"says that 'a' is 'q' there, and no file has it"):
        ModelStart(tmp_path).fill(model, {"a": "q"})
    with pytest.raises(JobError, match=r"1 tensors of the model are not in it \(b\)"):
        ModelStart(tmp_path).fill(model, {"a": "y"})


def test_names_that_fit_in_two_ways_are_refused(tmp_path):
    save_file({"net.w": torch.zeros(2)}, tmp_path / "model.safetensors")
    towers = nn.ModuleDict(
        {name: nn.ModuleDict({"net": nn.ParameterDict({"w": torch.ones(2)})}) for name in "ab"}
    )
    with pytest.raises(JobError, match=r"fit in two ways \('a.' for '' or 'b.' for ''\); have the"):
        ModelStart(tmp_path).fill(towers)


def test_buffers_are_loaded_if_they_are_stored(tmp_path):
    saved = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    saved(torch.randn(9, 3))
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.register_buffer("cache", torch.ones(5), persistent=False)
    ModelStart(tmp_path).fill(model)
    assert model[1].num_batches_tracked == 1
    assert equal_states(saved, model)
    assert model.cache.tolist() == [1] * 5


def test_a_model_in_another_order_of_memory_is_filled(tmp_path):
    saved = nn.Conv2d(3, 4, 2)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    assert not model.weight.is_contiguous()
    ModelStart(tmp_path).fill(model)
    assert equal_states(saved, model)


def test_other_shapes_and_types_are_refused(tmp_path):
    save_file(
        {"weight": torch.zeros(3, 3), "bias": torch.zeros(3, dtype=torch.int64)},
        tmp_path / "model.safetensors",
    )
    sentence = r"'weight' has the shape \(3, 3\), and 'weight' of the model has \(3, 2\); build"
    with pytest.raises(JobError, match=sentence):
        ModelStart(tmp_path).fill(nn.Linear(2, 3))
    with pytest.raises(
        JobError, match=r"'bias' is of type I64, and 'bias' of the model is torch.fl"
    ):
        ModelStart(tmp_path).fill(nn.Linear(3, 3))


def test_no_value_is_rounded(tmp_path):
    path = tmp_path / "model.safetensors"
    model = nn.Linear(2, 2, bias=False)
    save_file({"weight": torch.tensor([[1, 2], [3, 0.1]], dtype=torch.float64)}, path)
    with pytest.raises(
        JobError, match=r"'weight' is F64 and would be rounded to the torch.float32"
    ):
        ModelStart(path).fill(model)
    save_file({"weight": torch.tensor([[1, 2], [torch.nan, 0.5]], dtype=torch.float64)}, path)
    ModelStart(path).fill(model)
    assert model.weight.nan_to_num(7).tolist() == [[1, 2], [7, 0.5]]
    save_file({"weight": torch.full((2, 2), 1 + 2**-10)}, path)
    with pytest.raises(
        JobError, match=r"'weight' is F32 and would be rounded to the torch.bfloat16"
    ):
        ModelStart(path).fill(model.to(torch.bfloat16))
    save_file({"weight": torch.full((2, 2), 300.0, dtype=torch.bfloat16)}, path)
    ModelStart(path).fill(model.to(torch.float16))
    save_file({"weight": torch.full((2, 2), 1e30, dtype=torch.bfloat16)}, path)
    with pytest.raises(
        JobError, match=r"'weight' is BF16 and would be rounded to the torch.float16"
    ):
        ModelStart(path).fill(model)


def test_half_precision_where_the_configuration_promises_float32_is_refused(llama):
    folder, model = llama(dtype=torch.float16)
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float16"
    ModelStart(folder).fill(model)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    with pytest.raises(
        JobError, match=r"in half precision \(F16\), and its config.json promises float32"
    ):
        ModelStart(folder).fill(model)


def test_what_was_loaded_has_the_digest_or_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}, path)
    digest = StartFiles.find(path).digest()
    ModelStart(path, digest).fill(nn.Linear(2, 3))
    # A bit that no value of the model is affected by counts as well.
    save_file({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}, path, metadata={"a": "b"})
    found = StartFiles.find(path).digest()
    sentence = f"has the digest {found} here, and the job is for {digest}; the files have changed"
    with pytest.raises(JobError, match=sentence):
        ModelStart(path, digest).fill(nn.Linear(2, 3))


def test_a_pattern_that_matches_nothing_is_refused(tmp_path):
    save_file(nn.Linear(2, 3).state_dict(), tmp_path / "model.safetensors")
    for key, where in (("fresh", "the model"), ("unused", "the files")):
        sentence = f"model.{key}: 'head.*' matches no tensor of {where}; there are"
        with pytest.raises(JobError, match=sentence.replace("*", "\\*")):
            ModelStart(tmp_path, exceptions=Exceptions(**{key: ["head.*"]})).fill(nn.Linear(2, 3))


def adapted(folder, tmp_path, **config):
    """An adapter over a folder, with values of its own."""
    torch.manual_seed(3)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        LoraConfig(r=3, lora_alpha=7, init_lora_weights=False, **config),
    )
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    return tmp_path / "adapter"


def test_a_model_of_peft_is_filled_from_the_model_under_it(llama):
    folder, model = llama()
    expected = AutoModelForCausalLM.from_pretrained(folder)
    wrapped = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    ModelStart(folder, exceptions=Exceptions(fresh=["*lora_*"])).fill(wrapped)
    assert wrapped(NUMBERS).logits.equal(expected(NUMBERS).logits)


def test_a_model_of_peft_is_filled_from_an_adapter(llama, tmp_path):
    folder, _ = llama()
    adapter = adapted(folder, tmp_path, target_modules=["q_proj", "down_proj", "embed_tokens"])
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "down_proj", "embed_tokens"])
    for name in ("default", "mine"):
        wrapped = get_peft_model(
            AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)), config, adapter_name=name
        )
        ModelStart(adapter, base=folder).fill(wrapped)
        assert wrapped(NUMBERS).logits.equal(expected(NUMBERS).logits)
    config.lora_alpha = 8
    other = get_peft_model(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)), config)
    with pytest.raises(JobError, match=r"has lora_alpha=7, and the model is built with 8; b"):
        ModelStart(adapter, base=folder).fill(other)
    # It acts on tokens from an invocation on, with tensors of the same names and shapes.
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"alora_invocation_tokens": [3]}))
    with pytest.raises(JobError, match=r"alora_invocation_tokens=\[3\], and the model is built "):
        ModelStart(adapter, base=folder).fill(wrapped)


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_merged_into_a_plain_model_as_peft_merges_it(llama, tmp_path, rslora):
    folder, model = llama()
    targets = ["q_proj", "down_proj", "embed_tokens"]
    adapter = adapted(folder, tmp_path, target_modules=targets, use_rslora=rslora)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    expected = loaded.merge_and_unload()
    start = ModelStart(adapter, digest_of_all(StartFiles.find_all(adapter, folder)), folder)
    start.fill(model)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=1e-7)
    torch.testing.assert_close(model(NUMBERS).logits, expected(NUMBERS).logits)
    # The weights are scaled by what the configuration says, so it is part of the digest.
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 8}))
    with pytest.raises(JobError, match="has the digest"):
        start.fill(model)


SQUARE = {"n_embd": 16, "n_inner": 16, "n_layer": 2, "n_head": 2, "vocab_size": 16}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")
@pytest.mark.parametrize("says", ["as PEFT wrote it", False, True])
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("gpt2", ["c_proj", "lm_head"]),  # transposed weights, and after them one that is not
        ("gpt2", ["c_proj", "wte"]),
        ("llama", ["q_proj", "down_proj"]),
    ],
)
def test_square_matrices_are_merged_in_the_layout_of_their_layer(tmp_path, kind, targets, says):
    """The configuration has one setting for all of them, which PEFT corrects for each layer."""
    sizes = SQUARE if kind == "gpt2" else {**SIZES, "intermediate_size": 16}
    config = AutoConfig.for_model(kind, tie_word_embeddings=False, **sizes)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    adapter = adapted(tmp_path / "base", tmp_path, target_modules=targets)
    path = adapter / "adapter_config.json"
    if says in (False, True):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"fan_in_fan_out": says}))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    model = AutoModelForCausalLM.from_config(config)
    ModelStart(adapter, base=tmp_path / "base").fill(model)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=1e-7)


def test_the_digest_is_of_the_configuration_that_scales_the_adapter(llama, tmp_path):
    folder, model = llama()
    path = adapted(folder, tmp_path, target_modules=["q_proj"])
    digest = digest_of_all(StartFiles.find_all(path, folder))
    file = path / "adapter_config.json"
    config = file.read_text()
    file.write_text(config.replace('"lora_alpha": 7', '"lora_alpha": 70'))
    compared = ModelStart(path, base=folder).compare(model)
    file.write_text(config)  # before the digest is computed
    assert compared.merged
    assert digest_of_all(compared.files) != digest


def test_other_adapters_are_refused(llama, tmp_path):
    folder, model = llama()
    adapter = adapted(folder, tmp_path, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(JobError, match=r"has use_dora, and only plain LoRA is merged; have model"):
        ModelStart(adapter, base=folder).fill(model)
    with pytest.raises(JobError, match=r"is an adapter of PEFT; set model.base to the folder"):
        ModelStart(adapter).fill(model)
    with pytest.raises(JobError, match=r"is no adapter of PEFT; remove model.base"):
        ModelStart(folder, base=folder).fill(model)
    with pytest.raises(UserError, match="is an adapter too; name the model under it"):
        StartFiles.find_all(adapter, adapter)
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text()) | {"use_dora": False}
    path.write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
    with pytest.raises(JobError, match="has init_lora_weights='pissa', and only plain LoRA"):
        ModelStart(adapter, base=folder).fill(model)
    for alpha in (None, "7", math.nan, -math.inf, 10**400):
        path.write_text(json.dumps(config | {"lora_alpha": alpha}))
        with pytest.raises(JobError, match="has lora_alpha, which has to be a number, and only"):
            ModelStart(adapter, base=folder).fill(model)
    # Tokens before the invocation are those of the model without its adapter; and what is unknown.
    for changed in ("alora_invocation_tokens", "kasa_config", "setting_of_tomorrow"):
        path.write_text(json.dumps(config | {changed: [1]}))
        with pytest.raises(JobError, match=f"has {changed}, and only plain LoRA is merged; have"):
            ModelStart(adapter, base=folder).fill(model)
    path.write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(UserError, match=r"is an adapter of PEFT; name its folder, where ad"):
        StartFiles.find(adapter / "adapter_model.safetensors")
    with pytest.raises(JobError, match="has peft_type=IA3, and only plain LoRA is merged"):
        ModelStart(adapter, base=folder).fill(model)


@pytest.mark.parametrize("way", ["pissa", "olora"])
def test_adapters_that_are_computed_from_the_weights_under_them_are_refused(llama, way):
    """`model()` computes them from the seed's values, and PEFT over a loaded model from others."""
    folder, model = llama()
    config = LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=way)
    wrapped = get_peft_model(model, config)
    said = f"init_lora_weights='{way}' computes an adapter from the weights under it"
    with pytest.raises(JobError, match=said):
        ModelStart(folder, exceptions=Exceptions(fresh=["*lora_*"])).fill(wrapped)


def test_an_adapter_that_has_changed_the_weights_under_it_is_refused(llama, tmp_path):
    folder, model = llama()
    adapter = adapted(folder, tmp_path, target_modules=["q_proj"])
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": "pissa"}))
    wrapped = get_peft_model(model, LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj"]))
    with pytest.raises(JobError, match="init_lora_weights='pissa' computes an adapter"):
        ModelStart(adapter, base=folder).fill(wrapped)


def test_the_lengths_of_dora_come_from_an_adapter_or_are_refused(llama, tmp_path):
    folder, model = llama()
    targets = ["q_proj", "down_proj"]
    adapter = adapted(folder, tmp_path, target_modules=targets, use_dora=True)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=targets, use_dora=True)
    wrapped = get_peft_model(model, config)
    with pytest.raises(JobError, match=r"lora_magnitude_vector.*begins with values of the weights"):
        ModelStart(folder, exceptions=Exceptions(fresh=["*lora_*"])).fill(wrapped)
    ModelStart(adapter, base=folder).fill(wrapped)
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    assert wrapped(NUMBERS).logits.equal(expected(NUMBERS).logits)


@pytest.mark.parametrize("start", ["base", "adapter"])
def test_whole_layers_of_an_adapter_begin_as_with_peft(llama, tmp_path, start):
    """PEFT trains a copy of them, which begins with the layer's values or has the adapter's."""
    folder, model = llama()
    options = {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]}
    config = LoraConfig(r=3, lora_alpha=7, **options)
    wrapped = get_peft_model(model, config)
    with torch.no_grad():
        for name, each in wrapped.named_parameters():
            if "norm" in name:  # as after a training: all are ones before
                each.fill_(9.0)
    if start == "base":
        ModelStart(folder, exceptions=Exceptions(fresh=["*lora_*"])).fill(wrapped)
        expected = AutoModelForCausalLM.from_pretrained(folder)
    else:
        torch.manual_seed(3)
        trained = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
        with torch.no_grad():
            for each in trained.parameters():
                if each.requires_grad:
                    each.add_(torch.randn(each.shape) / 4)
        trained.save_pretrained(tmp_path / "adapter")
        ModelStart(tmp_path / "adapter", base=folder).fill(wrapped)
        expected = trained
    assert wrapped(NUMBERS).logits.equal(expected(NUMBERS).logits)
    untouched = AutoModelForCausalLM.from_pretrained(folder).lm_head.weight
    assert wrapped.base_model.model.lm_head.original_module.weight.equal(untouched)


def test_a_file_with_all_tensors_of_a_model_with_adapters_is_loaded(llama, tmp_path):
    """Such as that of a run, whose names are those of the model and not of an adapter's file."""
    _, model = llama()
    config = LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["norm"], use_dora=True)
    saved = get_peft_model(model, config)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    torch.manual_seed(4)
    other = get_peft_model(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)), config)
    assert not equal_states(saved, other)
    ModelStart(tmp_path / "model.safetensors").fill(other)
    assert equal_states(saved, other)


def test_the_files_of_one_adapter_are_not_loaded_into_two(llama, tmp_path):
    """They do not say which of a model's adapters they are of."""
    folder, plain = llama()
    adapter = adapted(folder, tmp_path, target_modules=["q_proj"])
    lora = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj"]}
    model = get_peft_model(plain, LoraConfig(**lora))
    model.add_adapter("second", LoraConfig(**lora))
    with pytest.raises(JobError, match=r"in it fits '.*lora_A.default.weight' and '.*second"):
        ModelStart(adapter, base=folder).fill(model)
    fresh = Exceptions(fresh=["*.second.weight"])
    before = {name: each.clone() for name, each in model.state_dict().items() if "second" in name}
    ModelStart(adapter, base=folder, exceptions=fresh).fill(model)
    found = model.state_dict()
    assert all(found[name].equal(each) for name, each in before.items())
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    assert model(NUMBERS).logits.equal(expected(NUMBERS).logits)


def test_an_adapter_of_no_rank_is_refused(llama, tmp_path):
    folder, model = llama()
    adapter = adapted(folder, tmp_path, target_modules=["q_proj"])
    file = adapter / "adapter_model.safetensors"
    empty = {
        name: each[:0] if "lora_A" in name else each[:, :0].contiguous()
        for name, each in load_file(file).items()
    }
    save_file(empty, file)
    with pytest.raises(JobError, match=r"that are not two matrices: \(0, \d+\) and \(\d+, 0\)"):
        ModelStart(adapter, base=folder).fill(model)


def test_an_adapter_of_one_of_two_tied_weights_is_not_merged(llama, tmp_path):
    folder, model = llama(tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        adapter = adapted(folder, tmp_path, target_modules=["embed_tokens"])
    with pytest.raises(JobError, match=r"lm_head.weight are one tensor in the model; have model"):
        ModelStart(adapter, base=folder).fill(model)


def test_an_adapter_of_another_model_is_refused(llama, tmp_path):
    folder, _ = llama()
    adapter = adapted(folder, tmp_path, target_modules=["q_proj"])
    other = nn.ModuleDict({"layer": nn.Linear(2, 3)})
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(
        JobError, match=r"which .*other.safetensors does not have; it is for another"
    ):
        ModelStart(adapter, base=tmp_path / "other.safetensors").fill(other)


CONVERTED = {
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "num_key_value_heads": 2},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8},
}


@pytest.mark.parametrize("kind", CONVERTED)
def test_tensors_that_transformers_renames_and_joins_are_loaded_by_it(tmp_path, kind):
    config = AutoConfig.for_model(kind, **SIZES, **CONVERTED[kind])
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "a")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    model = Wrapped(AutoModelForCausalLM.from_config(config))
    stored = set(load_file(tmp_path / "a/model.safetensors"))
    assert stored - set(model.decoder.state_dict())
    state = torch.random.get_rng_state()
    ModelStart(tmp_path / "a", StartFiles.find(tmp_path / "a").digest()).fill(model)
    assert torch.random.get_rng_state().equal(state)
    assert equal_states(model.decoder, expected)
    with pytest.raises(JobError, match="has the digest"):
        ModelStart(tmp_path / "a", "0" * 64).fill(model)


def test_what_transformers_does_not_know_is_refused(tmp_path):
    config = AutoConfig.for_model("gpt_neox", **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "a")
    path = tmp_path / "a/model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "more": torch.zeros(2)}, path, metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(JobError, match=r"1 tensors in it are not in the model \(more\)"):
        ModelStart(tmp_path / "a").fill(model)
    ModelStart(tmp_path / "a", exceptions=Exceptions(unused=["more"])).fill(model)
    del tensors["gpt_neox.layers.0.mlp.dense_h_to_4h.bias"]
    save_file({**tensors}, path, metadata={"format": "pt"})
    with pytest.raises(JobError, match=r"not in it \(gpt_neox.layers.0.mlp.dense_h_to_4h.bias\)"):
        ModelStart(tmp_path / "a").fill(model)
