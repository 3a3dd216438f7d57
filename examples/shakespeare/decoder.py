"""The same characters, learned by any decoder of Hugging Face's `transformers`, from nothing."""

from task import CHARACTERS, Shakespeare
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM


class Causal(nn.Module):
    """A decoder as the layouts want a model: a tensor of numbers in, a tensor of scores out."""

    def __init__(self, config):
        super().__init__()
        self.decoder = AutoModelForCausalLM.from_config(config)

    def forward(self, numbers):
        return self.decoder(numbers, use_cache=False).logits


class Decoder(Shakespeare):
    def model(self):
        known = {"vocab_size": len(CHARACTERS), "bos_token_id": None, "eos_token_id": None}
        return Causal(
            AutoConfig.for_model(self.settings["decoder"], **known, **self.settings["model"])
        )
