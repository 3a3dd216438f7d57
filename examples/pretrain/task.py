"""Pretrain a decoder of Hugging Face's `transformers` on text on disk, in any layout."""

import functools

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import isthmus

END_OF_BYTES = 256


def number_bytes(text):
    return list(text.encode())


class Causal(nn.Module):
    """Takes and returns a tensor, as pipelines need it: tokens in, scores of the next ones out."""

    def __init__(self, config):
        super().__init__()
        self.decoder = AutoModelForCausalLM.from_config(config)

    def forward(self, tokens):
        return self.decoder(tokens, use_cache=False).logits


class Pretrain(isthmus.Task):
    def model(self):
        fixed = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return Causal(AutoConfig.for_model(**self.settings["decoder"], **fixed))

    def loss(self, output, target):
        return nn.functional.cross_entropy(output.transpose(1, 2).float(), target, reduction="none")

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(-1) == target).float()}

    @functools.cached_property
    def text(self):
        """All sequences: the first ones are held out, the others are trained on."""
        named = self.settings.get("tokenizer")
        return isthmus.PackedText(
            self.data,
            tokenizer=number_bytes if named is None else self.data / named,
            end=END_OF_BYTES if named is None else self.settings["end"],
            length=self.settings["length"],
            separator=self.settings.get("separator"),
        )

    def local_data(self, participant):
        return self.text[self.settings["held_out"] :]

    def eval_data(self):
        return self.text[: self.settings["held_out"]]

    def optimizer(self, parameters, participant):
        matrices = [each for each in parameters if each.ndim > 1]
        vectors = [each for each in parameters if each.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
        return torch.optim.AdamW(groups, lr=self.settings["lr"], betas=(0.9, 0.95))
