"""The next character of Shakespeare's plays, by adapters of a decoder that has read other text.

Speakers of histories are public, and in the datacenter. Each device has one speaker of other plays.
Other speakers of these plays are in nobody's data: the benchmark evaluates models on them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM

from isthmus import Task, TaskError
from isthmus.task import Participant

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""A fixed alphabet; the base is trained with it, too."""
NUMBER = {character: number for number, character in enumerate(CHARACTERS)}
PUBLIC = (
    "KING RICHARD II",
    "HENRY BOLINGBROKE",
    "GLOUCESTER",
    "WARWICK",
    "QUEEN MARGARET",
    "KING EDWARD IV",
    "KING HENRY VI",
    "BUCKINGHAM",
    "KING RICHARD III",
    "QUEEN ELIZABETH",
)
ON_DEVICES = (
    "DUKE VINCENTIO",
    "LEONTES",
    "CORIOLANUS",
    "ROMEO",
    "PETRUCHIO",
    "JULIET",
    "MENENIUS",
    "PROSPERO",
)
HELD_OUT = ("ISABELLA", "FRIAR LAURENCE", "VOLUMNIA", "PAULINA", "ANGELO", "AUTOLYCUS")
OWN_PART = 0.1
"""Share of a device's lines, the last ones, that it does not train on."""


def windows(texts: Iterable[str], size: int) -> TensorDataset:
    """Windows of characters that do not overlap, each with the characters that follow.

    Both are whole numbers (windows, size).
    """
    inputs = []
    targets = []
    for text in texts:
        encoded = [NUMBER.get(character, NUMBER[" "]) for character in text]
        numbers = torch.tensor(encoded, dtype=torch.long)
        count = max(0, len(numbers) - 1) // size
        inputs.append(numbers[: count * size].view(count, size))
        targets.append(numbers[1 : count * size + 1].view(count, size))
    return TensorDataset(torch.cat(inputs), torch.cat(targets))


class Speakers(Task):
    """Settings: `length` of a window, `rank` of the factors, `lr`, and the number of `devices`."""

    def model(self) -> nn.Module:
        """The decoder of the start, with factors for all of its linear layers but the last."""
        config = AutoConfig.for_model(**self.start_config)
        decoder = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        rank = self.settings["rank"]
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        adapted: nn.Module = get_peft_model(decoder, lora)
        return adapted

    def forward(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """Characters (batch, length) to scores of the next ones (batch, length, characters)."""
        logits: torch.Tensor = model(input_ids=inputs, use_cache=False).logits
        return logits

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of each character (batch, length)."""
        return nn.functional.cross_entropy(output.float().transpose(1, 2), target, reduction="none")

    def local_data(self, participant: Participant) -> TensorDataset:
        """The public speakers' lines, or all but the last of one speaker's."""
        if participant.regime == "datacenter":
            return self.of(PUBLIC)
        assert participant.shard is not None
        return self.training(ON_DEVICES[participant.shard[0]])

    def eval_data(self) -> None:
        """None: no line of a held-out speaker decides anything in a run."""
        return

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(parameters, lr=self.settings["lr"], weight_decay=0.0)

    # -- for the benchmark, which compares a run with plain loops over the same lines --------------

    def of(self, speakers: Sequence[str]) -> TensorDataset:
        """All lines of some speakers."""
        return self._windows([self.lines[name] for name in speakers])

    def training(self, *speakers: str) -> TensorDataset:
        """All lines of speakers on devices but their last ones."""
        return self._windows([self.lines[name][: self._end(name)] for name in speakers])

    def own(self, speaker: str) -> TensorDataset:
        """The last lines of a speaker on a device."""
        return self._windows([self.lines[speaker][self._end(speaker) :]])

    @functools.cached_property
    def lines(self) -> dict[str, str]:
        """All lines of each speaker, by name."""
        assert self.data is not None
        speeches: dict[str, list[str]] = {}
        for speech in self.data.read_text(encoding="utf-8").split("\n\n"):
            speaker, colon, words = speech.strip().partition(":\n")
            if colon:
                speeches.setdefault(speaker, []).append(words)
        missing = [name for name in (*PUBLIC, *ON_DEVICES, *HELD_OUT) if name not in speeches]
        if missing:
            raise TaskError(f"there is no speaker {missing[0]!r} in {self.data}")
        return {speaker: "\n".join(said) for speaker, said in speeches.items()}

    def _end(self, speaker: str) -> int:
        count = len(self.lines[speaker])
        return count - round(OWN_PART * count)

    def _windows(self, texts: Iterable[str]) -> TensorDataset:
        return windows(texts, self.settings["length"])
