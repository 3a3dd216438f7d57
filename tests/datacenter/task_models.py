"""Transformers that the tasks of tasks.py train."""

from collections.abc import Callable, Iterable

import torch
from torch import nn


class TiedTransformer(nn.Module):
    """PyTorch's encoder layers, with the embedding's weight in the head."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 12)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        output: torch.Tensor = self.head(self.norm(hidden))
        return output


class Embedding(nn.Module):
    """Embeddings of words and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.places = nn.Embedding(6, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.words(words) + self.places(torch.arange(words.shape[1]))
        return output


class DecoderBlock(nn.Module):
    """Causal attention with separate projections, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.add_input_projections()
        self.out = nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def add_input_projections(self) -> None:
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def project(self, hidden: torch.Tensor) -> Iterable[torch.Tensor]:
        return self.q(hidden), self.k(hidden), self.v(hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        projected = self.project(self.first(hidden))
        q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in projected)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.call(self.out, mixed.transpose(1, 2).flatten(-2))
        up = self.call(self.up, self.second(hidden))
        return hidden + self.call(self.down, nn.functional.gelu(up))

    def call(self, layer: nn.Module, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = layer(given)
        return output


class ViewDecoderBlock(DecoderBlock):
    """Its output is a view of a tensor."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden)[:, :]


class FusedDecoderBlock(DecoderBlock):
    """One layer computes queries, keys and values; layers are called by keyword."""

    def add_input_projections(self) -> None:
        self.c_attn = nn.Linear(8, 24)
        self.split_size = 8

    def project(self, hidden: torch.Tensor) -> Iterable[torch.Tensor]:
        return self.call(self.c_attn, hidden).split(self.split_size, -1)

    def call(self, layer: nn.Module, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = layer(input=given)
        return output


class Decoder(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(
        self, blocks: int, tied: bool, kind: Callable[[], nn.Module] = DecoderBlock
    ) -> None:
        super().__init__()
        self.embed = Embedding()
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embed.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words=words)
        for block in self.blocks:
            hidden = block(hidden=hidden)
        output: torch.Tensor = self.head(self.norm(hidden))
        return output


class Experts(nn.Module):
    """Stacked experts, as in transformers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.hidden_dim = 8
        self.up = nn.Parameter(torch.empty(count, 12, 8))
        self.down = nn.Parameter(torch.empty(count, 8, 12))
        for each in (self.up, self.down):
            nn.init.normal_(each, std=0.3)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        output = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, place = torch.where(top_k_index == expert)
            inner = nn.functional.silu(hidden_states[tokens] @ self.up[expert].T)
            weighted = (inner @ self.down[expert].T) * top_k_weights[tokens, place, None]
            output = output.index_add(0, tokens, weighted.to(output.dtype))
        return output


class MixtureBlock(nn.Module):
    """A router that gives each word two of six experts; `skewed` gives all words the same two."""

    def __init__(self, *, skewed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.router = nn.Linear(8, 6)
        if skewed:
            with torch.no_grad():
                self.router.bias.copy_(torch.tensor([20.0, 22.0, 0.0, 0.0, 0.0, 0.0]))
        self.experts = Experts(6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(hidden).flatten(0, -2)
        output: torch.Tensor = self.experts(tokens, *self.choose(tokens))
        return hidden + output.view(hidden.shape)

    def choose(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two experts of each token, and their weights."""
        weights, index = self.router(tokens).float().softmax(-1).topk(2)
        return index, weights / weights.sum(-1, keepdim=True)


class SparingMixtureBlock(MixtureBlock):
    """Gives a token one expert, and in place of the second the number after the last."""

    def choose(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index, weights = super().choose(tokens)
        return torch.stack([index[:, 0], torch.full_like(index[:, 1], 6)], 1), weights


class EvenMixtureBlock(MixtureBlock):
    """Gives all experts equally many tokens, whatever its router would choose."""

    def choose(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index, weights = super().choose(tokens)
        in_turn = torch.arange(index.numel(), device=index.device) % self.experts.num_experts
        return in_turn.view(index.shape), weights


class SequenceMixtureBlock(MixtureBlock):
    """Does not flatten examples and positions."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(hidden)
        output: torch.Tensor = self.experts(tokens, *self.choose(tokens))
        return hidden + output


class SometimesMixtureBlock(MixtureBlock):
    """Leaves out its experts for an odd number of examples."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if len(hidden) % 2 else super().forward(hidden)


class NormalisedExperts(Experts):
    """What they give a token depends on the others."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        output = super().forward(hidden_states, top_k_index, top_k_weights)
        return output / (1.0 + hidden_states.square().mean())


class NormalisedInTrainingExperts(NormalisedExperts):
    """The same, and only in training."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        kind = NormalisedExperts if self.training else Experts
        return kind.forward(self, hidden_states, top_k_index, top_k_weights)


class SwitchedExperts(NormalisedExperts):
    """The same where `normalises` says so."""

    normalises = False

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        kind = NormalisedExperts if self.normalises else Experts
        return kind.forward(self, hidden_states, top_k_index, top_k_weights)


class CountingExperts(Experts):
    """Count their tokens, or by expert."""

    calls: torch.Tensor

    def __init__(self, count: int, places: int) -> None:
        super().__init__(count)
        self.register_buffer("calls", torch.zeros(places), persistent=False)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        self.calls[top_k_index % len(self.calls)] += 1.0
        return super().forward(hidden_states, top_k_index, top_k_weights)


class SparingExperts(Experts):
    """Leave out tokens whose expert is the number after the last."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        kept = top_k_index < self.num_experts
        index = torch.where(kept, top_k_index, 0)
        return super().forward(hidden_states, index, top_k_weights * kept)


class SequenceExperts(Experts):
    """Take tokens by example and position, too."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        given = (hidden_states, top_k_index, top_k_weights)
        output = super().forward(*(each.flatten(0, -2) for each in given))
        return output.view(hidden_states.shape)


class LonelyExperts(Experts):
    """Want several tokens; in a check a rank without a token gets a single one."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if len(hidden_states) == 1:
            raise ValueError("a token is alone")
        return super().forward(hidden_states, top_k_index, top_k_weights)


class FailingExperts(Experts):
    """They want several experts for a token."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if top_k_index.shape[1] < 2:
            raise ValueError("too few tokens")
        return super().forward(hidden_states, top_k_index, top_k_weights)


class SkippingDecoder(Decoder):
    """Every block also takes the embedding."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        first = hidden = self.embed(words)
        for block in self.blocks:
            hidden = block(hidden) + first
        output: torch.Tensor = self.head(self.norm(hidden))
        return output


class DroppingBlock(nn.Module):
    """Attention and an MLP with dropout of the weights, of the hidden units and of the outputs."""

    def __init__(self, p: float, shared: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.p = p
        self.inner = nn.Dropout(p)
        self.outer = self.inner if shared else nn.Dropout(p)
        self.weights_kept = torch.empty(0)
        """Where the last pass kept the weights of attention."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each(hidden).unflatten(-1, (-1, 2)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        weights = nn.functional.dropout(
            (q @ k.transpose(-1, -2)).softmax(-1), self.p, self.training
        )
        self.weights_kept = weights.detach() != 0
        hidden = hidden + self.outer(self.out((weights @ v).transpose(1, 2).flatten(-2)))
        output: torch.Tensor = hidden + self.outer(self.fc2(self.inner(self.fc1(hidden))))
        return output


class DroppingDecoder(nn.Module):
    """An embedding, such blocks, a head; `shared` uses one dropout for everything."""

    def __init__(self, p: float, shared: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(DroppingBlock(p, shared) for _ in range(2))
        self.head = nn.Linear(8, 12)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = block(hidden)
        output: torch.Tensor = self.head(hidden)
        return output


class ScaledByFunction(nn.Module):
    """Scales by its parameter in a function that has kept it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        scale = nn.Parameter(torch.ones(width))
        self.scale = scale
        self.scaled = lambda rows: rows * scale

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.scaled(rows)
        return output


class Clamped(nn.Module):
    """Scales by a parameter that it keeps within a range."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.clamp_(0.5, 0.9)
        return rows * self.scale


class ScaledByWholeNumbers(nn.Module):
    """Scales by a frozen parameter of int8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        numbers = torch.arange(1, width + 1, dtype=torch.int8)
        self.numbers = nn.Parameter(numbers, requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.numbers


class Signs(nn.Module):
    """Whole numbers by the signs of its inputs: 0 or 1."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows > 0).long()


class ResidualBlock(nn.Module):
    """Adds to its inputs what two layers make of them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(torch.tanh(self.up(inputs)))
