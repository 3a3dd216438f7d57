"""Small tasks that the tests' ranks train; `Faulty` fails at a chosen point."""

import abc
import functools
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tests.datacenter.task_models import (
    Clamped,
    CountingExperts,
    Decoder,
    DecoderBlock,
    DroppingDecoder,
    EvenMixtureBlock,
    FailingExperts,
    FusedDecoderBlock,
    LonelyExperts,
    MixtureBlock,
    NormalisedExperts,
    NormalisedInTrainingExperts,
    ResidualBlock,
    ScaledByFunction,
    ScaledByWholeNumbers,
    SequenceExperts,
    SequenceMixtureBlock,
    Signs,
    SkippingDecoder,
    SometimesMixtureBlock,
    SparingExperts,
    SparingMixtureBlock,
    SwitchedExperts,
    TiedTransformer,
    ViewDecoderBlock,
)
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import Dataset, TensorDataset

import isthmus_datacenter.training.engine
import isthmus_datacenter.training.round
from isthmus import Participant, StepLoss, Task
from isthmus.task.packed_text import PackedText
from isthmus_datacenter.checkpointing.checkpoints import ShardedCheckpoints

CLASSES = 3
WORDS = 11


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, reduction="none")


class _Small(Task):
    """Base of the tasks; `settings` choose the optimizer and the numbers of held-out examples."""

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self.settings.get("optimizer", "AdamW"))
        options = self.settings.get("options", {})
        optimizer: torch.optim.Optimizer = kind(parameters, **{"lr": 0.01, **options})
        return optimizer

    def local_data(self, participant: Participant) -> Dataset[Any]:
        seed = sum(participant.name.encode()) if self.settings.get("own_data") else 1
        return self.rows(50, seed)

    def eval_data(self) -> Dataset[Any]:
        return self.rows(self.settings.get("held_out", 23), seed=2)

    def public_eval(self) -> Dataset[Any] | None:
        count = self.settings.get("public_held_out", 0)
        return self.rows(count, seed=3) if count else None

    @abc.abstractmethod
    def rows(self, count: int, seed: int) -> Any:
        """Examples, the same ones for the same seed."""


class Table(_Small):
    """An MLP on random tables; its odd sizes make all shards uneven."""

    def model(self) -> nn.Module:
        dropout = nn.Dropout(self.settings.get("dropout", 0.0))
        return nn.Sequential(
            nn.Linear(6, 17), nn.ReLU(), dropout, nn.Linear(17, 9), nn.Tanh(), nn.Linear(9, CLASSES)
        )

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, target)

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"accuracy": (output.argmax(-1) == target).float()}

    def rows(self, count: int, seed: int) -> Any:
        inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
        rows = TensorDataset(inputs, inputs.abs().sum(1).long() % CLASSES)
        return _Noisy(rows) if self.settings.get("noise") else rows


class Deep(Table):
    """Sixteen layers of four million parameters each."""

    def model(self) -> nn.Module:
        layers = [nn.Linear(2048, 2048) for _ in range(16)]
        return nn.Sequential(nn.Linear(6, 2048), *layers, nn.Linear(2048, 3))


class Stacked(Table):
    """Residual blocks, each with as many hidden units as `hidden` says."""

    def model(self) -> nn.Module:
        blocks = [ResidualBlock(128, hidden) for hidden in self.settings["hidden"]]
        return nn.Sequential(nn.Linear(6, 128), *blocks, nn.Linear(128, CLASSES))


class Drawn(Table):
    """Normalised by random numbers that belong to no state."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("scale", torch.rand(6), persistent=False)
        return model

    def forward(self, model: nn.Module, inputs: torch.Tensor) -> Any:
        return model(inputs * model.scale)


class Anchored(Table):
    """Has copies of its first values, in a buffer or in a list, as of a reference for a penalty."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        first = model[0].weight.detach().clone()
        if self.settings.get("listed"):
            model.first = [first]
        else:
            model.register_buffer("first", first, persistent=False)
        output: nn.Module = model
        return output


class Outside(Table):
    """Uses a parameter while its module is not called."""

    def forward(self, model: nn.Module, inputs: torch.Tensor) -> Any:
        return model(inputs) + model.get_parameter("0.bias").sum()


