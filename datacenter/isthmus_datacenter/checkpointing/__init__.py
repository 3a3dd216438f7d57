"""Sharded checkpoints, and transfer of the whole model between the ranks and one flat file."""
