"""All refusals of the protocol by code, and the one function that raises them.

Losing a check silently is the classic way for secure aggregation to become insecure while every
honest round still works. So each refusal has a code, is raised in exactly one place and has a
negative test. A mutation test disables each refusal in turn and expects a test to fail.

>>> try:
...     refuse("roster-unsorted", "the roster is not sorted by name", peer=None)
... except PeerMisbehaved as error:
...     print(error.code, "-", error)
roster-unsorted - the roster is not sorted by name
"""

from __future__ import annotations

from typing import NoReturn

from isthmus.errors import AggregationAborted, IsthmusError, PeerMisbehaved, UpdateError

_PEER_MISBEHAVED: tuple[str, ...] = (
    # either side: any message
    "message-truncated",
    "message-trailing",
    "message-oversized",
    "message-not-canonical",
    "message-wrong-kind",
    # either side: enrolment
    "enrolment-forged",
    "enrolment-revoked",
    "enrolment-expired",
    # client: the configuration
    "config-malformed",
    "config-margins",
    "config-values-wrap",
    "config-slots-wrap",
    "config-slots-differ",
    "config-size-differs",
    "config-elements-differ",
    "noise-malformed",
    "noise-with-figures",
    "noise-counts-on-too-many",
    "noise-may-wrap",
    "noise-for-other-vector",
    "codec-for-other-vector",
    "codec-missing",
    "codec-differs",
    "config-noise-below-floor",
    "private-sum-of-another-vector",
    "noise-below-the-jobs",
    "sums-beyond-the-jobs-budget",
    "measurement-without-noise",
    "config-model-differs",
    "config-purpose-differs",
    "gradient-scale-invalid",
    "group-differs",
    "group-below-minimum",
    "random-group-unknown",
    "random-group-below-minimum",
    "ranges-not-of-job",
    "encoding-not-of-job",
    "buffered-mode-differs",
    "buffered-starts-invalid",
    "buffered-start-differs",
    "config-honest-below-floor",
    "config-corruption-below-floor",
    "config-dropout-above-ceiling",
    "config-replayed",
    "config-set-up-differs",
    "set-up-not-usable",
    "set-up-of-other-updates",
    "draw-not-now",
    "draw-before-last",
    "selection-too-wide",
    "participation-limit-of-run",
    "participation-limit",
    "epsilon-limit",
    # client: what training costs its own examples
    "examples-of-another-job",
    "examples-asked-too-often",
    "examples-beyond-the-jobs-budget",
    "examples-beyond-the-owners-limit",
    # client: the roster
    "roster-too-small",
    "roster-too-large",
    "roster-honest-below-floor",
    "roster-unsorted",
    "roster-repeated-key",
    "roster-bad-signature",
    "roster-own-entry-changed",
    "roster-no-threshold",
    "roster-member-not-selected",
    "roster-member-of-another-group",
    "key-of-low-order",
    "key-malformed",
    # client: its inbox
    "inbox-other-roster",
    "unmasked-for-model",
    "unmasked-for-data",
    "another-vector-for-model",
    "masked-in-another-run",
    "attempt-superseded",
    "inbox-self-missing",
    "inbox-too-few-owners",
    "inbox-neighbours-missing",
    "inbox-sender-repeated",
    "inbox-sender-unknown",
    "inbox-too-many-senders",
    "inbox-share-tampered",
    # client: the survivor set, and the signatures of a quorum on it
    "survivors-other-roster",
    "survivors-owners-changed",
    "survivors-without-shares",
    "survivors-self-missing",
    "survivors-too-few",
    "survivors-neighbours-missing",
    "quorum-signer-repeated",
    "quorum-signer-not-survivor",
    "quorum-signature-forged",
    "quorum-too-small",
    # client: any message at the wrong time
    "client-finished",
    "client-out-of-order",
    # server: a client's messages
    "server-out-of-order",
    "keys-uninvited",
    "keys-not-selected",
    "keys-duplicate",
    "keys-too-many-clients",
    "keys-forged",
    "keys-repeated",
    "keys-unusable",
    "shares-not-in-roster",
    "shares-duplicate",
    "shares-other-roster",
    "shares-to-self",
    "shares-wrong-degree",
    "shares-wrong-count",
    "shares-forged",
    "masked-without-shares",
    "masked-duplicate",
    "masked-other-roster",
    "masked-forged",
    "masked-wrong-partners",
    "masked-wrong-length",
    "masked-corrupt",
    "masked-wrong-parts",
    "consistency-not-survivor",
    "consistency-duplicate",
    "consistency-forged",
    "unmasking-not-survivor",
    "unmasking-duplicate",
    "unmasking-forged",
    "unmasking-wrong-owners",
)

_OWN_UPDATE: tuple[str, ...] = (
    # client: its own update, before anything is masked
    "update-wrong-length",
    "update-not-finite",
    "update-element-too-large",
    "weight-out-of-range",
    "slot-names-differ",
    "slot-not-finite",
    "count-out-of-range",
    "encoded-for-another-attempt",
)

_ABORTED: tuple[str, ...] = (
    # server: too few clients are left, or their messages give no valid sum
    "too-few-keys",
    "too-few-owners",
    "owners-below-threshold",
    "too-few-masked",
    "survivors-below-threshold",
    "too-few-signatures",
    "too-few-shares",
    "seed-mismatch",
    "key-mismatch",
    "mask-part-mismatch",
    "next-seed-mismatch",
    "next-secret-mismatch",
    "next-parts-mismatch",
    "next-part-mismatch",
    "sum-out-of-range",
    "weight-not-of-ranges",
    "zero-total-weight",
)

REFUSALS: dict[str, type[IsthmusError]] = {
    **dict.fromkeys(_PEER_MISBEHAVED, PeerMisbehaved),
    **dict.fromkeys(_OWN_UPDATE, UpdateError),
    **dict.fromkeys(_ABORTED, AggregationAborted),
}
"""Code to error class: a peer misbehaved, the own update is invalid, or the attempt aborts."""


def refuse(code: str, reason: str, *, peer: str | None = None) -> NoReturn:
    """Raise the error of a refusal.

    Args:
        code: a key of `REFUSALS`; each is used in one place, here or in the device's code.
        reason: one sentence for a person.
        peer: the participant that misbehaved; None for the server, or if it is unknown.

    Raises:
        PeerMisbehaved: the other side sent a message that honest software never sends.
        UpdateError: this client's own update cannot be encoded.
        AggregationAborted: too few clients are left, or their messages give no valid sum.
    """
    error = REFUSALS[code](reason)
    error.code = code
    if isinstance(error, PeerMisbehaved):
        error.peer = peer
    raise error
