"""Imported by the process that all embedded participants are forked from, and by nothing else.

It loads what each of them would load, once; not gRPC, which must not be forked once it runs.
"""

import torch
import torch._dynamo

import isthmus.lifetime
import isthmus.scoring

isthmus.lifetime.die_with_parent()

__all__ = ["isthmus", "torch"]
