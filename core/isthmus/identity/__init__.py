"""Keys, certificates and joining: how a machine becomes a known participant."""
