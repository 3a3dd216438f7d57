"""Flower messages and records, as both ends of the link use them."""
