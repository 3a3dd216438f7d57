"""`isthmus.load_model`: a run's model as the task's PyTorch module."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from isthmus.errors import UserError
from isthmus.task import Task, load_task
from isthmus_server.storage.damage_checks import FINAL_MODEL
from isthmus_server.storage.store import Store
from isthmus_server.strategy.policy import BEST, SERVED

if TYPE_CHECKING:
    from torch import nn

DELIVERED = "delivered"
LAST = "last"


class HasDirectory(Protocol):
    """What is read of a run, such as an `isthmus.Run`."""

    @property
    def directory(self) -> Path:
        """The run directory."""


def load_model(run: HasDirectory | Path | str, round: str | int = DELIVERED) -> nn.Module:  # noqa: A002 - as users call it
    """The task's model with the weights of a run, on the CPU and in evaluation mode.

    Args:
        run: the run, or its directory.
        round: `delivered`, the model that a finished run has written; `last`, that of the last
            committed round; `best` by `evaluation.keep_best`; or the number of such a round.

    Raises:
        UserError: the run has no such model, or its task cannot be loaded.
    """
    from isthmus.task.scoring import build_model
    from isthmus.tensors.division import divide

    directory = Path(run) if isinstance(run, Path | str) else run.directory
    with contextlib.closing(Store.open(directory)) as store:
        module = build_model(task_of(store), store.job.seed)
        layout = divide(module, store.job.exchange).exchanged
        payload = _payload(store, round, layout.nbytes)
    layout.scatter(layout.decode(payload), module)
    return module.eval()


def task_of(store: Store) -> Task:
    """The task of a run, loaded on this machine.

    Raises:
        TaskError: it cannot be loaded.
    """
    table = store.job.task
    data = table.data_in(store.base)
    return load_task(table.source, table.settings, base=store.base, data=data)


def _payload(store: Store, round_: str | int, size: int) -> bytearray:
    """The encoded model."""
    state, (_, _, final) = store.run_state(), store.status()
    if final is not None and round_ in (DELIVERED, final.round):
        return bytearray((store.directory / FINAL_MODEL).read_bytes())
    names: dict[Any, str] = {LAST: SERVED, state.round: SERVED, BEST: BEST}
    if BEST in state.models and state.models[BEST] == state.models.get(SERVED):
        names[BEST] = SERVED
    saved = None if state.model_in_datacenter else state.models.get(names.get(round_, ""))
    if saved is None:
        kept = [DELIVERED] if final is not None else []
        kept += [] if state.model_in_datacenter or not state.models else [LAST]
        kept += [BEST] if BEST in state.models else []
        raise UserError(
            f"{store.directory} has no model of round {round_!r}; it has "
            f"{', '.join(kept) or 'none yet'} (evaluation.keep_best keeps the best one)"
        )
    payload = bytearray(size)
    store.checkpoints.read_model(saved, payload)
    return payload
