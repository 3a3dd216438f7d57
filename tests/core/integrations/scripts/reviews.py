"""A script of a user of transformers, which knows nothing of Isthmus."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Reviews(Dataset):
    """Sentences of eight words; which of two words is more frequent."""

    def __init__(self, count, seed):
        draw = torch.Generator().manual_seed(seed)
        self.words = torch.randint(2, 20, (count, 8), generator=draw)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index]
        liked = int((words < 8).sum() > (words > 12).sum())
        return {"input_ids": words, "labels": liked, "source": index}  # no argument of the model


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 2.0], device=labels.device)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weights)
        return (loss, outputs) if return_outputs else loss


def build():
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


ARGUMENTS = TrainingArguments(
    output_dir="reviews",
    max_steps=12,
    learning_rate=0.05,
    weight_decay=0.01,
    optim="sgd",
    warmup_steps=2,
    per_device_train_batch_size=8,
    train_sampling_strategy="sequential",
    report_to="none",
    logging_steps=4,
    save_strategy="no",
    use_cpu=True,
)
TRAIN = Reviews(48, 1)
HELD_OUT = Reviews(20, 2)


if __name__ == "__main__":
    Weighted(model_init=build, args=ARGUMENTS, train_dataset=TRAIN, eval_dataset=HELD_OUT).train()
