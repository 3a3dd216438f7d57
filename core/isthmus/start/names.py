"""Which tensor of a file belongs to which tensor of a model, by their names.

>>> match(["decoder.embed.weight", "head.bias"], ["embed.weight"])
{'decoder.embed.weight': 'embed.weight'}
>>> match(["embed.weight"], ["model.embed.weight", "lm_head.weight"])
{'embed.weight': 'model.embed.weight'}
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence

from isthmus.errors import UserError

_INSERTED = re.compile(r"(?<=\.)(?:base_layer|original_module)\.")
"""What PEFT inserts into the names of the layers that it wraps."""
_SAVED = re.compile(r"(?<=\.)modules_to_save\.[^.]+\.")
"""What PEFT inserts into the names of copies of whole layers, which are trained with an adapter."""
_ADAPTER = re.compile(r"(?<=\.)(lora_(?:embedding_)?[AB])\.[^.]+")
"""What PEFT names the factors of an adapter, with the adapter's own name, which files leave out."""
_LENGTHS = re.compile(r"(?<=\.)(lora_magnitude_vector)\.[^.]+\.weight$")
"""DoRA's lengths, which are a module in the model, and a tensor without its name in files."""


def plain(name: str) -> str:
    """A tensor's name without what PEFT inserts into it.

    >>> plain("model.q_proj.base_layer.weight"), plain("model.q_proj.lora_A.default.weight")
    ('model.q_proj.weight', 'model.q_proj.lora_A.weight')
    >>> plain("model.norm.modules_to_save.default.weight")
    'model.norm.weight'
    """
    for pattern, kept in ((_INSERTED, ""), (_SAVED, ""), (_ADAPTER, r"\1"), (_LENGTHS, r"\1")):
        name = pattern.sub(kept, name)
    return name


def match(model: Sequence[str], stored: Collection[str]) -> dict[str, str]:
    """The stored name of each of a model's tensors that has one.

    Both sides may have a prefix that the other has not, such as the name of a wrapping module.
    Those prefixes are cut with which most names match, of both sides only if cutting one matches
    fewer.

    Args:
        model: names in the model.
        stored: names in the files.

    Raises:
        UserError: two choices of prefixes match equally many names, and differ.
    """
    known = set(stored)
    shortened = {name: plain(name) for name in model}
    best: dict[str, str] = {}
    best_cut = ("", "")
    rival: tuple[str, str] | None = None
    cuts = itertools.product(_prefixes(shortened.values()), _prefixes(stored))
    for cut in sorted(cuts, key=_sides_cut):
        own, other = cut
        found = {
            name: other + short[len(own) :]
            for name, short in shortened.items()
            if short.startswith(own)
            and other + short[len(own) :] in known
            # Else every `weight` would fit every other one.
            and (_sides_cut(cut) < 2 or "." in short[len(own) :])
        }
        if len(found) > len(best):
            best = found
            best_cut = cut
            rival = None
        elif (found and len(found) == len(best) and found != best) and _sides_cut(
            cut
        ) == _sides_cut(best_cut):
            rival = rival or cut
    # Files of a whole model with adapters, such as a run's, have the names as they are.
    same = {name: name for name in model if name in known}
    if len(same) > len(best):
        return same
    if rival is not None:
        ways = " or ".join(f"{own!r} for {other!r}" for own, other in (best_cut, rival))
        raise UserError(
            f"the names of {len(best)} tensors fit in two ways ({ways}); have the task say by "
            "start_names() which is right"
        )
    return best


def _sides_cut(cut: tuple[str, str]) -> int:
    """How many of the two prefixes are not empty; the fewer the likelier."""
    return sum(map(bool, cut))


def _prefixes(names: Collection[str]) -> list[str]:
    """The empty prefix, and those up to a dot that at least half of the names have."""
    counts: dict[str, int] = {}
    for name in names:
        at = name.find(".")
        while at >= 0:
            counts[name[: at + 1]] = counts.get(name[: at + 1], 0) + 1
            at = name.find(".", at + 1)
    return ["", *(prefix for prefix, count in counts.items() if 2 * count >= len(names))]
