"""A client whose own update is not what it agreed to send."""

import torch
from parties import (
    make_config,
)

from attacks.registry import ALICE, BOB, meets, until
from isthmus_privacy.secagg import (
    ServerStage,
    Slot,
    encode,
)

# -- the client, of its own update ---------------------------------------------------------------

SLOTS = (Slot(name="hits", maximum=100.0, exact=True), Slot(name="loss", maximum=50.0))


def own(update=None, weight=5, **figures):
    config = make_config(slots=SLOTS)
    usual = {"hits": 3, "loss": 0.5}
    update = torch.zeros(4) if update is None else update
    encode(config, update, weight=weight, figures={**usual, **figures})


@meets("update-wrong-length")
def an_update_of_another_model():
    own(torch.zeros(5))


@meets("update-wrong-length")
def an_update_of_integers():
    own(torch.zeros(4, dtype=torch.int64))


@meets("update-not-finite")
def training_that_diverged():
    own(torch.tensor([0.0, 1.0, float("nan"), 0.0]))


@meets("update-not-finite")
def training_that_overflowed():
    own(torch.tensor([0.0, 1.0, 0.0, float("-inf")]))


@meets("weight-out-of-range")
def more_examples_than_agreed():
    own(weight=11)


@meets("weight-out-of-range")
def fewer_examples_than_none():
    own(weight=-1)


@meets("slot-names-differ")
def a_figure_nobody_asked_for():
    own(age=41)


@meets("slot-not-finite")
def a_loss_that_is_not_a_number():
    own(loss=float("nan"))


@meets("count-out-of-range")
def more_hits_than_agreed():
    own(hits=101)


@meets("count-out-of-range")
def half_a_hit():
    own(hits=0.5)


@meets("encoded-for-another-round")
def the_vector_of_another_attempt():
    parties = until(ServerStage.MASKED)
    stale = encode(make_config(attempt=1), torch.zeros(4), weight=1)
    parties.clients[ALICE].mask(parties.inboxes[ALICE], stale)


@meets("encoded-for-another-round")
def a_vector_that_is_masked_already():
    parties = until(ServerStage.MASKED)
    encoded = parties.encoded(ALICE)
    parties.clients[ALICE].mask(parties.inboxes[ALICE], encoded)
    parties.clients[BOB].mask(parties.inboxes[BOB], encoded)
