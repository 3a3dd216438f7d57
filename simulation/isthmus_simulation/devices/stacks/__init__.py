"""Trains small devices together, in stacked models."""