class Peculiar(Table):
    """Its model has what names and values of parameters do not tell; `kind` says what."""

    def model(self) -> nn.Module:
        layers: Any = super().model()
        match self.settings["kind"]:
            case "hooked":
                layers[3].weight.register_hook(lambda gradient: 0.1 * gradient)
            case "rated":
                layers[3].weight.rate = 0.5
            case "kept":
                layers.append(ScaledByFunction(CLASSES))
            case "clamped":
                layers.append(Clamped(CLASSES))
            case "whole numbers":
                layers.append(ScaledByWholeNumbers(CLASSES))
            case "renormalised":
                return nn.Sequential(Signs(), nn.EmbeddingBag(2, 17, max_norm=0.1), *layers[1:])
        output: nn.Module = layers
        return output

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        groups = [{"params": [each], "lr": getattr(each, "rate", 0.05)} for each in parameters]
        return torch.optim.SGD(groups, lr=0.05)


class Text(_Small):
    """The next byte of documents that are read from disk; `text` is their folder."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(128, 8), nn.Linear(8, 128))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output.transpose(1, 2), target)

    def local_data(self, participant: Participant) -> Dataset[Any]:
        rank = str(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
        folder = self.settings["text"]
        length = self.settings.get("length_of_rank", {}).get(rank, 8)
        return PackedText(folder, tokenizer=number_bytes, end=0, length=length)

    def eval_data(self) -> None:
        return None

    def rows(self, count: int, seed: int) -> Any:
        raise NotImplementedError("its examples are in files, and have no seed")


def number_bytes(text: str) -> list[int]:
    return list(text.encode())


class Masked(Table):
    """Units of one class are not scored, as padding is not."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        return cross_entropy(output, target), target != 0


class Weighted(Table):
    """The loss and a metric have weights, as means of sentences have numbers of words."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        return cross_entropy(output, target), target + 0.25

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        words = (target * 100.0).masked_fill(target == 1, self.settings.get("weight", 7.0))
        return {"accuracy": ((output.argmax(-1) == target).float(), words)}


class ByBatch(Table):
    """Its loss depends on which examples are in a batch; batches are of similar examples."""

    def training_step(self, model: nn.Module, batch: Any) -> StepLoss:
        outputs = model(batch[0])
        spread = outputs.var(0).sum()
        return StepLoss(cross_entropy(outputs, batch[1]).mean() - spread, parts={"spread": spread})

    def order(self, dataset: Any, batch_size: int, generator: torch.Generator) -> Any:
        first = torch.randperm(len(dataset) // 5, generator=generator) * 5
        return (first[:, None] + torch.arange(5)).flatten()


class InTurns(Table):
    """Two optimizers, the second with ten times the loss."""

    def optimizer(self, parameters: Any, participant: Participant) -> Any:
        parts = {"lower": parameters.of("0"), "upper": [*parameters.of("3"), *parameters.of("5")]}
        return {name: torch.optim.Adam(part, lr=0.01) for name, part in parts.items()}

    def training_step(self, model: nn.Module, batch: Any, optimizer: str = "") -> torch.Tensor:
        factor = 10.0 if optimizer == "upper" else 1.0
        return factor * cross_entropy(model(batch[0]), batch[1]).mean()


class Normalised(Table):
    """The same with batch normalisation."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


class Centred(Table):
    """In training takes away the mean output of the batch, or of the last, without a gradient."""

    last: Any = 0.0

    def forward(self, model: nn.Module, inputs: Any) -> Any:
        output = model(inputs)
        if not model.training:
            return output
        mean = output.mean(0).detach()
        if not self.settings.get("later"):
            return output - mean
        before = self.last
        self.last = mean
        return output - before


class Shifted(Table):
    """Takes away the example that was read before."""

    last: Any = 0.0

    def collate(self, rows: list[Any]) -> Any:
        inputs, target = super().collate(rows)
        before = self.last
        self.last = inputs
        return inputs - before, target


class Levelled(Table):
    """Keeps a running mean of what it has read in a buffer of its model."""

    def model(self) -> nn.Module:
        self.net = super().model()
        self.net.register_buffer("mean", torch.zeros(6))
        return self.net

    def collate(self, rows: list[Any]) -> Any:
        inputs, target = super().collate(rows)
        self.net.get_buffer("mean").lerp_(inputs.mean(0), 0.1)
        return inputs, target

    def forward(self, model: nn.Module, inputs: torch.Tensor) -> Any:
        return model(inputs - model.get_buffer("mean"))


