"""Restore the buffers that a model was built with."""

from __future__ import annotations

from torch import nn


class InitialBuffers:
    """The buffers of a model as it was built, and their values, to restore both.

    Modules such as spectral normalisation change them in training. A model whose values are not
    finite would leave its traces in them, and a server could so make later updates of chosen
    devices unusable.
    """

    def __init__(self, model: nn.Module) -> None:
        """Copy the values."""
        self._saved = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    def restore(self) -> None:
        """Undo what has happened since."""
        for module, name, buffer, values in self._saved:
            # The object, too: a module may have put another tensor in its place.
            module._buffers[name] = buffer
            if buffer is not None and values is not None:
                buffer.data = values.clone()
