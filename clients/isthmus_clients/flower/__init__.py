"""Flower ClientApps on devices, and Isthmus tasks as Flower ClientApps."""
