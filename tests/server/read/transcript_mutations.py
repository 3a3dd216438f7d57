"""Random single mutations of a transcript, each of which the verifier has to find.

`python -m tests.server.read.transcript_mutations FILE 10000` tries so many on a file.
"""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

from isthmus_verify.check import check
from isthmus_verify.violation import Violation


def mutated(data: bytes, dice: random.Random) -> tuple[str, bytes]:
    """One mutation that changes the transcript, and what it is."""
    lines = data.splitlines(keepends=True)
    while True:
        kind = dice.choice(
            ("bit", "bytes swapped", "lines swapped", "dropped", "repeated", "cut", "inserted")
        )
        changed = _changed(kind, data, list(lines), dice)
        if changed != data:
            return kind, changed


def _changed(kind: str, data: bytes, lines: list[bytes], dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    line = dice.randrange(len(lines))
    match kind:
        case "bit":
            flipped = bytes([data[at] ^ 1 << dice.randrange(8)])
            return data[:at] + flipped + data[at + 1 :]
        case "bytes swapped":
            changed = bytearray(data)
            other = dice.randrange(len(data))
            changed[at], changed[other] = changed[other], changed[at]
            return bytes(changed)
        case "lines swapped":
            other = dice.randrange(len(lines))
            lines[line], lines[other] = lines[other], lines[line]
        case "dropped":
            del lines[line]
        case "repeated":
            lines.insert(dice.randrange(len(lines) + 1), lines[line])
        case "cut":
            return data[:at]
        case _:
            return data[:at] + dice.randbytes(dice.randint(1, 8)) + data[at:]
    return b"".join(lines)


def unnoticed(data: bytes, count: int, seed: int) -> list[str]:
    """The mutations, of so many, that the verifier does not find."""
    check(io.BytesIO(data))  # it holds as it is
    dice = random.Random(seed)
    found = []
    for number in range(count):
        kind, changed = mutated(data, dice)
        try:
            check(io.BytesIO(changed))
        except Violation:
            continue
        found.append(f"{number}: {kind}")
    return found


if __name__ == "__main__":
    file, tries = sys.argv[1:]
    missed = unnoticed(Path(file).read_bytes(), int(tries), seed=0)
    print(f"{tries} mutations of {file}, {len(missed)} not noticed: {missed[:10]}")
    sys.exit(bool(missed))
