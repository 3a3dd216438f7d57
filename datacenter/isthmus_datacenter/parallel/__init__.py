"""Data, tensor and pipeline parallelism with ZeRO: how a model lies on the ranks."""
