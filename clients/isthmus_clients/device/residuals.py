"""What a device has not sent of its updates yet: elements left out, and what rounding took away.

A residual belongs to the sum that it was computed for. It counts once that sum is committed, which
the server says with the next request; until then the residual before it is kept too. So an
attempt that fails, or a kill at any moment, neither loses nor repeats what was to be sent later.

A device trains from the round's model and a part of what it has not sent (step-ahead error
feedback: Xu et al. 2021, where it is all of it). Otherwise it would take the same step again in
every round until that arrives, and all of them would then be applied at once.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from isthmus.errors import UpdateError
from isthmus.system.private_files import make_private_directory, write_private_file
from isthmus.tensors.finite import is_finite
from isthmus_privacy.compression.update_codec import magnitude_of
from isthmus_privacy.secagg.config import RoundConfig

log = logging.getLogger(__name__)

MAX_RUNS = 8
"""Runs of one device whose residuals are kept, those used last."""

NO_SUM = (0, 0)
_NAME = "residual"
_SHARE = "share"
_WEIGHT_MAX = "weight_max"
_SUFFIX = ".safetensors"


class Residuals:
    """The residuals of devices, in a directory for each device and run.

    Guarantees:
      * files are written atomically and readable by their owner only;
      * of each run there are at most two: of the last committed sum, and of the one after it.
    """

    def __init__(self, directory: Path | None) -> None:
        """Set up; without a directory the residuals end with this object."""
        self._directory = directory
        self._memory: dict[tuple[str, str], dict[str, bytes]] = {}

    def open(self, run_id: str, device: str, committed: tuple[int, int], size: int) -> Residual:
        """The residual that the next update of a run is added to.

        Args:
            run_id: of the run.
            device: name of the device: several on one machine may share the directory.
            committed: round and attempt of the last committed sum that has an update of this
                device; `NO_SUM` for none.
            size: N, elements of an update.

        Raises:
            UserError: the directory cannot be made.
        """
        if self._directory is None:
            memory = self._memory.setdefault((run_id, device), {})
            return Residual(None, memory, committed, size)
        runs = self._directory / _hashed(device)
        folder = runs / _hashed(run_id)
        for each in (self._directory, runs, folder):
            make_private_directory(each)
        others = [each for each in runs.iterdir() if each != folder and each.is_dir()]
        others.sort(key=lambda each: each.stat().st_mtime, reverse=True)
        for other in others[MAX_RUNS - 1 :]:
            log.info("removing what was to be sent in an earlier run, %s", other)
            shutil.rmtree(other, ignore_errors=True)
        return Residual(folder, {}, committed, size)


class Residual:
    """The residual of one run, for one attempt."""

    def __init__(
        self, folder: Path | None, memory: dict[str, bytes], committed: tuple[int, int], size: int
    ) -> None:
        """Load the residual of the `committed` sum; zeros (N = `size`) if there is none."""
        self._folder = folder
        self._memory = memory
        self._base = _file_name(committed)
        self.vector = torch.zeros(size)
        """(N) float32: weight / largest weight x update, as far as it was not sent."""
        self._weight_max = 0
        """The largest weight in it; 0 as long as there is none."""
        self._share = 0.0
        """Weight / largest weight of the updates, the largest if the device's examples changed, so
        that no step ahead is too long."""
        self._was_usable = False
        """Whether there is an update, and the last one was sent."""
        self.digest = b""
        """SHA-256 of what it was loaded from, which names its content; empty for zeros."""
        self._unsent: torch.Tensor | None = None
        if committed != NO_SUM:
            self._load(size)

    def step_ahead(self, model: torch.Tensor, trained: int, part: float = 1.0) -> None:
        """Add to a model (N) a part of what this device has not sent.

        With 1 it becomes what it would be if the device had sent everything, where it would be
        alone: the others have not sent everything either. Not to the elements after the first
        `trained`, running statistics: a variance could become negative. And not after an update
        that was not finite, so that a device can recover.
        """
        if self._was_usable:
            model[:trained].sub_(self.vector[:trained], alpha=part / self._share)

    def add_to(
        self, update: torch.Tensor, examples: int, config: RoundConfig
    ) -> tuple[torch.Tensor, float]:
        """Weigh an update, and add what earlier ones left; an update that is not finite stays.

        Args:
            update: (N) float32, changed in place.
            examples: weight of the update.
            config: with a codec.

        Returns:
            What is to be sent (N), and the magnitude of the elements that the codec will send.
        """
        if not is_finite(update):
            return update, 0.0
        weight_max = config.weight_max
        if self._weight_max not in (0, weight_max):  # it follows the devices' numbers of examples
            factor = self._weight_max / weight_max
            self.vector.mul_(factor)
            self._share *= factor
        self._weight_max = weight_max
        share = min(examples, weight_max) / weight_max
        self._share = max(self._share, share)
        update.mul_(share).add_(self.vector)
        self._unsent = update
        assert config.codec is not None
        codec = config.codec.in_round(config.round, config.size)
        try:
            sent = codec.project(update)
        except UpdateError:  # which the encoding will report; then this update does not count
            return update, 0.0
        return update, magnitude_of(sent)

    def save(self, about: tuple[int, int], sent: torch.Tensor | None) -> None:
        """Store what a sum that is not committed yet leaves and keep what the one before it left.

        Args:
            about: round and attempt of the sum.
            sent: (N) float32, the part of the result of `add_to` that is in the masked vector. None
                if it could not be encoded: then it does not count, and nothing of it stays.

        Raises:
            OSError: it cannot be written.
        """
        left = self.vector
        share = torch.tensor(-self._share, dtype=torch.float64)
        if self._unsent is not None and sent is not None:
            left = self._unsent.sub_(sent)
            share.neg_()
        name = _file_name(about)
        weight_max = torch.tensor(self._weight_max, dtype=torch.int64)
        data = save({_NAME: left.contiguous(), _SHARE: share, _WEIGHT_MAX: weight_max})
        data = hashlib.sha256(data).digest() + data
        if self._folder is None:
            base = self._memory.get(self._base)
            self._memory.clear()
            if base is not None:
                self._memory[self._base] = base
            self._memory[name] = data
            return
        for each in self._folder.glob(f"*{_SUFFIX}"):
            if each.name != self._base:
                each.unlink()
        write_private_file(self._folder / name, data)

    def _load(self, size: int) -> None:
        """Read the residual; a missing or damaged one is reported, and counts as zeros."""
        try:
            if self._folder is None:
                data = self._memory[self._base]
            else:
                data = (self._folder / self._base).read_bytes()
            digest = data[:32]
            data = data[32:]
            if hashlib.sha256(data).digest() != digest:
                raise ValueError("it is damaged")
            tensors = load(data)
            vector = tensors[_NAME]
            share = float(tensors[_SHARE])
            weight_max = int(tensors[_WEIGHT_MAX])
            if vector.shape != (size,) or vector.dtype != torch.float32:
                raise ValueError("it is of another model")
            self.vector = vector
            self._share = abs(share)
            self._was_usable = share > 0
            self._weight_max = weight_max
            self.digest = digest
        except (KeyError, OSError, SafetensorError, ValueError) as error:
            log.warning(
                "what was left of this device's updates before is not sent any more: %s of the "
                "last sum cannot be used (%s)",
                self._base,
                error,
            )


def _hashed(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _file_name(about: tuple[int, int]) -> str:
    round_, attempt = about
    return f"{round_}-{attempt}{_SUFFIX}"
