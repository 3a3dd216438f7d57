"""The server has almost the same clients sum the same updates several times, and subtracts."""

from tests.privacy.attacks.registry import ALICE, BOB, expect_refusal
from tests.privacy.protocol import MODEL_HASH, ProtocolRound, make_client, make_config

from isthmus_privacy.secagg.history import History, StartModel, essential
from isthmus_privacy.secagg.messages import Stage

FIRST = {"round": 3, "attempt": 0}


class Device:
    """One client over several attempts, whose history is on disk."""

    def __init__(self, name=ALICE):
        self.name = name
        self.entries = []

    def session(self, start=None, **changes):
        history = History(essential(self.entries), record=self.entries.append)
        return make_client(make_config(**changes), self.name, history=history, start=start)

    def attempt(self, dropouts=None, start=None, until=Stage.FINISHED, **changes):
        """Run an attempt with this client and five others, who have no history."""
        clients = {self.name: self.session(start, **changes)}
        return ProtocolRound(6, dropouts, clients=clients, **changes).until(until)


def repeat_without_bob(stage, **changes):
    device = Device()
    device.attempt(**FIRST)
    device.attempt({BOB: stage}, **{**FIRST, **changes})


@expect_refusal("unmasked-for-model")
def the_same_round_again_without_bob():
    repeat_without_bob(Stage.MASKED_INPUT, attempt=1)


@expect_refusal("unmasked-for-model")
def the_same_round_again_without_bobs_shares():
    """Refused before the masked vector is sent: afterwards the others could unmask it."""
    device = Device()
    device.attempt(**FIRST)
    device.attempt({BOB: Stage.SHARE_KEYS}, round=3, attempt=1, until=Stage.CONSISTENCY_CHECK)


@expect_refusal("unmasked-for-model")
def the_same_model_in_another_round_without_bob():
    repeat_without_bob(Stage.MASKED_INPUT, round=4)


@expect_refusal("unmasked-for-model")
def the_same_model_in_another_run_without_bob():
    repeat_without_bob(Stage.MASKED_INPUT, run_id="other")


@expect_refusal("unmasked-for-model")
def a_slightly_changed_model_in_the_same_round_without_bob():
    repeat_without_bob(Stage.MASKED_INPUT, attempt=1, model_hash=bytes(32))


@expect_refusal("unmasked-for-model")
def the_same_model_without_bob_after_many_other_runs():
    device = Device()
    device.attempt(**FIRST)
    for run in "abcdefghij":
        device.session(run_id=run)
    device.attempt({BOB: Stage.MASKED_INPUT}, round=4)


@expect_refusal("unmasked-for-data")
def counts_of_the_same_data_for_another_model_without_bob():
    """The labels that are counted are the same for all models."""
    device = Device()
    device.attempt(**FIRST, start=StartModel(3, bytes(32), data=bytes([7]) * 32))
    other = StartModel(4, bytes([1]) * 32, data=bytes([7]) * 32)
    device.attempt({BOB: Stage.MASKED_INPUT}, start=other, round=4, model_hash=bytes([1]) * 32)


@expect_refusal("unmasked-for-model")
def the_same_kept_update_in_two_buffers():
    """Even of the same devices: their other updates may have other start models."""
    device = Device()
    start = StartModel(round=2, model_hash=bytes(32), shared=False)
    for round_ in (3, 4):
        device.attempt(start=start, round=round_)


@expect_refusal("another-vector-for-model")
def the_same_model_in_another_range():
    """With the same devices: twice one sum less those in the next ranges is what was clipped."""
    device = Device()
    device.attempt(**FIRST)
    device.attempt(**{**FIRST, "attempt": 1}, clip=2.0)


@expect_refusal("another-vector-for-model")
def the_same_model_with_another_largest_weight_in_another_run():
    device = Device()
    device.attempt(**FIRST)
    device.attempt(run_id="other", weight_max=20)


@expect_refusal("another-vector-for-model")
def the_same_model_for_other_work():
    """Another job, or another position in the schedules of its learning rate."""
    device = Device()
    device.attempt(**FIRST)
    device.attempt(**{**FIRST, "attempt": 1}, purpose=bytes([1]) * 32)


@expect_refusal("another-vector-for-model")
def another_vector_of_a_device_that_was_not_asked_for_shares():
    """The others open the first sum, and in the second they are the same devices again.

    They give the same vectors, so the difference of the two sums is about this device alone.
    """
    device = Device()
    for number, vector in enumerate((bytes(32), bytes([1]) * 32)):
        start = StartModel(3, MODEL_HASH, vector=vector)
        device.attempt(start=start, until=Stage.UNMASKING, **{**FIRST, "attempt": number})


@expect_refusal("masked-in-another-run")
def two_runs_at_once_with_the_same_model():
    """Half of the clients finish one run first, half the other, so both sums are unmasked."""
    device = Device()
    device.attempt(until=Stage.CONSISTENCY_CHECK, run_id="one")
    device.attempt(until=Stage.CONSISTENCY_CHECK, run_id="two")


@expect_refusal("attempt-superseded")
def an_earlier_attempt_continued():
    history = History()
    clients = {ALICE: make_client(make_config(attempt=0), ALICE, history=history)}
    earlier = ProtocolRound(6, clients=clients, attempt=0).until(Stage.CONSISTENCY_CHECK)
    make_client(make_config(attempt=1), ALICE, history=history)
    earlier.check_consistency()
