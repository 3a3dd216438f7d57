"""The task of task.py with any decoder of Hugging Face's `transformers`, trained from scratch."""

from task import CHARACTERS, Shakespeare
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM


class Causal(nn.Module):
    """Wraps a decoder for the parallel layouts: a tensor of numbers in, a tensor of logits out."""

    def __init__(self, config):
        super().__init__()
        self.decoder = AutoModelForCausalLM.from_config(config)

    def forward(self, numbers):
        return self.decoder(numbers, use_cache=False).logits


class Decoder(Shakespeare):
    def model(self):
        fixed = {"vocab_size": len(CHARACTERS), "bos_token_id": None, "eos_token_id": None}
        return Causal(
            AutoConfig.for_model(self.settings["decoder"], **fixed, **self.settings["model"])
        )
