"""A run on disk: the write-ahead round log, checkpoints, run state and receipts."""
