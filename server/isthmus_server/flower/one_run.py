"""What every Grid of ours has in common: it is of one run, and its messages are the server's."""

from __future__ import annotations

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from isthmus.integrations.flower.messages import SERVER_NODE, Run, message, the_run


class OneRun(Grid):
    """A Flower `Grid` of the one run that this server has."""

    def set_run(self, run: Run) -> None:
        """There is one."""

    @property
    def run(self) -> Run:
        """The one."""
        return the_run()

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message from the server."""
        return message(
            content, kind=message_type, source=SERVER_NODE, to=dst_node_id, group=group_id
        )
