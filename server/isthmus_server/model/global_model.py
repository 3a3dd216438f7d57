"""The global model: its exchange set as a flat vector, the server optimizer, central evaluation.

The vector is a view of its own encoding (`payload`), and the optimizer's parameters are views of
the vector: the model that is sent, stored and stepped is one block of memory. The *served* model,
which is published and evaluated, is the same block, or a moving average of the rounds' models in a
second one. The module's parameters are views of the served model.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from isthmus.errors import JobError, UpdateError, UserError
from isthmus.job import Job, ServerOptimizer
from isthmus.job.exchange import ExchangeSection
from isthmus.start.slices import StartSlices
from isthmus.system.process import trim_freed_memory
from isthmus.task import Task
from isthmus.task.held_out import HeldOut
from isthmus.task.scoring import build_model, build_start_model, evaluate
from isthmus.task.scoring.building import start_without_memory
from isthmus.task.scoring.frozen_form import ParameterMemory
from isthmus.tensors.division import divide
from isthmus.tensors.fingerprint import Fingerprint, fingerprint, fingerprint_of_rows
from isthmus.tensors.finite import is_finite
from isthmus.tensors.structure import Structure
from isthmus.transport.blobs import describe
from isthmus.wire import link_pb2
from isthmus_privacy.compression.changes import ChangesCodec, changes_codec
from isthmus_privacy.compression.sum_codecs import check_sums
from isthmus_server.model.mmap_buffer import MmapBuffer
from isthmus_server.model.model_changes import ModelChanges, OfferedChange, is_state
from isthmus_server.model.optimizers import make_optimizer


class GlobalModel:
    """The model of a run on the server.

    Guarantees:
      * one copy of the exchange set in memory, and a second one only for a served average;
      * `blob` always names the bytes in `payload`.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        optimizer: ServerOptimizer,
        served_average: float = 0.0,
        exchange: ExchangeSection | None = None,
        *,
        shared: bool = False,
        build: Callable[[], nn.Module] | None = None,
        outline: Callable[[], tuple[nn.Module, StartSlices] | None] = lambda: None,
    ) -> None:
        """Build the task's model and the server optimizer.

        Args:
            task: the task to learn.
            seed: of the job; the same seed gives the same initial model.
            optimizer: the server optimizer, which steps on pseudo-gradients.
            served_average: decay of the moving average that is served, 0 to 1; 0 serves the model.
            exchange: what is exchanged; None for the defaults.
            shared: whether participants on this machine may open the model's memory.
            build: makes the initial model, each time the same; None for the task's by the seed.
            outline: makes the same model without memory, and finds the files with its values, if
                that can be done; then a module is only built when it is needed.

        Raises:
            TaskError: the task's `model()` failed, or its result cannot be used.
            JobError: unknown optimizer, or options that it does not accept; the files with the
                values cannot be read; or see `divide`.
        """
        self.task = task
        self._build = build or (lambda: build_model(task, seed))
        self._exchange = exchange or ExchangeSection()
        self._module: nn.Module | None = None
        self._structure: Structure | None = None
        outlined = outline()
        if outlined is None:
            self._module = self._build()
            division = divide(self._module, self._exchange)
            self._structure = Structure.of(self._module)  # with what the division has frozen
        else:
            division = divide(outlined[0], self._exchange, unfilled=True)
        self.layout = division.exchanged
        self.personal = division.personal
        """What stays on each device; here it has its initial values."""
        self._shared = shared
        self._buffer = MmapBuffer(self.layout.nbytes, shared=shared)
        self.spilled: io.BufferedReader | io.BufferedRandom | None = None
        """The file that holds the model while its memory is released; otherwise None."""
        self._write_header()
        self._vector = self.layout.decode(self.payload)
        whole = self._module if outlined is None else outlined[0]
        assert whole is not None
        self.memory = ParameterMemory.of(whole, self.layout, self.personal)
        """Memory of the model on a device."""
        self.frozen = self._fill(outlined)
        """The fingerprint of what is not trained here, nor personal."""
        self.served_average = served_average
        self.served_payload = self._copy() if served_average else self.payload
        self.served_vector = self.layout.decode(self.served_payload)
        self.averaged = 0
        """Number of models in the served average."""
        parts = self.layout.parts(self.vector)
        entries = list(zip(self.layout.entries, (part for _, part in parts), strict=True))
        self._views = [nn.Parameter(part) for entry, part in entries if not entry.statistic]
        self._variances = [
            part
            for entry, part in entries
            if entry.statistic and entry.name.endswith("running_var")
        ]
        if self._module is not None:
            self._share_memory(self._module)
        trim_freed_memory()  # of the parameters, which the module had until now
        self.optimizer = make_optimizer(optimizer, self._views)
        self._changes: ModelChanges | None = None
        self._blob: link_pb2.Blob | None = None
        self._stored: Path | None = None
        """A file with the same bytes as `payload`, if there is one."""
        self._held_out = HeldOut(task)

    @classmethod
    def of(cls, job: Job, task: Task, base: Path, *, shared: bool = False) -> GlobalModel:
        """The model of a job; raises the same errors, and those of `check_sums`.

        `base` is the directory of the job's relative paths.
        """
        model = cls(
            task,
            job.seed,
            job.strategy.server_optimizer,
            job.strategy.served_average,
            job.exchange,
            shared=shared,
            build=lambda: build_start_model(task, job, base),
            # Elsewhere the server evaluates the model, for which it needs all of it.
            outline=lambda: (
                start_without_memory(task, job, base)
                if job.strategy.policy == "datacenter"
                else None
            ),
        )
        if (codec := changes_codec(job, model.layout)) is not None:
            model.round_changes(codec)
        check_sums(job, model.layout)
        return model

    def round_changes(self, codec: ChangesCodec) -> None:
        """Round the model's changes from here on, so that they can be sent in its place."""
        self._changes = ModelChanges(codec)

    @property
    def module(self) -> nn.Module:
        """The module, whose parameters of type float32 are views of the served model.

        Raises:
            TaskError: it had to be built, and the task's `model()` failed.
            JobError: it had to be built, and the files of its start cannot be used.
        """
        if self._module is None:
            module = self._build()
            divide(module, self._exchange)
            self._structure = Structure.of(module)
            self._share_memory(module)
            self._module = module
        return self._module

    def _fill(self, outlined: tuple[nn.Module, StartSlices] | None) -> Fingerprint:
        """Fill the vector with the initial model's values; returns its fingerprint."""
        if outlined is None:
            assert self._module is not None
            self.layout.gather(self._module, self._vector)
            return fingerprint(self._module, self.personal.names)
        model, values = outlined
        try:
            for name, part in self.layout.parts(self._vector):
                part.copy_(values.read(name))
            found = fingerprint_of_rows(model, values.read, self.personal.names)
            values.check()
        except UserError as error:
            raise JobError(f"model.start: {error}") from None
        return found

    @property
    def payload(self) -> memoryview:
        """The encoded model."""
        assert self.spilled is None
        return self._buffer.view

    @property
    def vector(self) -> torch.Tensor:
        """The model, float32 (N), within `payload`."""
        assert self.spilled is None
        return self._vector

    @property
    def blob(self) -> link_pb2.Blob:
        """Name and size of the encoded model."""
        if self._blob is None:
            self._blob = describe(self.payload)
        return self._blob

    @property
    def sha256(self) -> str:
        """The SHA-256 of the encoded model, in hexadecimal."""
        return self.blob.sha256.hex()

    @property
    def served_sha256(self) -> str:
        """The SHA-256 of the encoded served model, in hexadecimal."""
        if not self.served_average:
            return self.sha256
        return describe(self.served_payload).sha256.hex()

    def initial(self) -> torch.Tensor:
        """The initial model of the run: a new float32 vector (N)."""
        return self.layout.gather(self._build())

    def replace(self, vector: torch.Tensor) -> None:
        """Replace the model by `vector`, float32 (N)."""
        self.vector.copy_(vector)
        self.mark_changed()

    def restart(self, vector: torch.Tensor) -> None:
        """Continue from another model, float32 (N), and reset the served average to it."""
        self.replace(vector)
        if self.served_average:
            self.served_vector.copy_(vector)
            self.averaged = 1

    def average(self) -> None:
        """Add the model to the served average, if the job has one.

        The average is the plain mean until its window is full: with `served_average` = 0.9 the
        first ten rounds' models have equal weights, and each later model has a weight of 0.1.
        """
        if self.served_average:
            self.averaged += 1
            decay = min(self.served_average, 1 - 1 / self.averaged)
            self.served_vector.lerp_(self.vector, 1 - decay)

    def reset_optimizer(self) -> None:
        """Forget momentum, moments and step counts."""
        self.optimizer.state.clear()

    @contextlib.contextmanager
    def being_filled(self) -> Iterator[memoryview]:
        """The bytes of `payload`, to receive another encoded model into.

        If that fails, the model is undefined, as after `leave`.
        """
        self.mark_changed()
        try:
            yield self.payload
        finally:
            self._write_header()

    def leave(self) -> None:
        """Give up a model that has become another one elsewhere: it is undefined afterwards.

        The memory of a large one is released until it is written again.
        """
        self._buffer.release()
        self._write_header()

    def mark_stored(self, path: Path, sha256: str) -> None:
        """Record that the file `path` holds the bytes of `payload`, with this SHA-256 in hex."""
        self._blob = link_pb2.Blob(sha256=bytes.fromhex(sha256), size=len(self.payload))
        self._stored = path

    def mark_changed(self) -> None:
        """Record that `payload` was modified: its digest must be computed again."""
        self._blob = self._stored = None

    def step(self, pseudo_gradient: torch.Tensor) -> None:
        """One step of the server optimizer on a merged pseudo-gradient, float32 (N).

        Raises:
            UpdateError: the new model is not finite.
        """
        changes = self._changes
        before: torch.Tensor | None = None
        base = b""
        if changes is not None:
            before = self.vector.clone()
            base = self.blob.sha256
        for view, (_, part) in zip(self._views, self.layout.parts(pseudo_gradient), strict=False):
            view.grad = part
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # Running statistics (BatchNorm) follow the parameters, and become the participants' mean.
        trained = self.layout.trained_size
        self.vector[trained:].sub_(pseudo_gradient[trained:])
        for variance in self._variances:  # near zero, rounding can give a mean below it
            variance.clamp_(min=0.0)
        self.mark_changed()
        if not is_finite(self.vector):
            raise UpdateError(
                "the server optimizer produced a model that is not finite; lower its lr "
                "(strategy.server_optimizer.options)"
            )
        if changes is not None and before is not None:
            change = changes.round_step(before, base, self.vector)
            changes.note(base, self.blob.sha256, change)

    @property
    def offered_changes(self) -> list[OfferedChange]:
        """What leads from models of earlier rounds to this one."""
        return [] if self._changes is None else self._changes.offers(self.blob.sha256)

    def evaluate(self, batch_size: int) -> dict[str, float]:
        """Loss and metrics of the served model on the central held-out data.

        Those on `Task.public_eval` have the prefix `public_`.

        Raises:
            TaskError: the task's code raised, or it changed what the model consists of, which then
                is not what was trained.
        """
        device = torch.device("cpu")

        def measure(data: Dataset[Any], count: int) -> dict[str, float]:
            module = self.module
            self._refresh(module)
            return evaluate(self.task, module, data, range(count), batch_size, device).result()

        figures = self._held_out.measure(measure)
        if self._structure is not None and self._module is not None:
            self._structure.check(self._module)
        return figures

    # -- optimizer state, as tensors and plain numbers ---------------------------------------------

    def optimizer_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The optimizer's tensors by `parameter index.name`, and its other values as JSON data.

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
        if self._changes is not None:
            more_tensors, more_numbers = self._changes.state()
            tensors = tensors | more_tensors
            numbers = numbers | more_numbers
        return tensors, numbers

    def load_optimizer_state(
        self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]
    ) -> None:
        """Restore the state that `optimizer_state` returned."""
        state: dict[int, dict[str, Any]] = {}
        if self._changes is not None:
            self._changes.load_state(tensors, numbers)
        for key, value in {**tensors, **numbers}.items():
            if is_state(key):
                continue
            index, _, name = key.partition(".")
            state.setdefault(int(index), {})[name] = value
        table = self.optimizer.state_dict()
        table["state"] = state
        self.optimizer.load_state_dict(table)

    # -- memory ------------------------------------------------------------------------------------

    def spill(self, scratch: Path) -> None:
        """Release the model's memory; until `restore`, only the file `spilled` holds the model.

        The file is the checkpoint with this model, or an unlinked temporary file in `scratch`.

        Raises:
            OSError: the file cannot be opened or written.
        """
        if self._stored is not None:
            file: io.BufferedReader | io.BufferedRandom = self._stored.open("rb")
        else:
            file = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - closed by `restore`
            file.write(self.payload)
            file.flush()
        self.spilled = file
        self._buffer.release()

    def abandon_spilled(self) -> None:
        """Leave a spilled model, as by `leave`; does nothing if it is not spilled."""
        if self.spilled is not None:
            self.spilled.close()
            self.spilled = None
            self._write_header()

    def restore(self) -> None:
        """Read a spilled model back into memory; does nothing otherwise.

        Raises:
            OSError: the file cannot be read; the model is lost then.
        """
        if self.spilled is None:
            return
        with self.spilled as file:
            file.seek(0)
            if file.readinto(self._buffer.view) != len(self._buffer.view):
                raise OSError(f"{file.name}, which holds the model, was cut short")
        self.spilled = None

    def _write_header(self) -> None:
        self.payload[: len(self.layout.header)] = self.layout.header

    def _copy(self) -> memoryview:
        buffer = MmapBuffer(len(self.payload), shared=self._shared)
        buffer.view[:] = self.payload
        return buffer.view

    def _share_memory(self, module: nn.Module) -> None:
        for tensor, part in self._exchanged(module):
            if tensor.dtype == torch.float32:
                tensor.data = part

    def _refresh(self, module: nn.Module) -> None:
        """Update the parameters of other dtypes, which are copies and not views."""
        for tensor, part in self._exchanged(module):
            if tensor.dtype != torch.float32:
                tensor.data.copy_(part)

    def _exchanged(self, module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each exchanged parameter and buffer of the module, and its part of the served model."""
        tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
        for name, part in self.layout.parts(self.served_vector):
            yield tensors[name], part
