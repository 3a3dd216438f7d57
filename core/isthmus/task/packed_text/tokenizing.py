"""From texts to numbers of tokens, by a file of Hugging Face's `tokenizers` or any function."""

from __future__ import annotations

import hashlib
import importlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isthmus.errors import TaskError
from isthmus.extras import install_line
from isthmus.task.loading import user_code

_SAMPLE = 'The  quick\tbrown fox, 1234567890 times;\n\n"naïve" 日本語 🙂 <|end|> __init__(x=0.5)'
"""What a function makes of it tells it from most others of the same name."""


class Tokenizer:
    """Numbers the tokens of texts; a document's last token is `end`."""

    def __init__(self, given: str | Path | Callable[[str], Any], end: str | int) -> None:
        """Use a tokenizer.

        Args:
            given: a file `tokenizer.json`, or a function of a text that returns numbers, or a
                mapping with them as `input_ids`.
            end: the token after each document; its text is possible with a file only.

        Raises:
            TaskError: the file cannot be used, has no such token, or the function failed.
        """
        self._library: Any = None
        self._function: Callable[[str], Any] | None = None
        if isinstance(given, str | Path):
            self._library = _load(Path(given))
            self.end = self._number_of(end, given)
            most = max(self._library.get_vocab_size(with_added_tokens=True) - 1, self.end)
            self.identity = hashlib.sha256(self._library.to_str().encode()).hexdigest()
            """Changes if the tokens of a text may be others."""
        else:
            if isinstance(end, str):
                raise TaskError(f"PackedText: end={end!r} of a function must be a token's number")
            self._function = given
            self.end = end
            most = 2**32 - 1  # not known
            name = f"{getattr(given, '__module__', '')}.{getattr(given, '__qualname__', '')}"
            text = f"{name} {list(self.encode([_SAMPLE])[0])}"
            self.identity = hashlib.sha256(text.encode()).hexdigest()
        self.is_function = self._function is not None
        """Whether the same identity does not mean the same tokens for certain."""
        if not 0 <= self.end < 2**32:
            raise TaskError(f"PackedText: end={self.end} is no number of a token")
        self.code = "H" if most < 2**16 else "I"
        """Type of an `array` that has every token."""

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The tokens of each text, without `end`.

        Raises:
            TaskError: the function failed, or returned something else than numbers.
        """
        if self._function is None:
            try:
                encoded = self._library.encode_batch(list(texts), add_special_tokens=False)
            except (TypeError, UnicodeError):
                raise TaskError("a text has half of a surrogate pair") from None
            return [each.ids for each in encoded]
        rows: list[Sequence[int]] = []
        for text in texts:
            with user_code("the tokenizer"):
                row = self._function(text)
                row = row["input_ids"] if hasattr(row, "keys") else row
                try:
                    rows.append(array("I", row))
                except (TypeError, ValueError, OverflowError) as error:
                    raise TaskError(
                        f"the tokenizer must return a list of numbers from 0 on: {error}"
                    ) from None
        return rows

    def _number_of(self, end: str | int, path: str | Path) -> int:
        if isinstance(end, int):
            return end
        number = self._library.token_to_id(end)
        if number is None:
            raise TaskError(f"{path} has no token {end!r} to end documents with")
        return int(number)


def _load(path: Path) -> Any:
    try:
        library = importlib.import_module("tokenizers")
    except ModuleNotFoundError:
        raise TaskError(
            f"{path} needs the package tokenizers, which is not installed; {install_line('text')}"
        ) from None
    if not path.is_file():
        raise TaskError(f"there is no tokenizer file {path}")
    try:
        loaded = library.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises Exception itself
        raise TaskError(f"{path} is no file of the package tokenizers: {error}") from None
    # Texts are whole here: a file that was saved with either would change them in silence.
    loaded.no_truncation()
    loaded.no_padding()
    return loaded
