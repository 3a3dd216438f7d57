"""A small decoder that is first trained on other text: the manual of the Python language.

Python brings the manual along (`pydoc_data.topics`), so that nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import pydoc_data.topics
from pathlib import Path

import torch
from adapter_speakers.speakers_task import CHARACTERS, windows
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseSize:
    """A size of the decoder, and of its training."""

    width: int
    layers: int
    length: int
    """Characters of a window."""
    steps: int
    """Batches of 32 windows."""


def save_trained_base(folder: Path, size: BaseSize) -> float:
    """Train a decoder, and write it as transformers does; returns its last losses' mean."""
    torch.manual_seed(1)
    decoder = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(CHARACTERS),
            hidden_size=size.width,
            intermediate_size=3 * size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=max(1, size.width // 32),
            max_position_embeddings=size.length,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
    )
    inputs, targets = windows(pydoc_data.topics.topics.values(), size.length).tensors
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, size.steps)
    losses = []
    for _ in range(size.steps):
        drawn = torch.randint(len(inputs), (32,))
        scores = decoder(input_ids=inputs[drawn], use_cache=False).logits
        loss = nn.functional.cross_entropy(scores.transpose(1, 2), targets[drawn])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    decoder.save_pretrained(folder)
    last = losses[-20:]
    return sum(last) / len(last)
