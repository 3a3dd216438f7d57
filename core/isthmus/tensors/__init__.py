"""The exchange set as flat vectors and safetensors bytes, and parameter fingerprints."""