class Tempered(Table):
    """Trains a factor of its outputs, which is no parameter of its model."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.factor = nn.Parameter(torch.ones(()))

    def loss(self, output: Any, target: Any) -> Any:
        return super().loss(output * self.factor, target)

    def optimizer(self, parameters: Any, participant: Participant) -> torch.optim.Optimizer:
        return torch.optim.SGD([*parameters, self.factor], lr=0.1)


class Diverging(Table):
    """Becomes infinite or NaN on one rank, independently of the processor's rounding.

    Settings: `rank` is the failing rank; `what` is `loss`, for the loss of each example, or
    `model`, for a parameter after optimizer step number `step`.
    """

    @property
    def _is_failing_rank(self) -> bool:
        return os.environ.get("RANK") == self.settings["rank"]

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        values = super().loss(output, target)
        return (
            values * math.nan
            if self._is_failing_rank and self.settings["what"] == "loss"
            else values
        )

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        optimizer = super().optimizer(parameters, participant)
        steps = itertools.count(1)

        def corrupt(*_: Any) -> None:
            if next(steps) == self.settings.get("step") and self._is_failing_rank:
                optimizer.param_groups[0]["params"][0].data.fill_(math.inf)

        optimizer.register_step_post_hook(corrupt)
        return optimizer


class Halved(Table):
    """Has a forward() that changes the inputs before the model."""

    def forward(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(inputs / 2)
        return output


class _Noisy(Dataset[Any]):
    """Adds random noise to each example whenever it is read."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.rows[index]
        return inputs + 0.1 * torch.randn(6), target


class Language(_Small):
    """A transformer with tied embeddings; padding is not scored, so ranks have unequal units."""

    def model(self) -> nn.Module:
        return TiedTransformer(WORDS)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scored = target >= 0
        return cross_entropy(output[scored], target[scored])

    def rows(self, count: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(WORDS, (count, 8), generator=generator)
        target = words.roll(-1, 1)
        lengths = torch.randint(1, 8, (count, 1), generator=generator)
        target[torch.arange(8).expand(count, 8) >= lengths] = -1
        return TensorDataset(words, target)


class Gpt(_Small):
    """A decoder with tied embeddings whose widths are divisible; at most five words are scored.

    Settings: `plan` gives plans of the task; `together` has one layer compute queries, keys and
    values, and calls all layers by keyword; `views` has blocks return views; `blocks` is the number
    of blocks, by default two.
    """

    def model(self) -> nn.Module:
        kind = FusedDecoderBlock if self.settings.get("together") else DecoderBlock
        if self.settings.get("views"):
            kind = ViewDecoderBlock
        return Decoder(self.settings.get("blocks", 2), tied=True, kind=kind)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scored = target >= 0
        return cross_entropy(output[scored].float(), target[scored])

    def rows(self, count: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(12, (count, 6), generator=generator)
        target = words.roll(-1, 1)
        lengths = torch.randint(1, 6, (count, 1), generator=generator)
        target[torch.arange(6).expand(count, 6) >= lengths] = -1
        return TensorDataset(words, target)

    def tensor_parallel_plan(self, model: nn.Module) -> Any:
        if "plan" not in self.settings:
            return None
        into, out = ColwiseParallel(), RowwiseParallel()
        words = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        head = ColwiseParallel(output_layouts=Replicate())
        plan = {"embed.words": words, "head": head, "blocks.*.up": into, "blocks.*.down": out}
        if self.settings["plan"] == "wrong":  # the outputs of `into` are never gathered
            return {**plan, "blocks.*.out": into}
        if self.settings["plan"] == "half":
            return {"head": head}
        if self.settings["plan"] == "misspelt":
            return {"layers.*.up": into}
        return {
            **plan,
            **dict.fromkeys(("blocks.*.q", "blocks.*.k", "blocks.*.v"), into),
            "blocks.*.out": out,
        }

    def shard_units(self, model: Any) -> Any:
        return list(model.blocks) if "plan" in self.settings else None

    def pipeline_stages(self, model: Any, n: int) -> Any:
        if "plan" not in self.settings:
            return None
        blocks = list(model.blocks)
        if n == len(blocks) + 2:  # embedding and head have their own stages
            parts = [[], *([block] for block in blocks), []]
        else:
            size = len(blocks) // n
            parts = [blocks[at * size : (at + 1) * size] for at in range(n)]
        if self.settings["plan"] == "shuffled":
            parts.reverse()
        parts[0].insert(0, model.embed)
        parts[-1] += [model.norm, model.head]
        return [nn.Sequential(*part) for part in parts]


class Adapted(_Small):
    """Adapters of PEFT over frozen layers, in whose type these compute."""

    def model(self) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        blocks = [nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)) for _ in range(3)]
        inner = nn.Sequential(nn.Embedding(12, 16), *blocks, nn.Linear(16, 12))
        model: nn.Module = get_peft_model(inner, LoraConfig(r=2, target_modules=r"\d\.[02]"))
        return model

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output.float().transpose(1, 2), target).mean(1)

    def rows(self, count: int, seed: int) -> TensorDataset:
        words = torch.randint(12, (count, 6), generator=torch.Generator().manual_seed(seed))
        return TensorDataset(words, words.roll(-1, 1))


