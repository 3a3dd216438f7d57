"""The device agent, its owner's limits, and how tasks reach it."""
