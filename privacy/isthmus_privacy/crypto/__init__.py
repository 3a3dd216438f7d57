"""Cryptographic primitives of secure aggregation: keys, secret sharing, masks, canonical bytes."""
