"""Label the words of sentences of different lengths, padded in batches of similar ones."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import isthmus

WORDS, LABELS = 20, 3


class Tagging(isthmus.Task):
    def model(self):
        return nn.ModuleDict(
            {
                "words": nn.Embedding(WORDS, 8),
                "context": nn.GRU(8, 16, batch_first=True),
                "labels": nn.Linear(16, LABELS),
            }
        )

    def collate(self, rows):
        columns = {name: [torch.tensor(row[name]) for row in rows] for name in ("words", "labels")}
        columns["mask"] = [torch.ones_like(words, dtype=torch.bool) for words in columns["words"]]
        return {name: pad_sequence(each, batch_first=True) for name, each in columns.items()}

    def inputs_and_target(self, batch):
        return batch["words"], (batch["labels"], batch["mask"])

    def forward(self, model, words):
        return model["labels"](model["context"](model["words"](words))[0])

    def loss(self, output, target):
        labels, mask = target
        return nn.functional.cross_entropy(output.mT, labels, reduction="none"), mask

    def metrics(self, output, target):
        labels, mask = target
        return {"accuracy": ((output.argmax(-1) == labels).float(), mask)}

    def order(self, dataset, batch_size, generator):
        """Batches of sentences of similar lengths, in a random order."""
        lengths = torch.tensor([len(row["words"]) for row in dataset])
        shuffled = torch.randperm(len(lengths), generator=generator)
        batches = shuffled[lengths[shuffled].argsort(stable=True)].split(batch_size)
        return torch.cat([batches[i] for i in torch.randperm(len(batches), generator=generator)])

    def local_data(self, participant):
        return sentences(48, 1 + (participant.shard or (0, 1))[0])

    def eval_data(self):
        return sentences(30, 0)

    def optimizer(self, parameters, participant):
        return torch.optim.Adam(parameters, lr=0.02)


def sentences(count, seed):
    """Rows of words and their labels; a label depends on the word and on the one before it."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for length in torch.randint(2, 12, (count,), generator=draw).tolist():
        words = torch.randint(WORDS, (length,), generator=draw)
        before = torch.cat([words[:1] * 0, words[:-1]])
        rows.append({"words": words.tolist(), "labels": ((words + before) % LABELS).tolist()})
    return rows
