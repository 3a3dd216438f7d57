"""Small models of many kinds: own ones, and architectures of Hugging Face's transformers.

Each is built by name and takes a batch of words, (examples, TOKENS), of pictures, (examples, 3,
PICTURE, PICTURE), or of sounds, (examples, SOUND). All are in float32, without dropout, and have
some ten thousand parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

WORDS = 96
TOKENS = 16
CLASSES = 8
PICTURE = 16
"""Height and width of a picture with three channels."""
SOUND = 200
"""Samples of a sound."""

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
    "olmo3": ("olmo3", {**_DECODER, "sliding_window": 8}),
    "cohere2": ("cohere2", {**_DECODER, "sliding_window": 8}),
    "granite": ("granite", {**_DECODER, "embedding_multiplier": 2.0, "logits_scaling": 2.0}),
    "nemotron": ("nemotron", _DECODER),
    "smollm3": ("smollm3", {**_DECODER, "no_rope_layer_interval": 2}),
    "helium": ("helium", {**_DECODER, "head_dim": 8}),
    "persimmon": ("persimmon", _DECODER),
    "biogpt": ("biogpt", _DECODER),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32}),
    "codegen": (
        "codegen",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "rotary_dim": 4},
    ),
    "gpt_bigcode": ("gpt_bigcode", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32}),
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
    "granitemoe": ("granitemoe", {**_EXPERTS, "num_local_experts": 4}),
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
    "lfm2": ("lfm2", {**_DECODER, "layer_types": ["conv", "full_attention"]}),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            **_DECODER,
            "num_key_value_heads": 1,
            "lru_width": 32,
            "attention_window_size": 8,
            "block_types": ["recurrent", "attention"],
        },
    ),
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
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


ENCODERS: dict[str, tuple[str, Size]] = {
    "bert": ("bert", {**_DECODER, "pad_token_id": 0}),
    "roberta": ("roberta", {**_DECODER, "pad_token_id": 0}),
    "distilbert": ("distilbert", {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 64}),
    "albert": ("albert", {**_DECODER, "embedding_size": 16, "pad_token_id": 0}),
    "electra": ("electra", {**_DECODER, "embedding_size": 16, "pad_token_id": 0}),
    "deberta_v2": (
        "deberta-v2",
        {
            **_DECODER,
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["p2c", "c2p"],
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pad_token_id": 0,
        },
    ),
    "modernbert": (
        "modernbert",
        {**_DECODER, "local_attention": 8, "pad_token_id": 0, "reference_compile": False},
    ),
    "mpnet": ("mpnet", {**_DECODER, "pad_token_id": 1}),
    "fnet": ("fnet", {**_DECODER, "pad_token_id": 0}),
}
"""Of masked words. Name of the architecture, and its sizes."""

_TWO_STACKS: Size = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
TRANSLATORS: dict[str, tuple[str, Size]] = {
    "t5": (
        "t5",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
            "pad_token_id": 0,
        },
    ),
    "bart": ("bart", _TWO_STACKS),
    "mbart": ("mbart", _TWO_STACKS),
    "pegasus": ("pegasus", _TWO_STACKS),
    "marian": ("marian", _TWO_STACKS),
}
"""With encoder and decoder. Name of the architecture, and its sizes."""

_PICTURES: Size = {"image_size": PICTURE, "num_labels": CLASSES}
_CONVOLUTIONS: Size = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "num_labels": CLASSES,
    # At the kink of a ReLU a rounding becomes another gradient.
    "hidden_act": "gelu",
}
SEEING: dict[str, tuple[str, Size]] = {
    "vit": ("vit", {**_DECODER, **_PICTURES, "patch_size": 4}),
    "beit": ("beit", {**_DECODER, **_PICTURES, "patch_size": 4}),
    "dinov2": ("dinov2", {**_DECODER, **_PICTURES, "patch_size": 4, "mlp_ratio": 2}),
    "swin": (
        "swin",
        {
            **_PICTURES,
            "patch_size": 1,
            "embed_dim": 16,
            "depths": [2, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "convnext": (
        "convnext",
        {
            "num_stages": 2,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "patch_size": 2,
            "layer_scale_init_value": 0.5,
            "num_labels": CLASSES,
        },
    ),
    "resnet": ("resnet", {**_CONVOLUTIONS, "layer_type": "basic"}),
    "regnet": ("regnet", {**_CONVOLUTIONS, "groups_width": 4}),
}
"""Of pictures. Name of the architecture, and its sizes."""

HEARING: dict[str, tuple[str, Size]] = {
    "wav2vec2": (
        "wav2vec2",
        {
            **_DECODER,
            "conv_dim": [8, 8],
            "conv_kernel": [5, 3],
            "conv_stride": [5, 2],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "classifier_proj_size": 16,
            "apply_spec_augment": False,
            "num_labels": CLASSES,
        },
    ),
}
"""Of sounds. Name of the architecture, and its sizes."""


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
    """An encoder with a head for masked words."""

    def __init__(self, kind: str, size: Size) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForMaskedLM

        self.encoder = AutoModelForMaskedLM.from_config(_config(AutoConfig, kind, size))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.encoder(words).logits
        return output


class Translation(nn.Module):
    """Encoder and decoder, from the words to the same words."""

    def __init__(self, kind: str, size: Size) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForSeq2SeqLM

        self.both = AutoModelForSeq2SeqLM.from_config(_config(AutoConfig, kind, size))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.both(
            input_ids=words, decoder_input_ids=words, use_cache=False
        ).logits
        return output


class Vision(nn.Module):
    """Classes of pictures."""

    def __init__(self, kind: str, size: Size) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForImageClassification

        config = AutoConfig.for_model(kind, **{**_no_dropout(kind), **size})
        self.encoder = AutoModelForImageClassification.from_config(config)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.encoder(pictures).logits
        return output


class Audio(nn.Module):
    """Classes of sounds."""

    def __init__(self, kind: str, size: Size) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForAudioClassification

        config = AutoConfig.for_model(kind, **{**_no_dropout(kind), **size})
        self.encoder = AutoModelForAudioClassification.from_config(config)

    def forward(self, sounds: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.encoder(sounds).logits
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
        # With PyTorch's initial values, of about one, its movement would be mostly rounding.
        nn.init.normal_(self.embed.weight, std=0.1)
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


class Recurrent(nn.Module):
    """A recurrent layer within a block."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = hidden + self.layer(hidden)[0]
        return output


