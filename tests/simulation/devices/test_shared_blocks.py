"""Memory of devices that a process shares with its forks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.system.channel import Channel
from isthmus.system.forked_process import fork
from isthmus_simulation.devices.shared_blocks import SharedBlocks


@settings(deadline=None)
@given(st.lists(st.integers(0, 99), max_size=300))
def test_blocks_in_use_never_share_memory(numbers):
    """A number drops the block at that place, or asks for another one."""
    blocks, used = SharedBlocks(40), []
    for count, number in enumerate(numbers):
        if number < len(used):
            block, content = used.pop(number)
            assert bytes(block) == content
            del block
        else:
            block, content = blocks.new(number % 40 + 1), bytes([count % 256]) * (number % 40 + 1)
            block[:] = content
            used.append((block, content))
    assert len({SharedBlocks.number(block) for block, _ in used}) == len(used)
    assert all(bytes(block) == content for block, content in used)


def test_as_much_memory_is_used_again_as_was_used_at_once():
    blocks = SharedBlocks(10)
    for _ in range(5):
        used = [blocks.new(10) for _ in range(200)]
        assert {SharedBlocks.number(each) for each in used} <= set(range(256))
        del used


def test_a_slice_keeps_its_block():
    blocks = SharedBlocks(10)
    block = blocks.new(10)
    part = block[3:5]
    del block
    assert SharedBlocks.number(part) == 0
    assert SharedBlocks.number(blocks.new(10)) == 1


def test_a_fork_writes_to_blocks_whose_memory_it_is_passed():
    blocks = SharedBlocks(100)
    first = blocks.new(100)
    channel, theirs = Channel.pair()

    def write():
        channel.close()
        other = Channel(theirs)
        own = SharedBlocks(100)
        for _ in range(3):
            number, handles = other.receive_with_handles()
            own.add(handles)
            own.find(number[0], 100)[:] = number * 100

    child = fork(write)
    theirs.close()
    others = [blocks.new(100) for _ in range(220)]
    chosen = first, others[0], others[-1]
    passed = 0
    for block in chosen:
        handles = blocks.handles(passed)
        channel.send(bytes([SharedBlocks.number(block)]), handles)
        passed += len(handles)
    assert child.end(None) == 0
    channel.close()
    assert passed == 3
    for block in chosen:
        assert bytes(block) == bytes([SharedBlocks.number(block)]) * 100


def test_a_block_has_a_largest_size():
    with pytest.raises(AssertionError):
        SharedBlocks(10).new(11)