class Padded(Gpt):
    """Words that are not scored are masked, and not selected."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        return cross_entropy(output.transpose(1, 2), target.clamp(min=0)), target >= 0


class Mixture(Gpt):
    """Its blocks have six experts, of which each word has two."""

    def model(self) -> nn.Module:
        return Decoder(self.settings.get("blocks", 2), tied=True, kind=MixtureBlock)


class PaddedMixture(Padded, Mixture):
    """Words that are not scored are masked."""


class EvenMixture(Padded):
    """Its experts have equally many words, as the report of memory assumes."""

    def model(self) -> nn.Module:
        return Decoder(self.settings.get("blocks", 2), tied=True, kind=EvenMixtureBlock)


class MostlyFrozen(Padded):
    """Most of it is frozen, as under adapters."""

    def model(self) -> nn.Module:
        model = super().model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("up" in name or "norm" in name)
        return model


class SkewedMixture(Mixture):
    """All words have the same two of six experts."""

    def model(self) -> nn.Module:
        return Decoder(2, tied=True, kind=functools.partial(MixtureBlock, skewed=True))


class OddExperts(Mixture):
    """What `experts` says of them cannot be divided among ranks."""

    def model(self) -> nn.Module:
        model = super().model()
        blocks: Any = model.blocks
        experts = blocks[1].experts
        kind = self.settings["experts"]
        if kind == "scaled":
            experts.scale = nn.Parameter(torch.ones(8))
        elif kind == "tied":
            model.up = experts.up
        elif kind in ("per expert", "in all"):
            blocks[1].experts = CountingExperts(6, 6 if kind == "per expert" else 1)
        elif kind == "one of two alike":
            for number, block in enumerate(blocks):
                block.experts.__class__ = SwitchedExperts
                block.experts.normalises = number == 1
        elif kind in _ODD_EXPERTS:
            experts.__class__ = _ODD_EXPERTS[kind]
        if kind in _ODD_BLOCKS:
            blocks[1].__class__ = _ODD_BLOCKS[kind]
        return model


_ODD_EXPERTS = {
    "normalised": NormalisedExperts,
    "normalised in training": NormalisedInTrainingExperts,
    "failing": FailingExperts,
    "lonely": LonelyExperts,
    "sparing": SparingExperts,
    "sequences": SequenceExperts,
}
_ODD_BLOCKS = {
    "at times": SometimesMixtureBlock,
    "sparing": SparingMixtureBlock,
    "sequences": SequenceMixtureBlock,
}


class Skipping(Gpt):
    """Cannot be split at its blocks: every block also takes the embedding."""

    def model(self) -> nn.Module:
        return SkippingDecoder(2, tied=False)


class Dropping(Gpt):
    """A decoder with dropout; settings: `p`, and `shared` for one module for all of it."""

    def model(self) -> nn.Module:
        return DroppingDecoder(self.settings.get("p", 0.5), self.settings.get("shared", False))


class Pictures(_Small):
    """A small convolutional network with GroupNorm."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.GroupNorm(2, 6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32, 10),
            nn.Tanh(),
            nn.Linear(10, CLASSES),
        )

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, target)

    def rows(self, count: int, seed: int) -> TensorDataset:
        inputs = torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(inputs, inputs.abs().sum((1, 2, 3)).long() % CLASSES)


