"""Adapters (LoRA) of a decoder, by Hugging Face's transformers and PEFT as they are."""

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

import isthmus

WORDS = ["<pad>", *"abcdefgh"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


class Adapters(isthmus.Task):
    def __init__(self, settings, data=None):
        super().__init__(settings, data)
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, WORDS[0]))
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=WORDS[0])
        self.collate = DataCollatorForLanguageModeling(self.tokenizer, mlm=False)

    def model(self):
        """Only what PEFT leaves trainable, the adapters, is exchanged."""
        config = LlamaConfig(vocab_size=len(WORDS), num_attention_heads=4, **SIZES)
        adapters = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
        return get_peft_model(AutoModelForCausalLM.from_config(config), adapters)

    def training_step(self, model, batch):
        scored = (batch["labels"][:, 1:] != -100).sum()
        return isthmus.StepLoss(model(**batch).loss, weight=float(scored))

    evaluation_step = training_step

    def local_data(self, participant):
        return self.rows(64, 1 + (participant.shard or (0, 1))[0])

    def eval_data(self):
        return self.rows(32, 0)

    def optimizer(self, parameters, participant):
        return torch.optim.AdamW(parameters, lr=2e-2)

    def rows(self, count, seed):
        """Texts that go through the alphabet, from random letters, in random lengths."""
        draw = torch.Generator().manual_seed(seed)
        rows = torch.randint(4, 8, (count, 2), generator=draw).tolist()
        texts = [[WORDS[1 + (start + i) % 8] for i in range(length)] for start, length in rows]
        encoded = self.tokenizer(texts, is_split_into_words=True)["input_ids"]
        return [{"input_ids": each} for each in encoded]
