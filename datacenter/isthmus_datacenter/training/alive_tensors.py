"""Bytes of the tensors that are alive, and their peak, while code runs.

PyTorch's `MemTracker` counts the same, for each module by kind. It has no frozen parameters, no
module that is called again before its backward pass, as the stages of a pipeline are, and follows
every call of every module, which takes most of its time. Here storages are counted when an operator
returns a tensor, and until they are freed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

Place = tuple[Hashable, int | None]
"""What happens, and the index of the block to which it does."""

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class _Storage:
    """One storage that is alive."""

    __slots__ = ("is_kept", "reference", "size")

    def __init__(self, reference: Any, size: int, *, is_kept: bool) -> None:
        self.reference = reference
        """Weak; its callback forgets the storage."""
        self.size = size
        self.is_kept = is_kept
        """Whether a forward pass has made it, outside of a backward pass."""


class AliveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch has no types for it
    """Within it, tensors that operators return are counted until they are freed.

    Tensors that were there before are counted if they are given to `add`. Those of DTensor are
    counted as the parts that this rank has.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        self.total = 0
        """Bytes at present."""
        self.peaks: dict[Place, int] = {}
        """The most bytes at any time of each place."""
        self._alive: dict[int, _Storage] = {}
        """By the identity of the storage's Python object, which lives as long as the storage."""
        self._place: Place | None = None
        self._fake_mode: Any = None
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_
        self._depth = 0

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are there; those of the forward pass are not among them."""
        for each in tensors:
            for storage in _storages(each):
                self._note(storage, is_kept=False)

    def now(self, what: Hashable, block: int | None = None) -> None:
        """Begin to keep the peak of what happens from now on."""
        self._place = (what, block)
        self._note_peak()

    def kept(self, others: Iterable[torch.Tensor]) -> int:
        """Bytes of what forward passes have made and is alive, without the storages of `others`."""
        left_out = {id(storage) for each in others for storage in _storages(each)}
        return sum(
            each.size for key, each in self._alive.items() if each.is_kept and key not in left_out
        )

    def __enter__(self) -> AliveTensors:
        """Begin to count. It can be entered again where a block has disabled it."""
        if not self._depth:
            self._fake_mode = active_fake_mode()
            storages: Any = torch.UntypedStorage
            self._resize = storages.resize_
            storages.resize_ = self._noting_sizes()
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        return self

    def __exit__(self, *args: Any) -> None:
        """Count no more."""
        super().__exit__(*args)  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        self._depth -= 1
        if not self._depth:
            storages: Any = torch.UntypedStorage
            storages.resize_ = self._resize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and count what it returns."""
        # Its operators on this rank's parts come here by themselves.
        if any(each is DTensor for each in types):
            return NotImplemented
        # With values it returns what it was given; without, PyTorch's version makes another.
        waits = func is _WAIT and active_fake_mode() is not None
        result = args[0] if waits else func(*args, **(kwargs or {}))
        # DTensor finds out shapes with tensors of a fake mode of its own.
        mode = active_fake_mode()
        if mode is None or mode is self._fake_mode:
            is_kept = torch._C._current_graph_task_id() == -1
            # Most operators return one tensor.
            leaves = (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
            for each in leaves:
                if isinstance(each, torch.Tensor):
                    for storage in _storages(each):
                        self._note(storage, is_kept=is_kept)
            self._note_peak()
        return result

    def _note(self, storage: torch.UntypedStorage, *, is_kept: bool) -> None:
        key = id(storage)
        known = self._alive.get(key)
        size = storage.size()
        if known is not None:
            self.total += size - known.size
            known.size = size
            return
        reference = weakref.ref(storage, functools.partial(self._forget, key))
        self._alive[key] = _Storage(reference, size, is_kept=is_kept)
        self.total += size

    def _forget(self, key: int, _: object) -> None:
        self.total -= self._alive.pop(key).size

    def _note_peak(self) -> None:
        place = self._place
        if place is not None and self.peaks.get(place, -1) < self.total:
            self.peaks[place] = self.total

    def _noting_sizes(self) -> Callable[..., Any]:
        """`resize_` of storages, which is no operator: `fully_shard` frees parameters by it."""
        resize = self._resize

        @functools.wraps(resize)
        def noted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self._alive.get(id(storage))
            if known is not None:
                self.total += storage.size() - known.size
                known.size = storage.size()
            return result

        return noted


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages of a tensor, or of those that it consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor.untyped_storage()
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            yield from _storages(part)
