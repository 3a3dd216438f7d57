"""Llama 3 from its published configurations, and a small Mixtral, on random tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from isthmus import Task
from isthmus.task import Participant

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 512,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


class _Scores(nn.Module):
    """Tokens (batch, length) to scores of the next ones (batch, length, vocabulary)."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.decoder(input_ids=inputs, use_cache=False).logits
        return scores


class Llama(Task):
    """Settings: `size`, a key of `SIZES`; `length` of a sequence, by default 2,048."""

    def model(self) -> nn.Module:
        """The decoder."""
        return _Scores(LlamaForCausalLM(LlamaConfig(**SIZES[self.settings["size"]])))

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """Cross-entropy (batch, length)."""
        return nn.functional.cross_entropy(output.transpose(1, 2), target, reduction="none")

    def local_data(self, participant: Participant) -> Dataset[Any]:
        """A few random sequences."""
        length = self.settings.get("length", 2048)
        tokens = torch.randint(256, (4, length), generator=torch.Generator().manual_seed(1))
        return TensorDataset(tokens, tokens)

    def eval_data(self) -> None:
        """None."""
        return

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(parameters, lr=1e-4)


class Mixtral(Llama):
    """A mixture of eight experts, of which each token has two."""

    def model(self) -> nn.Module:
        """The decoder."""
        sizes = SIZES[self.settings["size"]]
        # PyTorch's grouped products are for bfloat16.
        config = MixtralConfig(
            **sizes, num_local_experts=8, num_experts_per_tok=2, experts_implementation="eager"
        )
        return _Scores(MixtralForCausalLM(config))


class AdaptedLlama(Llama):
    """Only the matrices after attention are trained, as adapters would be."""

    def model(self) -> nn.Module:
        """The decoder."""
        model = super().model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("o_proj" in name)
        return model
