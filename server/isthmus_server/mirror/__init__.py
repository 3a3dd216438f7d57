"""Mirrors and stores, which have blobs of devices besides the link: models, and updates."""
