"""Mirrors: web servers where devices fetch blobs that the link would have to send each of them."""
