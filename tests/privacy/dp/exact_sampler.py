"""The exact sampler of Canonne, Kamath and Steinke 2020, "The Discrete Gaussian", on fractions.

Slow (30 microseconds and more for a sample) and without tables: the oracle for the product's.
"""

import random
from fractions import Fraction


def samples(sigma, count, *, seed):
    variance = Fraction(sigma) ** 2
    source = random.Random(seed)
    return [_discrete_gaussian(variance, source) for _ in range(count)]


def _bernoulli(p, source):
    return source.randrange(p.denominator) < p.numerator


def _bernoulli_exp(x, source):
    """True with probability exp(-x), algorithm 1."""
    while x > 1:
        if not _bernoulli_exp(Fraction(1), source):
            return False
        x -= 1
    k = 1
    while _bernoulli(x / k, source):
        k += 1
    return k % 2 == 1


def _discrete_laplace(t, source):
    """With scale t, a whole number, algorithm 2."""
    while True:
        u = source.randrange(t)
        if not _bernoulli_exp(Fraction(u, t), source):
            continue
        v = 0
        while _bernoulli_exp(Fraction(1), source):
            v += 1
        x = u + t * v
        negative = source.randrange(2)
        if not (negative and x == 0):
            return -x if negative else x


def _discrete_gaussian(variance, source):
    """Algorithm 3."""
    t = int(float(variance) ** 0.5) + 1
    while True:
        y = _discrete_laplace(t, source)
        if _bernoulli_exp((abs(y) - variance / t) ** 2 / (2 * variance), source):
            return y
