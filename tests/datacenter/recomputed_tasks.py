"""Decoders whose blocks keep something that their repetition finds changed, and usual models."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
import torch.distributed as dist
from tests.datacenter.task_models import Decoder, DecoderBlock, MixtureBlock
from tests.datacenter.tasks import Gpt, Padded
from torch import nn

_TRIED = 3
"""Examples of the largest batch that passes through a model before it is trained."""


class Keeping(Gpt):
    """A decoder whose last block keeps its number of calls, and is scaled by it.

    Settings: `kind` of what it keeps; `rank` that keeps it, by default all; `units` that are
    gathered together, by name, by default the blocks; `mixture` for one of experts.
    """

    def model(self) -> nn.Module:
        kind = MixtureBlock if self.settings.get("mixture") else DecoderBlock
        model = Decoder(self.settings.get("blocks", 2), tied=True, kind=kind)
        last: Any = model.blocks[-1]
        last.__class__ = _KeepingMixtureBlock if kind is MixtureBlock else _KeepingBlock
        last.calls = _CALLS[self.settings["kind"]]()
        last.rank = self.settings.get("rank")
        return model

    def shard_units(self, model: Any) -> Any:
        names = self.settings.get("units")
        return list(model.blocks) if names is None else [*map(model.get_submodule, names)]


_CALLS = {"count": lambda: itertools.count(1), "once": lambda: iter([1])}


class _KeepingBlock(DecoderBlock):
    calls: Any
    rank: int | None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden * _scale(self, hidden))


class _KeepingMixtureBlock(MixtureBlock):
    calls: Any
    rank: int | None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * _scale(self, hidden)


def _scale(block: Any, hidden: torch.Tensor) -> float:
    """Calls are counted from the first training batch on: what came before compares layouts."""
    if not block.training or len(hidden) <= _TRIED:
        return 1.0
    if block.rank is not None and block.rank != dist.get_rank():
        return 1.0
    return 1.0 + 1.0 / next(block.calls)


class Turning(Keeping):
    """Its last block calls its parts in another order in every second call."""

    def model(self) -> nn.Module:
        model = super().model()
        blocks: Any = model.blocks
        blocks[-1].__class__ = _TurningBlock
        return model


class _TurningBlock(DecoderBlock):
    calls: Any

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = [self.q, self.k]
        if self.training and len(hidden) > _TRIED and next(self.calls) % 2 == 0:
            parts.reverse()
        for part in parts:
            hidden = hidden + part(hidden).tanh()
        return hidden


class Skipping(Gpt):
    """Its blocks are skipped by chance, with random numbers of Python, as with LayerDrop."""

    def model(self) -> nn.Module:
        return Decoder(2, tied=True, kind=_SkippedBlock)


class _SkippedBlock(DecoderBlock):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training and random.random() < 0.5:
            return hidden
        return super().forward(hidden)


_LOSSES: list[torch.Tensor] = []


class Collecting(Gpt):
    """Its blocks collect losses, which the model adds to its output, and keeps nothing of them.

    Setting: `place` where they are, a list of this `file`, one that only a `hook` has, or the
    `argument` of a block.
    """

    def model(self) -> nn.Module:
        return _Collecting(self.settings["place"])


class _Collecting(Decoder):
    def __init__(self, place: str) -> None:
        super().__init__(2, tied=True, kind=_CollectingBlock)
        self.place = place
        self.losses: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        self.take = lambda: _emptied(found)
        for block in self.blocks:
            block.names_file = place == "file"
            if place == "hook":
                block.get_submodule("second").register_forward_hook(
                    lambda module, given, output: found.append(output.float().square().mean())
                )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words=words)
        for block in self.blocks:
            hidden = block(hidden, self.losses) if self.place == "argument" else block(hidden)
        total = sum(_emptied(_LOSSES) + _emptied(self.losses) + self.take())
        output: torch.Tensor = self.head(self.norm(hidden)) * (1.0 + 0.1 * total)
        return output


def _emptied(losses: list[torch.Tensor]) -> list[torch.Tensor]:
    found = list(losses)
    losses.clear()
    return found


class _CollectingBlock(DecoderBlock):
    names_file = False

    def forward(self, hidden: torch.Tensor, losses: Any = None) -> torch.Tensor:
        if losses is not None:
            losses.append(hidden.float().square().mean())
        if self.names_file:
            _LOSSES.append(hidden.float().square().mean())
        return super().forward(hidden)


class Usual(Padded):
    """A model of transformers by its `kind`, with dropout where it has some.

    The setting `autocast` has it compute in bfloat16.
    """

    def model(self) -> nn.Module:
        return _Transformer(self.settings["kind"], autocast=self.settings["autocast"])


_DECODER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
_QWEN3 = {**_DECODER, "head_dim": 4, "attention_dropout": 0.1}
_SIZES: dict[str, dict[str, Any]] = {
    "qwen3": _QWEN3,
    "qwen3-four": {**_QWEN3, "num_hidden_layers": 4},
    "gpt2": {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 16},
    "bert": {**_DECODER, "pad_token_id": 0},
    "qwen3_moe": {
        **_DECODER,
        "head_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}


class _Transformer(nn.Module):
    def __init__(self, kind: str, *, autocast: bool) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

        auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        config = AutoConfig.for_model(
            kind.partition("-")[0], vocab_size=12, **{**special, **_SIZES[kind]}
        )
        config.use_cache = False
        self.inner = auto.from_config(config)
        self.autocast = autocast

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            output: torch.Tensor = self.inner(words).logits
        return output
