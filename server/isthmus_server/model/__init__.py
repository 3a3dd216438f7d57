"""The global model: exact sums of updates, merging of regimes, server optimizers."""
