"""Who shares and masks with whom, and how many must be left: the numbers behind every refusal.

Up to `complete_up_to` clients everybody is everybody's neighbour. Above that, each client draws
its own k out-neighbours after it has seen the whole roster, so nobody can choose them for it and
nobody needs to be trusted with a random beacon (after Bell et al. 2020, whose graph the server
draws).

With c the most corrupt clients among k neighbours, the threshold is `t = floor((k + c) / 2) + 1`:
since 2t > k + c, honest neighbours cannot be split so that one half gives away a client's
self-mask seed and the other half its mask key.

>>> neighbourhood(1000, corrupt_permille=100, dropout_permille=100, fewest=2)
Neighbourhood(clients=1000, degree=96, threshold=67, corrupt=37, quorum=551, fewest=900)
>>> neighbourhood(20, corrupt_permille=100, dropout_permille=100, fewest=2)
Neighbourhood(clients=20, degree=19, threshold=11, corrupt=2, quorum=12, fewest=18)
"""

from __future__ import annotations

import dataclasses
import functools
from math import exp, lgamma, log

COMPLETE_UP_TO = 128
"""Clients up to which the complete graph costs less than it is worth to thin it."""

SECRECY = 2.0**-40
"""Chance, over the clients' own draws, that the graph fails to protect somebody."""

ABORT = 2.0**-20
"""Chance that random dropouts within the bound leave some neighbourhood below its threshold."""


@dataclasses.dataclass(frozen=True)
class Neighbourhood:
    """The graph's parameters for one roster."""

    clients: int
    """n: in the roster."""
    degree: int
    """k: neighbours that a client deals shares to."""
    threshold: int
    """t: shares that give a secret back."""
    corrupt: int
    """c: most corrupt clients among k neighbours."""
    quorum: int
    """Signatures that make a survivor set final; any two quorums share an honest signer."""
    fewest: int
    """m: dealers, and survivors, below which the attempt ends."""

    @property
    def complete(self) -> bool:
        """Whether everybody is everybody's neighbour."""
        return self.degree == self.clients - 1


def neighbourhood(
    clients: int,
    *,
    corrupt_permille: int,
    dropout_permille: int,
    fewest: int,
    complete_up_to: int = COMPLETE_UP_TO,
) -> Neighbourhood:
    """The parameters for a roster of `clients`.

    Args:
        clients: n.
        corrupt_permille: gamma, in thousandths: most clients the server may have corrupted.
        dropout_permille: delta, in thousandths: most clients that may drop out.
        fewest: the configured least number of clients in a sum.
        complete_up_to: largest n with a complete graph.
    """
    corrupt = clients * corrupt_permille // 1000
    dropped = clients * dropout_permille // 1000
    quorum = (clients + corrupt) // 2 + 1
    least = max(fewest, quorum, clients - dropped)
    if clients > complete_up_to:
        k, t, c = k_out(clients, corrupt, dropped)
    else:
        k, t, c = _complete(clients, corrupt)
    if k == clients - 1:
        # A client holds no share of its own secrets, so t others must be left beside it.
        least = max(least, t + 1)
    return Neighbourhood(clients, k, t, c, quorum, least)


def _complete(clients: int, corrupt: int) -> tuple[int, int, int]:
    k = clients - 1
    c = min(corrupt, k)
    return k, (k + c) // 2 + 1, c


@functools.lru_cache(maxsize=256)
def k_out(clients: int, corrupt: int, dropped: int) -> tuple[int, int, int]:
    """The least k, with its t and c, for which client-drawn neighbours are good enough.

    Three conditions, each a union bound over all clients: more than c of k neighbours are corrupt
    (half of `SECRECY`); the honest clients that remain do not hang together (the other half);
    fewer than t of k neighbours remain (`ABORT`). The first and the last are hypergeometric tails.

    Returns:
        `(k, t, c)`; those of the complete graph where nothing sparser will do.
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


def _chance(others: int, marked: int, drawn: int, hits: int) -> float:
    """Hypergeometric: exactly `hits` of `marked` among `drawn` out of `others`."""
    if drawn - hits > others - marked:
        return 0.0
    return exp(
        _log_choose(marked, hits)
        + _log_choose(others - marked, drawn - hits)
        - _log_choose(others, drawn)
    )


def _tail(others: int, marked: int, drawn: int, hits: int) -> float:
    """More than `hits` of `marked` among `drawn`; summed from the small end."""
    return sum(
        _chance(others, marked, drawn, i) for i in range(min(marked, drawn), max(hits, -1), -1)
    )


def _quantile(others: int, marked: int, drawn: int, bound: float) -> int:
    """The least number of hits that is exceeded with a chance of at most `bound`."""
    hits = min(marked, drawn)
    tail = 0.0
    while hits > 0:
        tail += _chance(others, marked, drawn, hits)
        if tail > bound:
            return hits
        hits -= 1
    return 0


def _disconnected(clients: int, gone: int, k: int) -> float:
    """Bound on the chance that the graph among the clients that are honest and left falls apart.

    For some s of them to have no edge to the rest, each must have drawn only among themselves and
    those gone, and nobody else may have drawn one of them. Draws with replacement bound it above.
    Those gone are fixed here. A server that chooses them after the draws gains nothing, since
    every client insists on t neighbours that are left, and so on company.
    """
    left, others, chance = clients - gone, clients - 1, 0.0
    for s in range(1, left // 2 + 1):
        inside = s - 1 + gone
        if inside == 0:
            continue
        chance += exp(
            _log_choose(left, s)
            + k * s * log(inside / others)
            + k * (left - s) * log((others - s) / others)
        )
        if chance > 1:
            break
    return chance
