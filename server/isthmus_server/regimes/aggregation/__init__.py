"""Aggregation rules for single updates, in place of the weighted mean of a plaintext round."""
