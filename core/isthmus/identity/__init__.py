"""Keys, certificates and joining: the identity of a participant."""
