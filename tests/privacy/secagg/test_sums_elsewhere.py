"""Masked vectors that other processes add: in the sum as a whole, or dropped out before."""

import pytest
from tests.privacy.protocol import ProtocolRound

from isthmus_privacy.secagg.messages import Stage


class DividedRound(ProtocolRound):
    """A round in which the vectors of some clients are added elsewhere."""

    def __init__(self, elsewhere, *, lost=(), **more):
        super().__init__(count=8, dropouts=dict.fromkeys(lost, Stage.MASKED_INPUT), **more)
        self.lost = lost
        self.elsewhere = elsewhere

    def mask_inputs(self):
        parts = [self.config.new_vector() for _ in self.elsewhere]
        for name in self.clients:
            message, payload = self.mask(name)
            place = [number for number, names in enumerate(self.elsewhere) if name in names]
            if not place:
                self.server.receive_masked_input(message, payload)
                continue
            parts[place[0]].add(bytes(payload))
            self.server.note_masked_input(message)
        with pytest.raises(ValueError, match="noted vectors are not in the sum yet"):
            self.server.finish_masked_input()
        for part, names in zip(parts, self.elsewhere, strict=True):
            if names == self.lost:
                self.server.lose_masked_sum(names)
                continue
            payload = memoryview(bytes(part.payload()))
            with pytest.raises(ValueError, match="not the sum of vectors"):
                self.server.receive_masked_sum(names, payload[1:])
            self.server.receive_masked_sum(names, payload)
            with pytest.raises(ValueError, match="not the sum of vectors"):  # never twice
                self.server.receive_masked_sum(names, payload)
        self.survivors = self.server.finish_masked_input()
        return self


def test_sums_of_other_processes_are_in_the_sum_bit_for_bit():
    parties = sorted(DividedRound(()).clients)
    total = DividedRound((tuple(parties[:3]), tuple(parties[3:5]))).run()
    assert list(total.clients) == parties


def test_clients_whose_sum_is_lost_are_not_in_the_sum():
    parties = sorted(DividedRound(()).clients)
    lost = tuple(parties[:1])
    total = DividedRound((lost, tuple(parties[1:4])), lost=lost, clients_min=4).run()
    assert list(total.clients) == parties[1:]
