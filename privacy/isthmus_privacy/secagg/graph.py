"""Parameters of the communication graph: degree, sharing threshold, quorum and minimum survivors.

Up to `complete_up_to` clients the graph is complete. Above that, each client draws its own k
out-neighbours after it has received the whole roster, so that no other party can choose them and
no trusted random beacon is needed (in Bell et al. 2020 the server draws the graph).

With at most c corrupt clients among k neighbours, the threshold is `t = floor((k + c) / 2) + 1`:
since 2t > k + c, honest neighbours cannot be split so that one half reveals a client's self-mask
seed and the other half its mask key.

>>> graph_parameters(20, corrupt_permille=100, dropout_permille=100, clients_min=2)
... # doctest: +NORMALIZE_WHITESPACE
GraphParameters(clients=20, degree=19, threshold=11, corrupt=2, quorum=12, survivors_min=18,
                honest_min=16)
>>> large = graph_parameters(1000, corrupt_permille=100, dropout_permille=100, clients_min=2)
>>> large.degree, large.threshold, large.corrupt, large.quorum, large.survivors_min
(96, 67, 37, 551, 900)
"""

from __future__ import annotations

import dataclasses
import functools
from math import exp, lgamma, log

COMPLETE_UP_TO = 128
"""Number of clients up to which the complete graph is cheap enough."""

SECRECY = 2.0**-40
"""Bound on the probability, over the clients' draws, that the graph fails to protect a client."""

ABORT = 2.0**-20
"""Bound on the probability that random dropouts leave a neighbourhood below its threshold."""


@dataclasses.dataclass(frozen=True)
class GraphParameters:
    """Parameters of the communication graph for one roster."""

    clients: int
    """n: size of the roster."""
    degree: int
    """k: neighbours that hold shares of a client's secrets."""
    threshold: int
    """t: shares that reconstruct a secret."""
    corrupt: int
    """c: maximum number of corrupt clients among k neighbours."""
    quorum: int
    """Signatures that make a survivor set final; any two quorums share an honest signer."""
    survivors_min: int
    """m: minimum number of share owners, and of survivors; with fewer the attempt aborts."""
    honest_min: int
    """Honest clients in the smallest sum, if as many of the roster are corrupt as is assumed."""

    @property
    def complete(self) -> bool:
        """Whether all clients are neighbours of each other."""
        return self.degree == self.clients - 1


def graph_parameters(
    clients: int,
    *,
    corrupt_permille: int,
    dropout_permille: int,
    clients_min: int,
    complete_up_to: int = COMPLETE_UP_TO,
) -> GraphParameters:
    """Compute the parameters for a roster of `clients`.

    Args:
        clients: n.
        corrupt_permille: gamma, in thousandths: fraction of clients that may be corrupt.
        dropout_permille: delta, in thousandths: fraction of clients that may drop out.
        clients_min: configured minimum number of clients in a sum.
        complete_up_to: largest n with the complete graph.
    """
    corrupt = corrupt_clients(clients, corrupt_permille)
    dropped = clients * dropout_permille // 1000
    quorum = (clients + corrupt) // 2 + 1
    survivors_min = max(clients_min, quorum, clients - dropped)
    if clients > complete_up_to:
        k, t, c = k_out(clients, corrupt, dropped)
    else:
        k, t, c = _complete(clients, corrupt)
    if k == clients - 1:
        # A client holds no share of its own secrets, so t other clients must remain.
        survivors_min = max(survivors_min, t + 1)
    return GraphParameters(clients, k, t, c, quorum, survivors_min, survivors_min - corrupt)


def corrupt_clients(clients: int, corrupt_permille: int) -> int:
    """Number of corrupt clients that is assumed among `clients`; a part of one counts as one.

    >>> corrupt_clients(9, 100), corrupt_clients(9, 0)
    (1, 0)
    """
    return -(-clients * corrupt_permille // 1000)


def _complete(clients: int, corrupt: int) -> tuple[int, int, int]:
    k = clients - 1
    c = min(corrupt, k)
    return k, (k + c) // 2 + 1, c


@functools.lru_cache(maxsize=256)
def k_out(clients: int, corrupt: int, dropped: int) -> tuple[int, int, int]:
    """Find the smallest k, with its t and c, for which client-drawn neighbours are secure.

    Three events are bounded, each by a union bound over all clients: more than c of k neighbours
    are corrupt (half of `SECRECY`); the graph of the remaining honest clients is disconnected (the
    other half); fewer than t of k neighbours remain (`ABORT`). The first and the last are
    hypergeometric tails.

    Returns:
        `(k, t, c)`; those of the complete graph if no sparser graph meets the bounds.
    """
    others = clients - 1
    for k in range(1, others):
        c = _quantile(others, corrupt, k, SECRECY / 2 / clients)
        t = (k + c) // 2 + 1
        if t > k or _tail(others, dropped, k, k - t) * clients > ABORT:
            continue
        if _disconnected(clients, corrupt + dropped, k) <= SECRECY / 2:
            return k, t, c
    return _complete(clients, corrupt)


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def _hypergeometric(others: int, marked: int, drawn: int, hits: int) -> float:
    """Hypergeometric probability of exactly `hits` of `marked` among `drawn` out of `others`."""
    if drawn - hits > others - marked:
        return 0.0
    return exp(
        _log_choose(marked, hits)
        + _log_choose(others - marked, drawn - hits)
        - _log_choose(others, drawn)
    )


def _tail(others: int, marked: int, drawn: int, hits: int) -> float:
    """Probability of more than `hits` of `marked` among `drawn`; small terms are summed first."""
    return sum(
        _hypergeometric(others, marked, drawn, i)
        for i in range(min(marked, drawn), max(hits, -1), -1)
    )


def _quantile(others: int, marked: int, drawn: int, bound: float) -> int:
    """Smallest number of hits that is exceeded with a probability of at most `bound`."""
    hits = min(marked, drawn)
    tail = 0.0
    while hits > 0:
        tail += _hypergeometric(others, marked, drawn, hits)
        if tail > bound:
            return hits
        hits -= 1
    return 0


def _disconnected(clients: int, removed: int, k: int) -> float:
    """Bound the probability that the graph of the remaining honest clients is disconnected.

    For s of them to have no edge to the rest, each must have drawn only among these s and the
    removed (corrupt or dropped) clients, and no other may have drawn one of them. Draws with
    replacement give an upper bound. The removed clients are fixed here; a server that chooses them
    after the draws gains nothing, since every client requires t remaining neighbours.
    """
    remaining = clients - removed
    others = clients - 1
    probability = 0.0
    for s in range(1, remaining // 2 + 1):
        inside = s - 1 + removed
        if inside == 0:
            continue
        probability += exp(
            _log_choose(remaining, s)
            + k * s * log(inside / others)
            + k * (remaining - s) * log((others - s) / others)
        )
        if probability > 1:
            break
    return probability
