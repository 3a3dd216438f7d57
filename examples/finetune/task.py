"""Fine-tune a decoder of Hugging Face's `transformers` on dialogues, by LoRA of `peft`."""

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import isthmus

IGNORED = -100


class Causal(nn.Module):
    """Takes and returns a tensor: tokens in, scores of the next ones out."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens):
        return self.decoder(input_ids=tokens, use_cache=False).logits


class Finetune(isthmus.Task):
    def model(self):
        config = AutoConfig.for_model(**self.start_config)
        decoder = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        lora = LoraConfig(target_modules="all-linear", **self.settings["lora"])
        return Causal(get_peft_model(decoder, lora))

    def loss(self, output, target):
        values = nn.functional.cross_entropy(output.transpose(1, 2), target, reduction="none")
        return values, target != IGNORED

    def metrics(self, output, target):
        return {"accuracy": ((output.argmax(-1) == target).float(), target != IGNORED)}

    def local_data(self, participant):
        return self.dialogues("train.jsonl")

    def eval_data(self):
        return self.dialogues("held_out.jsonl")

    def optimizer(self, parameters, participant):
        return torch.optim.AdamW(parameters, lr=self.settings["lr"], weight_decay=0.0)

    def dialogues(self, name):
        """Pairs of the tokens of a dialogue, and what follows each in its last message."""
        folder = Path(__file__).parent / self.settings["tokenizer"]
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        with (self.data / name).open(encoding="utf-8") as lines:
            rows = [json.loads(line)["messages"] for line in lines if not line.isspace()]
        return [self.row(tokenizer, messages) for messages in rows]

    def row(self, tokenizer, messages):
        form = {"tokenize": True, "return_dict": False}
        asked = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **form)
        tokens = tokenizer.apply_chat_template(messages, **form)
        if tokens[: len(asked)] != asked:
            raise ValueError("the chat template has no generation prompt before its answers")
        unused = self.settings["length"] + 1 - len(tokens)
        if unused < 0:
            raise ValueError(f"a dialogue has {len(tokens)} tokens; raise task.settings.length")
        # Padding is after what counts, where causal attention does not look.
        inputs = torch.tensor(tokens + unused * [0])
        answer = torch.tensor(len(asked) * [IGNORED] + tokens[len(asked) :] + unused * [IGNORED])
        return inputs[:-1], answer[1:]
