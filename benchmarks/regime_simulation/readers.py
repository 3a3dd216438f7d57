"""Read the data sets of `data_sets.py` as tensors, from the files that a user gives.

Each reader returns training and test rows. A row has inputs, a target, and a *kind*: the class,
source or range by which a scenario divides rows between the datacenter and the devices.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

TEST_PART = 4
"""Data sets without a test set: every fourth row, in a fixed random order, is a test row."""
CONTEXT = 8
"""Characters from which the next one is predicted."""
SPEAKERS = 60
"""The speakers with the most text."""
WINDOWS = (1200, 60)
"""Largest numbers of training and of test rows of a speaker."""
LANGUAGES = (
    *("da", "nb", "sv", "de", "nl", "en", "es", "pt"),
    *("it", "fr", "ca", "ro", "cs", "sk", "hr", "sl"),
)
NAMES = 400
"""Largest number of names of a language."""
NGRAMS = 384
"""Size of the table into which the letter pairs and triples of a name are hashed."""
MNIST_FILES = ("mnist-t10k-images-idx3-ubyte.gz", "mnist-t10k-labels-idx1-ubyte.gz")
RANGES = 8
"""Ranges of a regression's target, with equal numbers of rows."""


class Rows(NamedTuple):
    """Inputs (n, ...), targets (n) and kinds (n)."""

    inputs: torch.Tensor
    target: torch.Tensor
    kind: torch.Tensor

    def at(self, index: torch.Tensor | slice) -> Rows:
        """Some of the rows."""
        return Rows(self.inputs[index], self.target[index], self.kind[index])


def letters(folder: Path) -> tuple[Rows, Rows]:
    """UCI letter recognition: 16 numbers of a capital letter; the last 4,000 rows are for tests."""
    lines = (folder / "letter-recognition.data").read_text(encoding="ascii").split()
    table = [line.split(",") for line in lines]
    target = torch.tensor([ord(row[0]) - ord("A") for row in table])
    inputs = torch.tensor([[float(cell) for cell in row[1:]] for row in table])
    if inputs.shape[1] != 16 or len(inputs) <= 4000 or not target.min() >= 0:
        raise ValueError(f"it has {tuple(inputs.shape)} numbers")
    train = inputs[:-4000]
    rows = Rows((inputs - train.mean(0)) / train.std(0), target, target)
    return rows.at(slice(None, -4000)), rows.at(slice(-4000, None))


