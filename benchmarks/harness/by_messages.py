"""`isthmus run` whose server shares no memory: models and updates go through the connections.

So they do between machines. `round_overhead.py` measures large models in both ways.
"""

from __future__ import annotations

from isthmus import cli
from isthmus_server.transport import link


def main() -> None:
    """Run the command line in a process that belongs to no known machine."""
    link.machine = lambda: ""
    cli.main()


if __name__ == "__main__":
    main()
