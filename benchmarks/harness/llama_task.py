"""Llama 3 from its published configurations, on random tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

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


class Llama(Task):
    """Settings: `size`, a key of `SIZES`; `length` of a sequence, by default 2,048."""

    def model(self) -> nn.Module:
        """The decoder."""
        return LlamaForCausalLM(LlamaConfig(**SIZES[self.settings["size"]]))

    def forward(self, model: nn.Module, inputs: torch.Tensor) -> Any:
        """Tokens (batch, length) to scores of the next ones (batch, length, vocabulary)."""
        return model(input_ids=inputs, use_cache=False).logits

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