class Faulty(Table):
    """Fails at chosen points on one rank or all, once or always.

    Settings:
      * fault: kill, stop, exit, raise or crash;
      * at: one point or several: `model`, `data`, the number of a loss, `forward`, `backward` or
        `step` and the number of a pass or of an optimizer step, `load` or `store` of a model file,
        `save` and the step of a checkpoint that is being written;
      * rank: the rank that fails; by default all;
      * once: prefix of files that record a failure, so that it is not repeated;
      * unhurried: a file; while it does not exist, forward passes take up to a second longer.
    """

    def __init__(self, settings: Any, data: Path | None = None) -> None:
        super().__init__(settings, data)
        self.losses = 0
        self.forwards = 0
        at = self.settings.get("at", [])
        points = [at] if isinstance(at, str) else at
        # Only if asked for: with differential privacy of examples a pass may not count.
        self.counts_losses = any(each.isdigit() or "backward" in each for each in points)
        self.counts_forwards = any("forward" in each for each in points)
        if "RANK" in os.environ:
            self._fail_before(isthmus_datacenter.training.round, "load_shards", "load")
            for module in (isthmus_datacenter.training.engine, isthmus_datacenter.training.round):
                self._fail_before(module, "store_shards", "store")
            begin = getattr(
                ShardedCheckpoints.begin_save, "__wrapped__", ShardedCheckpoints.begin_save
            )

            @functools.wraps(begin)
            def failing(checkpoints: ShardedCheckpoints, step: int, *more: Any) -> None:
                begin(checkpoints, step, *more)  # writing continues in the background
                self.maybe_fail(f"save {step}")

            ShardedCheckpoints.begin_save = failing  # type: ignore[method-assign]  # the engine constructs its own

    def _fail_before(self, owner: Any, name: str, point: str) -> None:
        """Patch a function of the engine, at points where no code of the task runs."""
        whole = getattr(owner, name)
        whole = getattr(whole, "__wrapped__", whole)

        @functools.wraps(whole)
        def failing(*arguments: Any) -> None:
            self.maybe_fail(point)
            whole(*arguments)

        setattr(owner, name, failing)

    def model(self) -> nn.Module:
        self.maybe_fail("model")
        model: Any = super().model()
        model[0].register_forward_pre_hook(lambda *_: self._before_forward())
        return model

    def rows(self, count: int, seed: int) -> Any:
        self.maybe_fail("data")
        return super().rows(count, seed)

    def _before_forward(self) -> None:
        if "unhurried" in self.settings and not Path(self.settings["unhurried"]).exists():
            # Some steps must remain when machines are taken away: about a second each.
            time.sleep(min(0.1 * self.forwards, 1.0))
        if self.counts_forwards or "unhurried" in self.settings:
            self.forwards += 1
        self.maybe_fail(f"forward {self.forwards}")

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.counts_losses:
            self.losses += 1
        self.maybe_fail(str(self.losses))
        if output.requires_grad:
            point = f"backward {self.losses}"
            output.register_hook(lambda gradient: self.maybe_fail(point))
        return super().loss(output, target)

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        optimizer = super().optimizer(parameters, participant)
        steps = itertools.count(1)
        optimizer.register_step_pre_hook(lambda *_: self.maybe_fail(f"step {next(steps)}"))
        return optimizer

    def maybe_fail(self, point: str) -> None:
        points = self.settings.get("at", [])
        if point not in ([points] if isinstance(points, str) else points):
            return
        if os.environ.get("RANK", "none") != self.settings.get("rank", os.environ.get("RANK")):
            return
        once = self.settings.get("once")
        if once is not None:
            happened = Path(f"{once}-{point}")
            if happened.exists():
                return
            happened.touch()
        fault = self.settings["fault"]
        if fault == "raise":
            raise ValueError("the shelf is empty")
        if fault == "exit":
            print("the accelerator is on fire", file=sys.stderr, flush=True)
            os._exit(7)
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "crash": signal.SIGSEGV}
        os.kill(os.getpid(), signals[fault])
