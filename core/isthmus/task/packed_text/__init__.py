"""Text on disk as training data: tokenised once, packed into sequences, and read in any order."""

from isthmus.task.packed_text.dataset import PackedText

__all__ = ["PackedText"]
