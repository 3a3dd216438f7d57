"""The server side of the link: peers, limits, blobs, admission."""
