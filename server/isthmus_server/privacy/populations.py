"""The ledgers of populations, which all jobs of a server share.

{directory}/{population}.ledger    see `isthmus_privacy.dp.ledger`
{directory}/{population}.head      its last line, so that a ledger that was cut is noticed
"""

from __future__ import annotations

from pathlib import Path

from isthmus.system.private_files import make_private_directory, write_private_file
from isthmus_privacy.dp.ledger import Ledger, LedgerDamaged, LedgerHead


def open_population(directory: Path, name: str) -> Ledger:
    """Open the ledger of a population to write, and begin it if there is none.

    Raises:
        LedgerDamaged: it was edited, cut or lost, or its head was.
        UserError: another process has it open.
    """
    make_private_directory(directory)
    path, head = directory / f"{name}.ledger", directory / f"{name}.head"
    known = LedgerHead.of(head.read_text()) if head.exists() else None
    if known is None and path.exists() and path.stat().st_size:
        raise LedgerDamaged(
            f"{head} is missing: what was spent of {name!r} is not known, so nobody is asked; "
            "restore it from a backup"
        )
    ledger = Ledger.open(path, known)
    try:
        ledger.remember = lambda last: write_private_file(head, str(last).encode())
        ledger.remember(ledger.head)
    except BaseException:
        ledger.close()
        raise
    return ledger