class Padded(nn.Module):
    """Embeddings of which one row is padding and is not trained, summed over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16, padding_idx=1)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fc(self.embed(words).tanh().sum(1))
        return output


class Convolutions(nn.Module):
    """Convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before a normalisation would move by rounding only.
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        hidden = self.norm1(self.conv1(pictures)).relu()
        hidden = self.norm2(self.conv2(hidden)).relu()
        output: torch.Tensor = self.head(hidden.mean((2, 3)))
        return output


def _spectral_norm() -> nn.Module:
    block = Perceptron(16, nn.Tanh())
    nn.utils.parametrizations.spectral_norm(block.fc1)
    return block


def _weight_norm() -> nn.Module:
    block = Perceptron(16, nn.Tanh())
    nn.utils.parametrizations.weight_norm(block.fc1)
    nn.utils.parametrizations.weight_norm(block.fc2)
    return block


Input = Literal["words", "words of classes", "pictures", "sounds"]
OWN: dict[str, tuple[Input, Callable[[], nn.Module]]] = {
    "gelu": ("words", lambda: Words(lambda: Perceptron(16, nn.GELU()))),
    "prelu": ("words", lambda: Words(lambda: Perceptron(16, nn.PReLU()))),
    "zero-scale": ("words", lambda: Words(lambda: Perceptron(16, Scale(0.0)))),
    "gated": ("words", lambda: Words(lambda: Gated(16))),
    "twice": ("words", lambda: Words(lambda: Twice(16))),
    "low-rank": ("words", lambda: Words(lambda: LowRank(16))),
    "weight-norm": ("words", lambda: Words(_weight_norm)),
    "lstm": ("words", lambda: Words(lambda: Recurrent(nn.LSTM(16, 16, batch_first=True)))),
    "gru": ("words", lambda: Words(lambda: Recurrent(nn.GRU(16, 16, batch_first=True)))),
    "padding": ("words of classes", Padded),
    "batch-norm": ("pictures", Convolutions),
    "spectral-norm": ("words", lambda: Words(_spectral_norm)),
}
"""Own models: what they take, and how they are built."""

_TABLES: tuple[tuple[Input, Any, dict[str, tuple[str, Size]]], ...] = (
    ("words", Causal, DECODERS),
    ("words", Masked, ENCODERS),
    ("words", Translation, TRANSLATORS),
    ("pictures", Vision, SEEING),
    ("sounds", Audio, HEARING),
)
NAMES = [*OWN, *(name for _, _, table in _TABLES for name in table)]


def input_of(name: str) -> Input:
    """What a model takes."""
    if name in OWN:
        return OWN[name][0]
    return next(kind for kind, _, table in _TABLES if name in table)


def build(name: str) -> nn.Module:
    """Build a model, with norms that are not all one."""
    if name in OWN:
        return OWN[name][1]()
    model: nn.Module = next(made(*table[name]) for _, made, table in _TABLES if name in table)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
