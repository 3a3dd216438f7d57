"""Models of which a batch uses a part, and models with hardly any parameters."""

import itertools
import os
from pathlib import Path
from typing import Any

import torch
from tests.datacenter.tasks import Table, _Small
from torch import nn
from torch.utils.data import Dataset, TensorDataset


class Regression(_Small):
    """Base: a sum of eight numbers is learned, by the mean of squared differences."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2)[:, 0]

    def rows(self, count: int, seed: int) -> Any:
        inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Tiny(Regression):
    """As many elements as the setting `elements` says: 1, 2 or 3."""

    def model(self) -> nn.Module:
        return _Elements(self.settings["elements"])


class _Elements(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(min(count, 2)))
        if count > 2:
            self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = inputs.sum(1, keepdim=True) * self.scale.sum()
        return output + self.offset if hasattr(self, "offset") else output


class Linear(Regression):
    def model(self) -> nn.Module:
        return nn.Linear(8, 1)


class Experts(Regression):
    """A mixture of experts, whose examples are divided in the way of the setting `by`.

    Of five experts the last is never chosen.
    """

    def model(self) -> nn.Module:
        return _Mixture(self.settings["by"])


class _Mixture(nn.Module):
    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.first = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 8))
        self.gate = nn.Linear(8, 5)
        experts = [nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 6)) for _ in range(5)]
        if by == "name":
            self.experts: Any = nn.ModuleDict({f"e{at}": each for at, each in enumerate(experts)})
        else:
            self.experts = nn.ModuleList(experts)
        self.last = nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weights = self.gate(inputs + self.first(inputs)).softmax(-1)
        chosen = weights[:, :4].argmax(-1)
        hidden = inputs.new_zeros(len(inputs), 6)
        for index, rows in self._groups(chosen):
            expert = self.experts[f"e{index}" if self.by == "name" else index]
            outputs = expert(inputs[rows]) * weights[rows, index, None]
            hidden = hidden.index_add(0, rows, outputs)
        return self.last(hidden)

    def _groups(self, chosen: torch.Tensor) -> Any:
        """Numbers of experts, each with the indices of its examples."""
        if self.by == "unique":
            for index in chosen.unique().tolist():
                yield index, (chosen == index).nonzero()[:, 0]
        elif self.by == "list":
            listed = chosen.tolist()
            for index in sorted(set(listed)):
                yield index, torch.tensor([at for at, each in enumerate(listed) if each == index])
        else:
            for index in range(5):
                rows = (chosen == index).nonzero()[:, 0]
                if len(rows):
                    yield index, rows


class Blocks(Regression):
    """Blocks that every batch calls, with experts in each that a batch may not choose."""

    def model(self) -> nn.Module:
        return _Blocks(self.settings["by"])


class _Blocks(nn.Module):
    def __init__(self, by: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Mixture(by), _Mixture(by)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs
        for block in self.blocks:
            outputs = outputs + block(outputs)
        return outputs.mean(1, keepdim=True)


class Towers(Regression):
    """Each example passes through one of two towers of layers, by its first number."""

    def model(self) -> nn.Module:
        return _Towers()


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.high = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.shared = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.last = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        high = inputs[:, 0] > 0.7
        for layer in self.shared:
            inputs = inputs + layer(inputs).tanh()
        outputs = inputs
        for layers, chosen in ((self.high, high), (self.low, ~high)):
            if chosen.any():
                rows = chosen.nonzero()[:, 0]
                hidden = inputs[rows]
                for layer in layers:
                    hidden = hidden + layer(hidden).tanh()
                outputs = outputs.index_copy(0, rows, hidden)
        return self.last(outputs)


class Hidden(Regression):
    """The third batch leaves out a layer, which no batch before shows."""

    def model(self) -> nn.Module:
        return _Hidden()

    def shard_units(self, model: Any) -> Any:
        return list(model.layers) if self.settings.get("given") else None


class _Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.last = nn.Linear(8, 1)
        self.count = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        layers = list(self.layers)
        for layer in layers[:-1] if self.count == 3 else layers:
            inputs = inputs + layer(inputs).tanh()
        return self.last(inputs)


class Matrices(Table):
    """Trained by any optimizer: by Muon its matrices only, and by those of this file."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 12, bias=False), nn.Tanh(), nn.Linear(12, 3)
        )

    def optimizer(self, parameters: Any, participant: Any) -> Any:
        kind = self.settings["optimizer"]
        if kind == "Muon":
            parameters = [each for each in parameters if each.ndim == 2]
        options = {"lr": 0.02, **self.settings.get("options", {})}
        own = {each.__name__: each for each in (Lamb, Clipping, RatesByPlace)}
        return (own.get(kind) or getattr(torch.optim, kind))(parameters, **options)


class Lamb(torch.optim.Optimizer):
    """Moves each parameter in proportion to its norm, of the shard alone if `local` is true."""

    def __init__(self, parameters: Any, lr: float, local: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "local": local})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                gradient = each.grad
                if group["local"] and hasattr(each, "to_local"):
                    each, gradient = each.to_local(), gradient.to_local()
                ratio = (each.norm() / (gradient.norm() + 1e-6)).clamp(max=10.0)
                each.sub_(gradient * ratio, alpha=group["lr"])


class Clipping(torch.optim.SGD):
    """Limits the norm of the gradients of all its parameters, to `most`."""

    def __init__(self, parameters: Any, lr: float, most: float) -> None:
        super().__init__(parameters, lr)
        self._most = most

    def step(self, closure: Any = None) -> None:
        every = [each for group in self.param_groups for each in group["params"]]
        nn.utils.clip_grad_norm_(every, self._most)
        super().step()


class RatesByPlace(torch.optim.AdamW):
    """Gives each parameter another rate, by its place among those that it is given."""

    def __init__(self, parameters: Any, lr: float) -> None:
        groups = [
            {"params": [each], "lr": lr * 0.9**place} for place, each in enumerate(parameters)
        ]
        super().__init__(groups)


class Given(Experts):
    """Its experts are its units."""

    def shard_units(self, model: Any) -> Any:
        return list(itertools.chain(model.experts, [model.first]))


class Looping(Regression):
    """Reading on rank 1 loops until the file of the setting `release` exists."""

    def model(self) -> nn.Module:
        return nn.Linear(8, 1)

    def rows(self, count: int, seed: int) -> Any:
        return _Looping(super().rows(count, seed), Path(self.settings["release"]))


class _Looping(Dataset[Any]):
    def __init__(self, rows: Any, release: Path) -> None:
        self._rows = rows
        self._release = release

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        while os.environ["RANK"] == "1" and not self._release.exists():
            pass
        return self._rows[index]


class Wide(Regression):
    """Blocks whose layers are large enough to be gathered one by one.

    With the setting `decides` the values of a batch decide in which order the second block calls
    its layers.
    """

    def model(self) -> nn.Module:
        decides = self.settings.get("decides", False)
        blocks = [_WideBlock(decides=False), _WideBlock(decides=decides)]
        return nn.Sequential(nn.Linear(8, 768), *blocks, nn.Linear(768, 1))


class _WideBlock(nn.Module):
    def __init__(self, *, decides: bool) -> None:
        super().__init__()
        self.decides = decides
        self.norm = nn.LayerNorm(768)
        self.left = nn.Linear(768, 768)
        self.right = nn.Linear(768, 768)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.norm(hidden)
        if self.decides and inner[0, 0] < 0:
            right = self.right(inner)
            left = self.left(inner)
        else:
            left = self.left(inner)
            right = self.right(inner)
        return hidden + left.tanh() + right.sin()
