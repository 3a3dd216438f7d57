"""The global model: exact update sums, merging, server optimizers."""
