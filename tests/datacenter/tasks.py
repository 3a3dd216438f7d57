"""Tasks that the ranks of these tests train: small, and able to misbehave when told to."""

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
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import Dataset, TensorDataset

import isthmus_datacenter.training.engine
import isthmus_datacenter.training.round
from isthmus import Participant, Task
from isthmus_datacenter.checkpointing.checkpoints import Checkpoints

CLASSES = 3
WORDS = 11


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, reduction="none")


class _Small(Task):
    """What the tasks here share; `settings` choose the optimizer, and how much is `held_out`."""

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

    @abc.abstractmethod
    def rows(self, count: int, seed: int) -> Any:
        """Examples, the same ones for the same seed."""


class Table(_Small):
    """An MLP on random tables; odd sizes, so that no shard is even."""

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


class Diverging(Table):
    """Leaves the finite numbers on one rank, whatever the kernels of this processor round to.

    what: `loss`, the one of each example; or `model`, after the step of that number.
    """

    @property
    def _is_it(self) -> bool:
        return os.environ.get("RANK") == self.settings["rank"]

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        values = super().loss(output, target)
        return values * math.nan if self._is_it and self.settings["what"] == "loss" else values

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        made = super().optimizer(parameters, participant)
        steps = itertools.count(1)

        def stepped(*_: Any) -> None:
            if next(steps) == self.settings.get("step") and self._is_it:
                made.param_groups[0]["params"][0].data.fill_(math.inf)

        made.register_step_post_hook(stepped)
        return made


class Halved(Table):
    """Does with its inputs what its model does not."""

    def forward(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(inputs / 2)
        return output


class _Noisy(Dataset[Any]):
    """Gives no example the same way twice."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.rows[index]
        return inputs + 0.1 * torch.randn(6), target


class Language(_Small):
    """A transformer with tied embeddings; padding is not scored, so ranks score unequally."""

    def model(self) -> nn.Module:
        return _Transformer()

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


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 12)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        output: torch.Tensor = self.head(self.norm(hidden))
        return output


class Gpt(_Small):
    """A decoder whose matrices divide: tied embedding, attention by heads, an MLP, at most five
    scored words. `plan` has it give plans of its own, `together` make queries, keys and values in
    one layer, and call all layers by keyword; `blocks` is how many it has, of two."""

    def model(self) -> nn.Module:
        kind = _Together if self.settings.get("together") else _Block
        return _Gpt(self.settings.get("blocks", 2), tied=True, kind=kind)

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
        if self.settings["plan"] == "wrong":  # what comes out of `into` is put together nowhere
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
        if n == len(blocks) + 2:  # what is around them has stages of its own
            parts = [[], *([block] for block in blocks), []]
        else:
            size = len(blocks) // n
            parts = [blocks[at * size : (at + 1) * size] for at in range(n)]
        if self.settings["plan"] == "shuffled":
            parts.reverse()
        parts[0].insert(0, model.embed)
        parts[-1] += [model.norm, model.head]
        return [nn.Sequential(*part) for part in parts]


class _Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.places = nn.Embedding(6, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.words(words) + self.places(torch.arange(words.shape[1]))
        return output


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.make()
        self.out = nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def make(self) -> None:
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def made(self, hidden: torch.Tensor) -> Iterable[torch.Tensor]:
        return self.q(hidden), self.k(hidden), self.v(hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made = self.made(self.first(hidden))
        q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in made)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.call(self.out, mixed.transpose(1, 2).flatten(-2))
        up = self.call(self.up, self.second(hidden))
        return hidden + self.call(self.down, nn.functional.gelu(up))

    def call(self, layer: nn.Module, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = layer(given)
        return output


class _Together(_Block):
    def make(self) -> None:
        self.c_attn = nn.Linear(8, 24)
        self.split_size = 8

    def made(self, hidden: torch.Tensor) -> Iterable[torch.Tensor]:
        return self.call(self.c_attn, hidden).split(self.split_size, -1)

    def call(self, layer: nn.Module, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = layer(input=given)
        return output


class _Gpt(nn.Module):
    def __init__(self, blocks: int, tied: bool, kind: type[_Block] = _Block) -> None:
        super().__init__()
        self.embed = _Embed()
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embed.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words=words)
        for block in self.blocks:
            hidden = block(hidden=hidden)
        output: torch.Tensor = self.head(self.norm(hidden))
        return output


class Skipping(Gpt):
    """Cannot be cut from the outside: every block sees the embedding."""

    def model(self) -> nn.Module:
        return _Skipping(2, tied=False)


class _Skipping(_Gpt):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        first = hidden = self.embed(words)
        for block in self.blocks:
            hidden = block(hidden) + first
        output: torch.Tensor = self.head(self.norm(hidden))
        return output


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
    """Does once, or always, what `settings` say, on one rank at certain places.

    fault: kill, stop, exit, raise; at: one place or several: `model`, `data`, the number of a loss,
    `forward`, `backward` or `step` and the number of a forward or backward pass or of a step of the
    optimizer, `load` or `store` of a model that is exchanged, `save` and the step whose checkpoint
    is being written; rank; once: what the names of files begin with that are made when it happened.
    unhurried: a file until which it takes its time.
    """

    def __init__(self, settings: Any, data: Path | None = None) -> None:
        super().__init__(settings, data)
        self.losses = 0
        self.forwards = 0
        if "RANK" in os.environ:
            self._fail_before(isthmus_datacenter.training.round, "load_shards", "load")
            for module in (isthmus_datacenter.training.engine, isthmus_datacenter.training.round):
                self._fail_before(module, "store_shards", "store")
            begin = getattr(Checkpoints.begin_save, "__wrapped__", Checkpoints.begin_save)

            @functools.wraps(begin)
            def failing(checkpoints: Checkpoints, step: int, *more: Any) -> None:
                begin(checkpoints, step, *more)  # it is written in the background
                self.maybe_fail(f"save {step}")

            Checkpoints.begin_save = failing  # type: ignore[method-assign]  # the engine makes its own

    def _fail_before(self, owner: Any, name: str, place: str) -> None:
        """Where the task has no code of its own."""
        whole = getattr(owner, name)
        whole = getattr(whole, "__wrapped__", whole)

        @functools.wraps(whole)
        def failing(*arguments: Any) -> None:
            self.maybe_fail(place)
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
            # So that there are steps left when machines are taken away: about a second each.
            time.sleep(min(0.1 * self.forwards, 1.0))
        self.forwards += 1
        self.maybe_fail(f"forward {self.forwards}")

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.losses += 1
        self.maybe_fail(str(self.losses))
        if output.requires_grad:
            place = f"backward {self.losses}"
            output.register_hook(lambda gradient: self.maybe_fail(place))
        return super().loss(output, target)

    def optimizer(
        self, parameters: Iterable[nn.Parameter], participant: Participant
    ) -> torch.optim.Optimizer:
        made = super().optimizer(parameters, participant)
        steps = itertools.count(1)
        made.register_step_pre_hook(lambda *_: self.maybe_fail(f"step {next(steps)}"))
        return made

    def maybe_fail(self, place: str) -> None:
        places = self.settings.get("at", [])
        if place not in ([places] if isinstance(places, str) else places):
            return
        if os.environ.get("RANK", "none") != self.settings.get("rank", os.environ.get("RANK")):
            return
        once = self.settings.get("once")
        if once is not None:
            happened = Path(f"{once}-{place}")
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