def mnist_images(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The 10,000 test images of MNIST, float32 (10000, 1, 28, 28) from 0 to 1, and their digits."""
    images, labels = (gzip.decompress((folder / name).read_bytes()) for name in MNIST_FILES)
    pixels = torch.frombuffer(bytearray(images[16:]), dtype=torch.uint8).view(-1, 1, 28, 28)
    target = torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8).long()
    if len(pixels) != len(target):
        raise ValueError(f"there are {len(pixels)} images and {len(target)} labels")
    return pixels.float() / 255, target


def mnist(folder: Path) -> tuple[Rows, Rows]:
    """The 10,000 test images of MNIST, as 14 x 14 pixels; every fifth is a test row here."""
    images, target = mnist_images(folder)
    inputs = torch.nn.functional.avg_pool2d(images, 2)
    rows = Rows((inputs - inputs.mean()) / inputs.std(), target, target)
    test = torch.arange(len(target)) % 5 == 0
    return rows.at(~test), rows.at(test)


def shakespeare(folder: Path) -> tuple[Rows, Rows]:
    """The next character of plays, by speaker; the last tenth of each one's text is for tests."""
    text = (folder / "tinyshakespeare.txt").read_text(encoding="utf-8")
    speeches: dict[str, list[str]] = {}
    for speech in text.split("\n\n"):
        speaker, colon, words = speech.strip().partition(":\n")
        if colon:
            speeches.setdefault(speaker, []).append(words)
    texts = sorted(("\n".join(parts) for parts in speeches.values()), key=len)[-SPEAKERS:]
    if len(texts) < SPEAKERS:
        raise ValueError(f"it has {len(texts)} speakers")
    number = {character: n for n, character in enumerate(sorted(set(text)))}
    sides: tuple[list[Rows], list[Rows]] = ([], [])
    for kind, words in enumerate(texts):
        encoded = torch.tensor([min(number[c], 64) for c in words])
        end = len(encoded) * 9 // 10
        for rows, part, most in zip(sides, (encoded[:end], encoded[end:]), WINDOWS, strict=True):
            windows = part.unfold(0, CONTEXT + 1, 1)
            windows = windows[torch.linspace(0, len(windows) - 1, most).long().unique()]
            kinds = torch.full((len(windows),), kind)
            rows.append(Rows(windows[:, :-1], windows[:, -1], kinds))
    train, test = (Rows(*map(torch.cat, zip(*rows, strict=True))) for rows in sides)
    return train, test


def heart(folder: Path) -> tuple[Rows, Rows]:
    """UCI heart disease: whether a patient is ill, by hospital; missing values are flagged."""
    cells: list[list[float]] = []
    kinds: list[int] = []
    for kind, hospital in enumerate(("cleveland", "hungarian", "switzerland", "va")):
        lines = (folder / "heart-disease" / f"{hospital}.csv").read_text("ascii").split()
        cells += [
            [float(cell) if cell != "?" else float("nan") for cell in line.split(",")]
            for line in lines
        ]
        kinds += [kind] * len(lines)
    table = torch.tensor(cells)
    features, target = table[:, :-1], (table[:, -1] > 0).long()
    missing = features.isnan()
    mean = features.nanmean(0)
    deviation = (features - mean).square().nanmean(0).sqrt()
    inputs = ((features - mean) / deviation).nan_to_num(nan=0.0).clamp(-4, 4)
    return _divided(Rows(torch.cat([inputs, missing.float()], 1), target, torch.tensor(kinds)))


def diabetes(folder: Path) -> tuple[Rows, Rows]:
    """The progression of diabetes in a year (scikit-learn's `load_diabetes`), by its range."""
    from sklearn.datasets import load_diabetes

    features, progression = load_diabetes(return_X_y=True)
    inputs, target = (torch.tensor(each, dtype=torch.float32) for each in (features, progression))
    kind = target.argsort().argsort() * RANGES // len(target)
    inputs, target = inputs / inputs.std(0), (target - target.mean()) / target.std()
    return _divided(Rows(inputs, target, kind))


def languages(folder: Path) -> tuple[Rows, Rows]:
    """The language of a country, language, script or currency name (CLDR, from Babel)."""
    from babel import Locale

    names: dict[str, list[str]] = {}
    for language in LANGUAGES:
        locale = Locale(language)
        tables = (locale.territories, locale.languages, locale.scripts, locale.currencies)
        found = {name.lower() for table in tables for name in table.values()}
        names[language] = sorted(
            name for name in found if len(name) > 3 and name.replace(" ", "").isalpha()
        )
    uses = Counter(name for each in names.values() for name in each)
    inputs, target = [], []
    for kind, each in enumerate(names.values()):
        unique = [name for name in each if uses[name] == 1]
        step = max(1, len(unique) // NAMES)
        for name in unique[::step][:NAMES]:
            inputs.append(_ngrams(name))
            target.append(kind)
    kinds = torch.tensor(target)
    return _divided(Rows(torch.stack(inputs), kinds, kinds))


def _ngrams(name: str) -> torch.Tensor:
    """Counts of letter pairs and triples by hash, normalised: float32 (NGRAMS)."""
    counts = [0.0] * NGRAMS
    padded = f" {name} "
    for size in (2, 3):
        for start in range(len(padded) - size + 1):
            counts[zlib.crc32(padded[start : start + size].encode()) % NGRAMS] += 1
    return torch.tensor(counts) / math.hypot(*counts) * 4


def _divided(rows: Rows) -> tuple[Rows, Rows]:
    """Training and test rows, in a random order that is always the same."""
    order = torch.randperm(len(rows.target), generator=torch.Generator().manual_seed(0))
    shuffled = rows.at(order)
    test = torch.arange(len(order)) % TEST_PART == 0
    return shuffled.at(~test), shuffled.at(test)
