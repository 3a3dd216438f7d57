"""A trace of chosen steps, written by each rank: operators, kernels, collectives and memory.

`chrome://tracing` and https://ui.perfetto.dev show the trace, and https://pytorch.org/memory_viz
the memory of a GPU. On processors the trace has the allocations.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_ALLOCATIONS = 1_000_000
"""Allocations of a GPU that a snapshot has at most, the last ones."""


class StepTrace:
    """Traces the steps of one round that are among those chosen, on one rank.

    A trace that cannot be written is said, and does not end the training.
    """

    def __init__(self, steps: range, directory: Path, rank: int, device: torch.device) -> None:
        """Prepare; nothing is recorded before the first of the steps.

        Args:
            steps: from 0.
            directory: for the files of all ranks.
            rank: of this process.
            device: of this rank.
        """
        self.note = ""
        """Where the trace is, or why it is not; empty without one."""
        self._steps = steps
        self._directory = directory
        self._rank = rank
        self._device = device
        self._profiler: profile | None = None
        self._first = 0
        self._last = 0

    def before(self, step: int) -> None:
        """Note that a step is about to begin."""
        if step not in self._steps:
            return
        self._last = step
        if self._profiler is not None:
            return
        self._first = step
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
        self._profiler = profile(
            activities=activities, record_shapes=True, profile_memory=True, with_stack=True
        )
        self._profiler.start()

    def after(self, step: int) -> None:
        """Note that a step was taken, and write the trace after the last one."""
        if step + 1 not in self._steps:
            self.end()

    def end(self) -> None:
        """Write the trace if there is one: the round is over."""
        if self._profiler is None:
            return
        profiler = self._profiler
        profiler.stop()
        self._profiler = None
        steps = f"steps-{self._first + 1}-{self._last + 1}"
        path = self._directory / f"rank-{self._rank}.{steps}.json.gz"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
            if self._device.type == "cuda":
                memory = self._directory / f"rank-{self._rank}.{steps}.memory.pickle"
                torch.cuda.memory._dump_snapshot(str(memory))  # type: ignore[no-untyped-call]  # untyped in PyTorch
            self.note = f"a trace of each rank is in {self._directory} ({steps})"
        except (OSError, RuntimeError) as error:
            self.note = f"the trace of rank {self._rank} cannot be written to {path}: {error}"
            print(self.note, file=sys.stderr, flush=True)
        finally:
            self._forget_allocations()

    def abandon(self) -> None:
        """Stop to record, and write nothing; without effect if nothing is recorded."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
            self._forget_allocations()

    def _forget_allocations(self) -> None:
        """Have a GPU no longer note them: a rank that goes on would note those of all rounds."""
        if self._device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)
