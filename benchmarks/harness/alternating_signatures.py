"""`isthmus run` in which every other block of rounds keeps what devices have signed.

In the other blocks nothing is written to `signed-sums.jsonl`, as in runs of which nothing is to be
proved. `round_overhead.py --signed` compares both, which are measured under the same load.
"""

from __future__ import annotations

from isthmus import cli
from isthmus_privacy.secagg.config import RoundConfig
from isthmus_privacy.secagg.messages import Roster
from isthmus_server.regimes.context import FederatedContext

BLOCK = 10
"""Rounds of a block, as in `harness/alternating.py`."""
_KEEP = FederatedContext.keep_signed


def is_kept(round_: int) -> bool:
    """Whether a round is in a block that keeps what is signed."""
    return (round_ - 1) // BLOCK % 2 == 1


def keep_signed(
    self: FederatedContext, config: RoundConfig, roster: Roster, *messages: bytes
) -> None:
    """Keep the messages of a sum if its round is in such a block."""
    if is_kept(config.round):
        _KEEP(self, config, roster, *messages)


def main() -> None:
    """Run the command `isthmus` with the arguments."""
    FederatedContext.keep_signed = keep_signed  # type: ignore[method-assign]  # for rounds in turn
    cli.main()


if __name__ == "__main__":
    main()
