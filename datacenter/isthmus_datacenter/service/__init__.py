"""The datacenter as one participant: the service, its agents and its warm ranks."""
