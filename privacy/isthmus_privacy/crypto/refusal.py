"""Every refusal of the protocol, by name, and the one function that makes it.

A check that is silently lost is the classic way for secure aggregation to become insecure while
every honest round still works. So each refusal has a name, is made in exactly one place, and has
a negative test; a mutation check takes each away in turn and expects a test to fail.

>>> try:
...     refuse("roster-unsorted", "the roster is not sorted by name", peer=None)
... except PeerMisbehaved as error:
...     print(error.code, "-", error)
roster-unsorted - the roster is not sorted by name
"""

from __future__ import annotations

from typing import NoReturn

from isthmus.errors import AggregationAborted, IsthmusError, PeerMisbehaved, UpdateError

_PEER: tuple[str, ...] = (
    # any message
    "message-truncated",
    "message-trailing",
    "message-oversized",
    "message-not-canonical",
    "message-wrong-kind",
    # enrolment, seen by either side
    "enrolment-forged",
    "enrolment-revoked",
    "enrolment-expired",
    # the client, of the configuration
    "config-malformed",
    "config-margins",
    "config-values-wrap",
    "config-slots-wrap",
    "config-weighted-noise",
    "config-model-differs",
    "config-below-floor",
    "config-too-trusting",
    "config-too-lossy",
    "config-noise-missing",
    "config-replayed",
    "participation-spent",
    # the client, of the roster
    "roster-too-small",
    "roster-too-large",
    "roster-unsorted",
    "roster-repeated-key",
    "roster-bad-signature",
    "roster-self-changed",
    "roster-no-threshold",
    "key-of-low-order",
    # the client, of its inbox
    "inbox-other-roster",
    "inbox-self-missing",
    "inbox-too-few",
    "inbox-neighbours-gone",
    "inbox-sender-repeated",
    "inbox-sender-unknown",
    "inbox-too-many-dealers",
    "inbox-share-tampered",
    # the client, of the survivors and their consent
    "survivors-other-roster",
    "survivors-changed-dealers",
    "survivors-not-dealers",
    "survivors-self-missing",
    "survivors-too-few",
    "survivors-neighbours-gone",
    "survivors-differ-by-few",
    "consents-repeated",
    "consents-stranger",
    "consents-forged",
    "consents-too-few",
    # the client, of anything at the wrong time
    "client-finished",
    "client-out-of-order",
    # the server, of a client's messages
    "server-out-of-order",
    "advert-uninvited",
    "advert-duplicate",
    "advert-too-many",
    "advert-forged",
    "advert-repeated-key",
    "shares-stranger",
    "shares-duplicate",
    "shares-other-roster",
    "shares-to-self",
    "shares-wrong-degree",
    "shares-wrong-count",
    "shares-forged",
    "masked-stranger",
    "masked-duplicate",
    "masked-other-roster",
    "masked-forged",
    "masked-wrong-partners",
    "masked-wrong-length",
    "masked-corrupt",
    "consent-stranger",
    "consent-duplicate",
    "consent-forged",
    "release-stranger",
    "release-duplicate",
    "release-forged",
    "release-wrong-dealers",
)

_OWN: tuple[str, ...] = (
    # the client, of its own update, before anything is masked
    "update-wrong-length",
    "update-not-finite",
    "weight-out-of-range",
    "slot-names-differ",
    "slot-not-finite",
    "count-out-of-range",
    "encoded-for-another-round",
)

_ABORT: tuple[str, ...] = (
    "too-few-adverts",
    "too-few-dealers",
    "dealers-cut-off",
    "too-few-masked",
    "survivors-cut-off",
    "too-few-consents",
    "too-few-shares",
    "seed-mismatch",
    "key-mismatch",
    "sum-out-of-range",
    "nothing-weighed",
)

REFUSALS: dict[str, type[IsthmusError]] = {
    **dict.fromkeys(_PEER, PeerMisbehaved),
    **dict.fromkeys(_OWN, UpdateError),
    **dict.fromkeys(_ABORT, AggregationAborted),
}
"""Name to error: somebody misbehaved, the client's own update does not fit, too few are left."""


def refuse(code: str, reason: str, *, peer: str | None = None) -> NoReturn:
    """Raise the error of a named refusal.

    Args:
        code: a key of `REFUSALS`, used at one place in the whole package.
        reason: one sentence for a person.
        peer: the participant that misbehaved; None where it is the server, or nobody.

    Raises:
        PeerMisbehaved: the other side sent what honest software never sends.
        UpdateError: this client's own update cannot be encoded.
        AggregationAborted: too few are left, or what they sent gives no sum.
    """
    error = REFUSALS[code](reason)
    error.code = code
    if isinstance(error, PeerMisbehaved):
        error.peer = peer
    raise error
