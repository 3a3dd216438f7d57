"""The client's own update does not have the agreed form."""

import torch
from tests.privacy.attacks.registry import ALICE, BOB, expect_refusal, round_until
from tests.privacy.protocol import (
    make_config,
)

from isthmus_privacy.secagg.config import COUNT_LEVELS
from isthmus_privacy.secagg.encoding import encode
from isthmus_privacy.secagg.messages import Stage
from isthmus_privacy.slots import Slot

SLOTS = (Slot(name="hits", maximum=100.0, exact=True), Slot(name="loss", maximum=50.0))


def whole_config():
    return make_config(whole=True, bits=64, weight_max=1)


def encode_update(update=None, weight=5, **figures):
    config = make_config(slots=SLOTS)
    valid = {"hits": 3, "loss": 0.5}
    update = torch.zeros(4) if update is None else update
    encode(config, update, weight=weight, figures={**valid, **figures})


@expect_refusal("update-wrong-length")
def an_update_of_another_model():
    encode_update(torch.zeros(5))


@expect_refusal("update-wrong-length")
def an_update_of_integers():
    encode_update(torch.zeros(4, dtype=torch.int64))


@expect_refusal("update-wrong-length")
def fractions_in_place_of_whole_numbers():
    encode(whole_config(), torch.zeros(4), weight=1)


@expect_refusal("update-element-too-large")
def a_count_above_the_levels():
    counts = torch.tensor([0, 0, 0, COUNT_LEVELS // 2 + 1])
    encode(whole_config(), counts, weight=1)


@expect_refusal("update-not-finite")
def training_that_diverged():
    encode_update(torch.tensor([0.0, 1.0, float("nan"), 0.0]))


@expect_refusal("update-not-finite")
def training_that_overflowed():
    encode_update(torch.tensor([0.0, 1.0, 0.0, float("-inf")]))


@expect_refusal("weight-out-of-range")
def more_examples_than_the_maximum():
    encode_update(weight=11)


@expect_refusal("weight-out-of-range")
def a_negative_number_of_examples():
    encode_update(weight=-1)


@expect_refusal("slot-names-differ")
def a_figure_that_is_no_slot():
    encode_update(age=41)


@expect_refusal("slot-not-finite")
def a_loss_that_is_not_a_number():
    encode_update(loss=float("nan"))


@expect_refusal("count-out-of-range")
def a_count_above_its_maximum():
    encode_update(hits=101)


@expect_refusal("count-out-of-range")
def a_fractional_count():
    encode_update(hits=0.5)


@expect_refusal("encoded-for-another-attempt")
def the_vector_of_another_attempt():
    protocol = round_until(Stage.MASKED_INPUT)
    stale = encode(make_config(attempt=1), torch.zeros(4), weight=1)
    protocol.mask(ALICE, stale)


@expect_refusal("encoded-for-another-attempt")
def a_vector_that_is_already_masked():
    protocol = round_until(Stage.MASKED_INPUT)
    encoded = protocol.encoded(ALICE)
    protocol.mask(ALICE, encoded)
    protocol.mask(BOB, encoded)
