"""Flower ClientApps on the devices of an Isthmus job."""
