"""Secret sharing: reconstruction, and the tensor code against plain integers."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus_privacy.crypto import shamir


@given(
    secret=st.binary(min_size=32, max_size=32),
    count=st.integers(1, 12),
    data=st.data(),
)
def test_any_threshold_of_shares_gives_the_secret_back(secret, count, data):
    threshold = data.draw(st.integers(1, count))
    points = data.draw(
        st.lists(st.integers(1, shamir.P - 1), min_size=count, max_size=count, unique=True)
    )
    shares = shamir.split([secret], points, threshold)
    assert {len(share) for share in shares} == {shamir.SHARE_BYTES}
    chosen = data.draw(st.permutations(range(count)))[:threshold]
    chosen_shares = [shares[i] for i in chosen]
    assert shamir.combine([[points[i] for i in chosen]], [chosen_shares]) == [secret]


def test_shares_against_polynomials_in_plain_integers(monkeypatch):
    """The tensor code against Horner's rule."""
    coefficients = torch.randint(0, shamir.P, (4 * shamir.LIMBS,))
    monkeypatch.setattr(shamir, "_uniform", lambda count: coefficients[:count])
    secret = b"\xff" * 32
    limbs = shamir._limbs(secret).tolist()
    for x, share in zip(
        [1, 77, 2**31 - 2], shamir.split([secret], [1, 77, 2**31 - 2], 5), strict=True
    ):
        for j in range(shamir.LIMBS):
            value = 0
            for row in reversed(coefficients.view(4, -1).tolist()):
                value = (value + row[j]) * x % shamir.P
            assert (
                int.from_bytes(share[4 * j : 4 * j + 4], "little") == (value + limbs[j]) % shamir.P
            )


def test_many_secrets_in_one_batch():
    secrets = [bytes([i]) * 32 for i in range(40)]
    points = [[1 + (i + j) % 50 for j in range(20)] for i in range(40)]
    shares = [shamir.split([s], p, 20) for s, p in zip(secrets, points, strict=True)]
    assert shamir.combine(points, shares) == secrets
    assert shamir.combine([], []) == []


def test_random_coefficients_are_below_the_prime(monkeypatch):
    """The one 31-bit word that is not a field element is drawn again."""
    drawn = iter([b"\xff" * 4 + bytes(4), b"\1\0\0\0" + bytes(4)])
    monkeypatch.setattr(shamir.os, "urandom", lambda count: next(drawn))
    assert shamir._uniform(2).tolist() == [1, 0]
