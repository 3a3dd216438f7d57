"""The participant side of the link: streams, heartbeats, blobs, requests."""
