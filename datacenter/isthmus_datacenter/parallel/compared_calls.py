"""Refuse calls of a block unlike those by which it was compared with the whole model.

Two examples do not show what only other batches do: an argument that they leave out, or an
attention that is no `scaled_dot_product_attention` where a mask is given, and would see a rank's
own positions only. So what a block does in the comparison is noted, and something else in a step is
an error before it can change a parameter.
"""

from __future__ import annotations

from torch import nn

from isthmus.errors import TaskError


class ComparedCalls:
    """What a block does in its calls; all of it is allowed until the comparison is over."""

    def __init__(self, block: nn.Module) -> None:
        self._kind = type(block).__name__
        self._dims: dict[str, int | None] = {}
        """By argument, its dimension of positions; None if it does not belong to them."""
        self._attentions: set[int] = set()
        """Numbers of attentions in a call."""
        self._over = False

    def end(self) -> None:
        """The comparison is over: what is new from now on is an error."""
        self._over = True

    def dim_of_positions(
        self, name: str, shape: tuple[int, ...], own: int, positions: int
    ) -> int | None:
        """The dimension of an argument that is for all positions, as its first shape says.

        A width, the length of an encoder or the number of examples may be that of the positions of
        one batch by chance.

        Args:
            name: of the argument, as a path.
            shape: of the tensor.
            own: the number of a rank's positions.
            positions: the number of all.

        Raises:
            TaskError: it was not given before, or was for positions and has another length.
        """
        if name not in self._dims:
            if self._over:
                raise self._unlike(f"is given a tensor of shape {shape} as argument {name}")
            dims = [dim for dim in (1, 0) if dim < len(shape) and shape[dim] == positions]
            # Hidden states of an earlier block are for a rank's positions already.
            is_hidden = len(shape) == 3 and shape[1] == own
            self._dims[name] = dims[0] if dims and not is_hidden else None
        dim = self._dims[name]
        if dim is not None and (dim >= len(shape) or shape[dim] != positions):
            raise self._unlike(
                f"is given a tensor of shape {shape} as argument {name}, which is not for its "
                f"{positions} positions,"
            )
        return dim

    def attended(self, count: int) -> None:
        """Note the number of attentions in a call.

        Raises:
            TaskError: it is a new one.
        """
        if self._over and count not in self._attentions:
            raise self._unlike(f"calls scaled_dot_product_attention() {count} times")
        self._attentions.add(count)

    def _unlike(self, what: str) -> TaskError:
        return TaskError(
            f"context_parallel: a {self._kind} {what} and did not for the two examples by which it "
            "was compared with the whole model, so that its output may be wrong; have it do the "
            "same for all batches, or set context_parallel = 1"
        )
