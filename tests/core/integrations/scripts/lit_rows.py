"""A script of a user of Lightning, which knows nothing of Isthmus."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitRows(lightning.LightningModule):
    def __init__(self, rate=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, inputs):
        return self.head(self.body(inputs))

    def training_step(self, batch, batch_idx):
        inputs, target = batch
        output = self(inputs)
        loss = nn.functional.cross_entropy(output, target)
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"train_accuracy": (output.argmax(-1) == target).float().mean()})
        return {"loss": loss, "output": output}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        inputs, target = batch
        self.log("val_loss", nn.functional.cross_entropy(self(inputs), target))

    def configure_optimizers(self):
        groups = [
            {"params": self.body.parameters(), "weight_decay": 0.01},
            {"params": self.head.parameters(), "lr": 2 * self.hparams.rate},
        ]
        optimizer = torch.optim.SGD(groups, lr=self.hparams.rate, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class RowsData(lightning.LightningDataModule):
    def setup(self, stage):
        self.train = rows(48, 1)
        self.held_out = rows(20, 2)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8)

    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=20)


def rows(count, seed):
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


if __name__ == "__main__":
    lightning.Trainer(max_epochs=2).fit(LitRows(), datamodule=RowsData())
