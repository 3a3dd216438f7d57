"""The base class of the server's Flower grids: they serve one run and send as the server."""

from __future__ import annotations

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from isthmus_flower.messages import SERVER_NODE, Run, message, the_run


class RunScopedGrid(Grid):
    """A Flower `Grid` for the server's single run."""

    def set_run(self, run: Run) -> None:
        """Do nothing: the run is fixed."""

    @property
    def run(self) -> Run:
        """The server's run."""
        return the_run()

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message from the server to a node."""
        return message(
            content, kind=message_type, source=SERVER_NODE, to=dst_node_id, group=group_id
        )
