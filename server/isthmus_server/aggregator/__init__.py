"""A process that holds streams of devices for a server, and hands it sums of what they send."""
