"""Models whose parameters are shared, kept or laid out as `fully_shard` does not expect it."""

from typing import Any

import torch
import torch.distributed as dist
from tests.datacenter.conditional_tasks import Regression
from torch import nn
from torch.distributed.tensor import DTensor

from isthmus.errors import TaskError

WIDTH = 8


class Shared(Regression):
    """Blocks that have a module in common: an activation function, or a norm that is outside, too.

    Settings: `what` is shared, and `units` names the children that are the task's sharding units.
    """

    def model(self) -> nn.Module:
        return _Shared(self.settings["what"])

    def shard_units(self, model: Any) -> Any:
        if "units" not in self.settings:
            return None
        return [model.get_submodule(name) for name in self.settings["units"]]


class _Shared(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        activation = nn.PReLU()
        self.blocks = nn.ModuleList(
            _Block(
                activation if what == "activation" else nn.PReLU(),
                self.norm if what == "norm" else nn.LayerNorm(WIDTH),
            )
            for _ in range(3)
        )
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        output: torch.Tensor = self.last(self.norm(inputs))
        return output


class _Block(nn.Module):
    def __init__(self, activation: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.activation = activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.activation(self.layer(self.norm(hidden)))
        return output


class Transposed(Regression):
    """A matrix whose elements are not in the order of its rows, as in `torch.channels_last`."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 1))
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
        return model


class Kept(Regression):
    """Adds a part of a parameter, of which a tensor was kept when the model was built.

    The setting `as` says how.
    """

    def model(self) -> nn.Module:
        return _Kept(self.settings["as"])


class _Kept(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        part = self.first.weight.detach()[0]
        self.kept: Any = [part] if kind == "list" else part.clone() if kind == "copy" else part

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        kept = self.kept[0] if isinstance(self.kept, list) else self.kept
        output: torch.Tensor = self.last(self.first(inputs).tanh() + kept)
        return output


class Turned(Regression):
    """Blocks that take and return transposed matrices, not in order in memory."""

    def model(self) -> nn.Module:
        return _Turned()


class _Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 16), nn.Unflatten(1, (4, 4)))
        self.blocks = nn.ModuleList(_Turning() for _ in range(4))
        self.last = nn.Sequential(nn.Flatten(), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        output: torch.Tensor = self.last(hidden)
        return output


class _Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(hidden.transpose(1, 2)).tanh().transpose(1, 2)
        return output


class Counted(Regression):
    """Blocks that count their calls in training in whole numbers, and weigh themselves by it."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(_Counting() for _ in range(2)), nn.Linear(WIDTH, 1))


class _Counting(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        output: torch.Tensor = hidden + self.layer(hidden) * (self.calls / (self.calls + 3))
        return output


class Remembering(Regression):
    """Blocks that keep something of each call in training, as an attribute, and use it.

    The setting `kind` says what it is: a number, a tensor, a list, a dict, or a table that is made
    in the first call, which is the same then.
    """

    def model(self) -> nn.Module:
        blocks = (_Remembering(self.settings["kind"]) for _ in range(2))
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 1))


class _Remembering(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.kind = kind
        self.calls = 0
        self.mean = torch.zeros(WIDTH)
        self.seen: list[int] = []
        self.counts = {"calls": 0}
        self.angles: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = hidden + self.down(self.up(hidden).tanh()) * self._weight(hidden)
        return output

    def _weight(self, hidden: torch.Tensor) -> Any:
        if not self.training:
            return 1.0
        if self.kind == "number":
            self.calls += 1
            return 1 / self.calls
        if self.kind == "tensor":
            self.mean.mul_(0.7).add_(hidden.detach().mean(0))
            return self.mean
        if self.kind == "list":
            self.seen.append(len(hidden))
            return 1 / len(self.seen)
        if self.kind == "dict":
            self.counts["calls"] += 1
            return 1 / self.counts["calls"]
        if self.angles is None:
            self.angles = torch.linspace(0.5, 1.5, WIDTH)
        return self.angles


class RefusedApart(Regression):
    """Refused by the second rank only, where the setting `where` says."""

    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
        )
        model.register_forward_pre_hook(lambda module, _: self._refuse_in_forward(module))
        return model

    def shard_units(self, model: nn.Module) -> None:
        self._refuse("shard_units")

    def tensor_parallel_plan(self, model: nn.Module) -> None:
        self._refuse("tensor_parallel_plan")

    def _refuse_in_forward(self, module: nn.Module) -> None:
        if any(isinstance(each, DTensor) for each in module.parameters()):
            self._refuse("sharded")
        self._refuse("training" if module.training else "forward")

    def _refuse(self, where: str) -> None:
        if self.settings["where"] == where and dist.get_rank() == 1:
            raise TaskError(f"no model for {where}")
