"""Virtual devices that train in one process."""
