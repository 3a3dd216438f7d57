"""Messages between processes, their bounds and their descriptors."""

import os
import socket
import threading
from pathlib import Path

import pytest

from isthmus.system.channel import Channel, TooLarge


@pytest.fixture
def ends():
    channel, other = Channel.pair()
    yield channel, other
    channel.close()
    other.close()


def test_messages_of_any_size_arrive_in_order_with_vectors_between_them(ends):
    """A larger one than a socket holds is sent in parts."""
    channel, other = ends
    messages = [b"", b"a", os.urandom(3 << 20), b"last"]
    vector = bytearray(os.urandom(1 << 20))

    def send():
        for message in messages:
            channel.send(message)
        channel.send_vector(vector)

    sender = threading.Thread(target=send)
    sender.start()
    received = Channel(other)
    assert [received.receive() for _ in messages] == messages
    place = bytearray(len(vector))
    received.receive_into(place)
    sender.join()
    assert place == vector


@pytest.mark.parametrize("method", ["receive", "receive_with_handles"])
def test_nothing_is_allocated_for_a_message_that_is_too_large(method, ends):
    channel, other = ends
    channel.send(b"12345")
    other.sendall(bytes([255] * 4))  # 4 GiB
    assert Channel(other).receive(5) == b"12345"
    with pytest.raises(TooLarge, match="a message of 4294967295 bytes was announced"):
        getattr(channel, method)(64)


@pytest.mark.parametrize("method", ["receive", "receive_with_handles"])
@pytest.mark.parametrize("part", [b"", b"\0\0", b"\0\0\0\5", b"\0\0\0\5abc"])
def test_the_end_of_the_other_process_is_noticed_within_a_message(method, part, ends):
    channel, other = ends
    other.sendall(part)
    other.close()
    with pytest.raises(EOFError):
        getattr(channel, method)()


def test_descriptors_belong_to_their_message_and_are_not_inherited(ends):
    channel, other = ends
    channel.send(b"none")
    channel.send(b"two", [channel.fileno(), other.fileno()])
    received = Channel(other)
    assert received.receive_with_handles() == (b"none", [])
    message, handles = received.receive_with_handles()
    assert message == b"two"
    assert len(handles) == 2
    for handle in handles:
        assert not os.get_inheritable(handle)
        os.close(handle)


def test_a_message_whose_descriptors_were_lost_is_an_error(ends):
    channel, other = ends
    own = [other.fileno()] * 100
    channel.send(b"many", own)
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(OSError, match="descriptors of a message were lost"):
        Channel(other).receive_with_handles()
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_message_that_is_not_received_makes_nobody_wait_who_does_not_want_to(ends):
    _, other = ends
    other.setblocking(False)
    with pytest.raises(BlockingIOError):
        other.sendall(bytes(64 << 20))
    other.setblocking(True)
    with pytest.raises(BlockingIOError):
        Channel(other).send(b"cancel", wait=False)


def test_a_connection_that_is_shut_down_ends_for_a_thread_that_receives(ends):
    channel, _ = ends
    ended = []

    def receive():
        with pytest.raises(EOFError):
            channel.receive()
        ended.append(True)

    receiver = threading.Thread(target=receive)
    receiver.start()
    channel.shut_down()
    receiver.join()
    assert ended


def test_a_reset_connection_has_ended():
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    own.sendall(b"never read")
    peer.close()  # with something unread: a reset
    with own, pytest.raises(EOFError):
        Channel(own).receive()
