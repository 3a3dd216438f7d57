"""The one model: its exchange set as a flat vector, the server optimizer, central evaluation.

The vector lives inside its own encoding (`payload`), and the optimizer's parameters are views of
it: what is sent, stored and stepped is one memory. What is handed out and evaluated is the *served*
model: the same memory, or an average of the rounds' models in one of its own. The module's
parameters are views of that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.utils.data import Dataset

from isthmus.errors import UpdateError
from isthmus.job import ServerOptimizer
from isthmus.task import Task, user_code
from isthmus.task.scoring import build_model, count_examples, evaluate
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_server.model.mmap_buffer import MmapBuffer
from isthmus_server.model.optimizers import make_optimizer


class GlobalModel:
    """The model the server holds.

    Guarantees:
      * one copy of the exchange set, whatever is done with it, and one more for a served average;
      * `content` always names the bytes in `payload`.
    """

    def __init__(
        self, task: Task, seed: int, optimizer: ServerOptimizer, served_average: float = 0.0
    ) -> None:
        """Build the task's model and the server optimizer.

        Args:
            task: what is learned.
            seed: of the job; the same one gives the same model.
            optimizer: for pseudo-gradients.
            served_average: how much of the served average stays each round; 0 serves the model.

        Raises:
            TaskError: the task's `model()` or what it returned does not do.
            JobError: no such optimizer, or it does not take these options.
        """
        self.task = task
        self.seed = seed
        self.module = build_model(task, seed)
        self.layout = TensorLayout.of(self.module)
        self._pages = MmapBuffer(self.layout.nbytes)
        self.resting: BinaryIO | None = None
        """The file that the model is in while its memory is given back."""
        self.payload[: len(self.layout.header)] = self.layout.header
        self._vector = self.layout.gather(self.module, self.layout.decode(self.payload))
        self.served_average = served_average
        self.served_payload = self._copy() if served_average else self.payload
        self.served_vector = self.layout.decode(self.served_payload)
        self.averaged = 0
        """Models in the served average so far."""
        self._views = {name: nn.Parameter(part) for name, part in self.layout.parts(self.vector)}
        self._share_memory()
        self.optimizer = make_optimizer(optimizer, list(self._views.values()))
        self._content: link_pb2.Blob | None = None
        self._stored: Path | None = None
        """A file that holds what `payload` holds."""
        self._held_out: Dataset[Any] | None = None
        """Read when it is first wanted, and kept: it may take a while."""

    @property
    def payload(self) -> memoryview:
        """The encoded model."""
        assert self.resting is None
        return self._pages.view

    @property
    def vector(self) -> torch.Tensor:
        """The model, float32 (N), within `payload`."""
        assert self.resting is None
        return self._vector

    @property
    def blob(self) -> link_pb2.Blob:
        """Name and size of the encoded model."""
        if self._content is None:
            self._content = describe(self.payload)
        return self._content

    @property
    def sha256(self) -> str:
        """The digest of the encoded model, in hexadecimal."""
        return self.blob.sha256.hex()

    @property
    def served_sha256(self) -> str:
        """The digest of the served model as it is encoded, in hexadecimal."""
        if not self.served_average:
            return self.sha256
        return describe(self.served_payload).sha256.hex()

    def initial(self) -> torch.Tensor:
        """The model that training began with: a new float32 vector (N)."""
        return self.layout.gather(build_model(self.task, self.seed))

    def replace(self, vector: torch.Tensor) -> None:
        """Take another model as it is: float32 (N)."""
        self.vector.copy_(vector)
        self.changed()

    def restart(self, vector: torch.Tensor) -> None:
        """Go on from another model (N); the served average begins anew with it."""
        self.replace(vector)
        if self.served_average:
            self.served_vector.copy_(vector)
            self.averaged = 1

    def average(self) -> None:
        """Take the model into the served average: of all so far, until those fill its window.

        With `served_average` = 0.9 the first ten rounds' models are averaged with equal weights,
        and from then on a tenth of each next one comes in.
        """
        if self.served_average:
            self.averaged += 1
            stays = min(self.served_average, 1 - 1 / self.averaged)
            self.served_vector.lerp_(self.vector, 1 - stays)

    def reset_optimizer(self) -> None:
        """Forget momentum, moments and step counts."""
        self.optimizer.state.clear()

    def is_stored(self, path: Path, sha256: str) -> None:
        """What is in `payload` is in a file, and has this digest, in hexadecimal."""
        self._content = link_pb2.Blob(sha256=bytes.fromhex(sha256), size=len(self.payload))
        self._stored = path

    def changed(self) -> None:
        """`payload` is another model: its name is to be found anew."""
        self._content = self._stored = None

    def step(self, pseudo_gradient: torch.Tensor) -> None:
        """One step of the server optimizer on a merged pseudo-gradient, float32 (N)."""
        for (_, view), (_, part) in zip(
            self._views.items(), self.layout.parts(pseudo_gradient), strict=True
        ):
            view.grad = part
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.changed()
        if not bool(torch.isfinite(self.vector.sum())) and not bool(
            torch.isfinite(self.vector).all()
        ):
            raise UpdateError(
                "the server optimizer made a model that is not finite; lower its lr "
                "(strategy.server_optimizer.options)"
            )

    def evaluate(self, batch_size: int) -> dict[str, float]:
        """Loss and metrics of the served model on the central held-out data."""
        if self._held_out is None:
            with user_code("eval_data()"):
                self._held_out = self.task.eval_data()
        data = self._held_out
        order = range(count_examples(data, "eval_data()"))
        self._refresh_module()
        device = torch.device("cpu")
        return evaluate(self.task, self.module, data, order, batch_size, device).result()

    # -- optimizer state, as tensors and plain numbers ---------------------------------------------

    def optimizer_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The optimizer's tensors by `parameter index.name`, and everything else as JSON data.

        Raises:
            UpdateError: the optimizer keeps something that is neither a tensor nor a number.
        """
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, Any] = {}
        for index, entries in self.optimizer.state_dict()["state"].items():
            for name, value in entries.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{index}.{name}"] = value
                elif value is None or isinstance(value, (bool, int, float)):
                    numbers[f"{index}.{name}"] = value
                else:
                    raise UpdateError(
                        f"{type(self.optimizer).__name__} keeps a {type(value).__name__} as "
                        f"{name!r}, which cannot be stored; choose another server optimizer"
                    )
        return tensors, numbers

    def load_optimizer_state(
        self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]
    ) -> None:
        """Put back what `optimizer_state` gave."""
        state: dict[int, dict[str, Any]] = {}
        for key, value in {**tensors, **numbers}.items():
            index, _, name = key.partition(".")
            state.setdefault(int(index), {})[name] = value
        table = self.optimizer.state_dict()
        table["state"] = state
        self.optimizer.load_state_dict(table)

    # -- memory ------------------------------------------------------------------------------------

    def rest(self, scratch: Path) -> None:
        """Give the model's memory back; until `wake` it is in a file only, `resting`.

        The file is the checkpoint that holds this model, or one in `scratch` that has no name.

        Raises:
            OSError: it cannot be opened, or written.
        """
        if self._stored is not None:
            file: BinaryIO = self._stored.open("rb")
        else:
            file = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - closed by `wake`
            file.write(self.payload)
            file.flush()
        self.resting = file
        self._pages.give_back()

    def wake(self) -> None:
        """Have the model again, if it rests.

        Raises:
            OSError: its file cannot be read; then there is no model any more.
        """
        if self.resting is None:
            return
        with self.resting as file:
            file.seek(0)
            if file.readinto(self._pages.view) != len(self._pages.view):  # type: ignore[attr-defined]  # files have it
                raise OSError(f"{file.name}, which holds the model, was cut short")
        self.resting = None

    def _copy(self) -> memoryview:
        pages = MmapBuffer(len(self.payload))
        pages.view[:] = self.payload
        return pages.view

    def _share_memory(self) -> None:
        parts = dict(self.layout.parts(self.served_vector))
        for name, parameter in self.module.named_parameters():
            if name in parts and parameter.dtype == torch.float32:
                parameter.data = parts[name]

    def _refresh_module(self) -> None:
        """Parameters of other dtypes are copies; bring them up to date."""
        parts = dict(self.layout.parts(self.served_vector))
        for name, parameter in self.module.named_parameters():
            if name in parts and parameter.dtype != torch.float32:
                parameter.data.copy_(parts[name])
