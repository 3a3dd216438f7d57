"""How a round is trained: datacenter, plaintext, secure or buffered."""
