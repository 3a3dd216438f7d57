"""Benchmarks are scripts; their modules are imported from the benchmarks folder."""

import gzip
import random
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import compression_datacenters  # noqa: E402  it is in that folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Files in the form of the data sets that the benchmarks read."""
    draw = random.Random(1)
    folder = tmp_path_factory.mktemp("data")
    middles = [[draw.randint(2, 13) for _ in range(16)] for _ in range(26)]
    lines = []
    for _ in range(5500):
        letter = draw.randrange(26)
        cells = [str(value + draw.randint(-1, 1)) for value in middles[letter]]
        lines.append(",".join([chr(ord("A") + letter), *cells]))
    (folder / "letter-recognition.data").write_text("\n".join(lines) + "\n")
    count = 10_000
    for name, content in (
        ("images-idx3", bytes(16) + draw.randbytes(count * 28 * 28)),
        ("labels-idx1", bytes(8) + bytes(range(10)) * (count // 10)),
    ):
        packed = gzip.compress(content, compresslevel=0)
        (folder / f"mnist-t10k-{name}-ubyte.gz").write_bytes(packed)
    speakers = [*compression_datacenters.SPEAKERS.split(", "), *(f"NUMBER {i}" for i in range(40))]
    speeches = [f"{speaker}:\n{'to be or not to be ' * 150}" for speaker in speakers]
    (folder / "tinyshakespeare.txt").write_text("\n\n".join(speeches))
    return folder
