"""Differential privacy: mechanisms, their noise, and what they cost."""
