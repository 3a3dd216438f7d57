"""Small models of many kinds: own ones, and architectures of Hugging Face's transformers.

Each is built by name and takes a batch of tokens, (examples, TOKENS), or of pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WORDS = 96
TOKENS = 16
CLASSES = 8
PICTURE = 8
"""Height and width of a picture with three channels."""

Size = dict[str, Any]

_DECODER: Size = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_EXPERTS: Size = {**_DECODER, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

DECODERS: dict[str, tuple[str, Size]] = {
    "llama": ("llama", _DECODER),
    "llama-biases": ("llama", {**_DECODER, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {**_DECODER, "tie_word_embeddings": True}),
    "llama-one-group": ("llama", {**_DECODER, "num_key_value_heads": 1}),
    "mistral": ("mistral", {**_DECODER, "sliding_window": 8}),
    "qwen2": ("qwen2", _DECODER),
    "qwen3": ("qwen3", {**_DECODER, "head_dim": 8}),
    "gemma2": ("gemma2", {**_DECODER, "head_dim": 8, "final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", {**_DECODER, "head_dim": 8, "sliding_window": 8}),
    "exaone4": ("exaone4", {**_DECODER, "sliding_window": 8, "sliding_window_pattern": 2}),
    "olmo2": ("olmo2", _DECODER),
    "phi3": ("phi3", _DECODER),
    "phi": ("phi", {**_DECODER, "qk_layernorm": True}),
    "cohere": ("cohere", {**_DECODER, "use_qk_norm": True}),
    "stablelm": ("stablelm", {**_DECODER, "qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": ("starcoder2", _DECODER),
    "glm4": ("glm4", {**_DECODER, "head_dim": 8}),
    "opt": ("opt", {**_DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32}),
    "gpt_neox": ("gpt_neox", _DECODER),
    "gpt_neo": (
        "gpt_neo",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": 32,
        },
    ),
    "gptj": ("gptj", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "rotary_dim": 4}),
    "bloom": ("bloom", {"hidden_size": 32, "n_head": 4, "n_layer": 2}),
    "falcon": ("falcon", {**_DECODER, "multi_query": True}),
    "mixtral": ("mixtral", {**_EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "num_experts": 4, "head_dim": 8}),
    "olmoe": ("olmoe", {**_EXPERTS, "num_experts": 4}),
    "gpt_oss": ("gpt_oss", {**_EXPERTS, "num_local_experts": 4, "head_dim": 8}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
}
"""Name of the architecture, and its sizes."""


class Causal(nn.Module):
    """A decoder of transformers: a tensor of words in, a tensor of logits out."""

    def __init__(self, kind: str, size: Size) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        self.decoder = AutoModelForCausalLM.from_config(_config(AutoConfig, kind, size))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.decoder(words, use_cache=False).logits
        return output


class Masked(nn.Module):
    """BERT."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForMaskedLM

        size = {**_DECODER, "pad_token_id": 0}
        self.encoder = AutoModelForMaskedLM.from_config(_config(AutoConfig, "bert", size))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.encoder(words).logits
        return output


class Translation(nn.Module):
    """T5, from the words to the same words."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForSeq2SeqLM

        size = {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "pad_token_id": 0,
        }
        self.both = AutoModelForSeq2SeqLM.from_config(_config(AutoConfig, "t5", size))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.both(
            input_ids=words, decoder_input_ids=words, use_cache=False
        ).logits
        return output


class Vision(nn.Module):
    """ViT."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForImageClassification

        size = {**_DECODER, "image_size": PICTURE, "patch_size": 4, "num_labels": CLASSES}
        config = AutoConfig.for_model("vit", **size, **_no_dropout("vit"))
        self.encoder = AutoModelForImageClassification.from_config(config)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.encoder(pictures).logits
        return output


def _no_dropout(kind: str) -> Size:
    from transformers import AutoConfig

    names = AutoConfig.for_model(kind).to_dict()
    return {
        name: 0.0
        for name, value in names.items()
        if isinstance(value, float) and ("drop" in name) and value
    }


def _config(auto: Any, kind: str, size: Size) -> Any:
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return auto.for_model(kind, **{"vocab_size": WORDS, **special, **_no_dropout(kind), **size})


# -- own models -----------------------------------------------------------------------------------


class Perceptron(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self, width: int, between: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.act = between
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fc2(self.act(self.fc1(hidden)))
        return output


class Words(nn.Module):
    """Embedding, blocks and head."""

    def __init__(self, block: Callable[[], nn.Module], blocks: int = 2, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = block(hidden)
        output: torch.Tensor = self.head(hidden)
        return output


class Scale(nn.Module):
    """Multiplies by one learned number, of initially nothing."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.full((1,), start))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.by


class Gated(nn.Module):
    """A gate that is computed from whole activations multiplies sharded ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 1)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fc2(self.gate(hidden).sigmoid() * self.fc1(hidden).relu())
        return output


class Twice(nn.Module):
    """One scale for sharded and for whole activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Perceptron(width, Scale(0.7))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner.act(self.inner(hidden))
        return output


class LowRank(nn.Module):
    """A layer with a product of two small matrices added, the second of which begins as zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.down = nn.Linear(width, 3, bias=False)
        self.back = nn.Linear(3, 4 * width, bias=False)
        self.scale = Scale(1.0)
        self.fc2 = nn.Linear(4 * width, width)
        nn.init.zeros_(self.back.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        added = self.scale(self.back(self.down(hidden)))
        output: torch.Tensor = self.fc2((self.fc1(hidden)).relu()) + added.mean(-1, keepdim=True)
        return output


OWN: dict[str, Callable[[], nn.Module]] = {
    "gelu": lambda: Words(lambda: Perceptron(16, nn.GELU())),
    "prelu": lambda: Words(lambda: Perceptron(16, nn.PReLU())),
    "zero-scale": lambda: Words(lambda: Perceptron(16, Scale(0.0))),
    "gated": lambda: Words(lambda: Gated(16)),
    "twice": lambda: Words(lambda: Twice(16)),
    "low-rank": lambda: Words(lambda: LowRank(16)),
}


def build(name: str) -> nn.Module:
    """Build a model, with norms that are not all one."""
    if name in OWN:
        return OWN[name]()
    if name == "bert":
        model: nn.Module = Masked()
    elif name == "t5":
        model = Translation()
    elif name == "vit":
        model = Vision()
    else:
        model = Causal(*DECODERS[name])
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


NAMES = [*OWN, *DECODERS, "bert", "t5", "vit"]
