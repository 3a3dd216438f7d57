"""One update of a plaintext round, whose bytes have been received as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isthmus_server.model.fixed_point_sum import TILE
from isthmus_server.model.update_decoding import UpdateSpool, check_tile

if TYPE_CHECKING:
    from isthmus_server.regimes.context import FederatedContext


def decoded_update(context: FederatedContext, round_: int, spool: UpdateSpool) -> torch.Tensor:
    """Decode the bytes in a spool, by the job's codec if it has one, and check them: float32 (N).

    Raises:
        UpdateError: they are no update, or a value is not finite or out of range.
    """
    layout = context.layout
    if context.messages is None:
        return spool.read(layout)
    with spool.view() as message:
        vector = context.messages.decode(message, round_)
    for start in range(0, layout.size, TILE):
        check_tile(layout, start, vector[start : start + TILE])
    return vector
