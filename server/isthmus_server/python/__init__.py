"""Isthmus from Python scripts and notebooks: start runs, follow them, and load their models."""
