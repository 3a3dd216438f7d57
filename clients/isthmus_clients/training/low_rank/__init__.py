"""Local training in which some matrices change by products of two factors (LoRA, Hu et al. 2021).

With a matrix W at the start of the training, a device trains B = 0 and a random A instead, and
W + alpha / r * B A takes the place of W in the model before every step. The gradients of A and B
follow from that of the matrix by the chain rule, so that the model, its names and what is computed
of it are the same as without factors, and so are the update and all terms that are added to the
matrix' gradient.
"""

from isthmus_clients.training.low_rank.factors import Factors
from isthmus_clients.training.low_rank.rank import LowRank

__all__ = ["Factors", "LowRank"]
