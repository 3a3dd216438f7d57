"""Differential privacy of a run: what its devices may still be asked, and a server's noise."""
