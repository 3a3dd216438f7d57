"""Predict the next character of Shakespeare's plays; each speaker's lines are on one device.

A datacenter has the lines of the public speakers, the devices those of the others. The last tenth
of each device's lines is held out for evaluation, and so are the lines of a few public speakers.
"""

import functools

import torch
from torch import nn
from torch.utils.data import TensorDataset

import isthmus

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""A fixed alphabet, so that all devices encode characters alike whatever their text contains."""
NUMBER = {character: number for number, character in enumerate(CHARACTERS)}
HELD_OUT = 0.1


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a feed-forward network."""

    def __init__(self, width, head_width):
        super().__init__()
        self.head_width = head_width
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.inner_norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        normed = self.attention_norm(x)
        heads = (
            linear(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.inner(self.inner_norm(x))


class Transformer(nn.Module):
    """Decoder-only: characters (batch, time) in, scores (batch, time, characters) out."""

    def __init__(self, *, context, width, head_width, depth):
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, head_width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, len(CHARACTERS), bias=False)
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, numbers):
        positions = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.characters(numbers) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x))


class Shakespeare(isthmus.Task):
    def model(self):
        return Transformer(context=self.settings["context"], **self.settings["model"])

    def loss(self, output, target):
        return nn.functional.cross_entropy(output.transpose(1, 2), target, reduction="none")

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(-1) == target).float()}

    def local_data(self, participant):
        if participant.regime == "datacenter":
            return self.windows([self.speaker(name) for name in self.settings["public_speakers"]])
        if participant.shard is None:  # a real device: its file holds only its own text
            return self.windows([self.text()])
        index, count = participant.shard
        speakers = self.federated_speakers()
        if count > len(speakers):
            raise isthmus.TaskError(
                f"there are {count} devices for {len(speakers)} speakers; raise "
                f"task.settings.speakers={self.settings['speakers']} or lower "
                f"minimum_characters={self.settings['minimum_characters']}"
            )
        training, _ = self.divide(self.speaker(speakers[index]))
        return self.windows([training])

    def eval_data(self):
        return self.windows(
            [self.divide(self.speaker(name))[1] for name in self.federated_speakers()]
        )

    def public_eval(self):
        names = self.settings["public_held_out"]
        return self.windows([self.speaker(name) for name in names]) if names else None

    def optimizer(self, parameters, participant):
        return torch.optim.AdamW(parameters, lr=self.settings[f"{participant.regime}_lr"])

    def text(self):
        if not self.data.is_file():
            raise isthmus.TaskError(
                f"there is no text file {self.data}; give one with --set task.data=PATH, "
                "or on a device with --data PATH"
            )
        return self.data.read_text(encoding="utf-8")

    @functools.cached_property
    def lines(self):
        """All lines of each speaker."""
        speeches_of = {}
        for speech in self.text().split("\n\n"):
            speaker, colon, words = speech.strip().partition(":\n")
            if colon:
                speeches_of.setdefault(speaker, []).append(words)
        return {speaker: "\n".join(speeches) for speaker, speeches in speeches_of.items()}

    def speaker(self, name):
        if name not in self.lines:
            raise isthmus.TaskError(f"there is no speaker {name!r} in {self.data}")
        return self.lines[name]

    def federated_speakers(self):
        """The non-public speakers with the longest and sufficiently long text, longest first."""
        lengths = {name: len(words) for name, words in self.lines.items()}
        public = {*self.settings["public_speakers"], *self.settings["public_held_out"]}
        private = sorted(lengths.keys() - public)
        enough = [name for name in private if lengths[name] >= self.settings["minimum_characters"]]
        return sorted(enough, key=lengths.__getitem__, reverse=True)[: self.settings["speakers"]]

    def divide(self, words):
        """Split a speaker's text into training text and held-out end."""
        end = len(words) - round(HELD_OUT * len(words))
        return words[:end], words[end:]

    def windows(self, texts):
        """Non-overlapping windows of `context` characters, each with the following characters."""
        size = self.settings["context"]
        inputs, targets = [], []
        for text in texts:
            numbers = torch.tensor(
                [NUMBER.get(character, NUMBER[" "]) for character in text], dtype=torch.long
            )
            count = max(0, len(numbers) - 1) // size
            inputs.append(numbers[: count * size].view(count, size))
            targets.append(numbers[1 : count * size + 1].view(count, size))
        return TensorDataset(torch.cat(inputs), torch.cat(targets))
