"""A decoder of transformers with adapters of PEFT, made from a configuration, on random tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from isthmus import Task
from isthmus.task import Participant

TOKENS = 8192
LENGTH = 8
EXAMPLES = 8


def decoder(width: int, layers: int, tokens: int = TOKENS) -> LlamaForCausalLM:
    """The base, in float32, without ties."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=max(1, width // 64),
            vocab_size=tokens,
            tie_word_embeddings=False,
        )
    )


class Adapters(Task):
    """Settings: `width` and `layers` of the base, and the number of its `tokens`."""

    def model(self) -> nn.Module:
        """The decoder, with factors of rank 8 for all of its linear layers but the last."""
        settings = self.settings
        base = decoder(settings["width"], settings["layers"], settings["tokens"])
        return get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))

    def forward(self, model: nn.Module, inputs: torch.Tensor) -> Any:
        """Tokens (batch, length) to scores of the next ones (batch, length, TOKENS)."""
        return model(input_ids=inputs, use_cache=False).logits

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """Cross-entropy (batch, length)."""
        return nn.functional.cross_entropy(
            output.float().transpose(1, 2), target, reduction="none"
        ).mean(1)

    def local_data(self, participant: Participant) -> Dataset[Any]:
        """A few random sequences."""
        generator = torch.Generator().manual_seed(1)
        rows = torch.randint(self.settings["tokens"], (EXAMPLES, LENGTH + 1), generator=generator)
        return TensorDataset(rows[:, :-1], rows[:, 1:])

    def eval_data(self) -> None:
        """None: what is measured is a device."""
        return

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(parameters, lr=1e-4)
