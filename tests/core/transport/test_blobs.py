import hashlib
import random
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UpdateError
from isthmus.transport.blobs import (
    BROADCAST_BYTES,
    CHUNK_BYTES,
    Assembly,
    Broadcast,
    InFile,
    chunks,
    describe,
    into,
    piece_of,
)
from isthmus.wire import link_pb2

payloads = st.binary(max_size=3000)
chunk_sizes = st.integers(1, 1000)


def read(messages):
    return [link_pb2.Envelope.FromString(message).chunk for message in messages]


@given(payloads, chunk_sizes, st.data())
def test_a_transfer_resumes_from_any_offset(payload, chunk_bytes, data):
    blob = describe(payload)
    copy = bytearray(blob.size)
    assembly = Assembly(blob, into(copy))
    while not assembly.complete:
        sent = read(chunks(blob.sha256, payload, offset=assembly.offset, chunk_bytes=chunk_bytes))
        arriving = data.draw(st.integers(1, len(sent)))
        for chunk in sent[:arriving]:
            assembly.add(chunk)
    assert copy == payload


@given(payloads, chunk_sizes, st.integers(0, 3500))
def test_manually_encoded_envelopes_equal_protobufs(payload, chunk_bytes, offset):
    blob = describe(payload)
    ours = list(chunks(blob.sha256, payload, offset=offset, chunk_bytes=chunk_bytes))
    theirs = [
        link_pb2.Envelope(
            chunk=link_pb2.Chunk(
                sha256=blob.sha256, offset=start, data=payload[start : start + chunk_bytes]
            )
        ).SerializeToString()
        for start in range(offset, len(payload), chunk_bytes)
    ]
    assert ours == theirs


@given(st.integers(0, 5 * CHUNK_BYTES), st.lists(st.integers(0, 5 * CHUNK_BYTES), max_size=9))
def test_a_broadcast_sends_each_receiver_the_rest_from_its_offset(size, offsets):
    """From memory and from a file, for every order of receivers."""
    payload = random.Random(size).randbytes(size)
    blob = describe(payload)
    with tempfile.TemporaryFile() as file:
        file.write(payload)
        file.flush()
        for source in (payload, InFile(file, size)):
            broadcast = Broadcast(blob.sha256, source)
            for offset in (0, *offsets):
                pieces = [piece_of(message) for message, _ in broadcast.messages(offset)]
                assert b"".join(piece.data for piece in pieces) == payload[offset:]
                sizes = [size for _, size in broadcast.messages(offset)]
                assert sizes == [len(piece.data) for piece in pieces]
                ends = [piece.offset + len(piece.data) for piece in pieces]
                assert [piece.offset for piece in pieces] == [offset, *ends][: len(pieces)]
                assert all(len(piece.data) <= BROADCAST_BYTES for piece in pieces)
            copy = bytearray(size)
            broadcast.fill(copy)
            assert copy == payload


def test_receivers_at_the_same_offset_share_a_message():
    broadcast = Broadcast(bytes(32), bytes(30 * CHUNK_BYTES))
    one, other = broadcast.messages(0), broadcast.messages(0)
    for message, _ in one:
        assert next(other)[0] is message


def test_a_blob_with_a_truncated_file_is_an_error(tmp_path):
    with (tmp_path / "blob").open("wb+") as file:
        file.write(bytes(BROADCAST_BYTES))
        file.flush()
        messages = Broadcast(bytes(32), InFile(file, 2 * BROADCAST_BYTES)).messages(0)
        next(messages)
        with pytest.raises(OSError, match="was cut short"):
            next(messages)


def fields(chunk):
    return chunk.sha256, chunk.offset, bytes(chunk.data), chunk.absent


@given(payloads, chunk_sizes)
def test_every_chunk_is_read_without_protobuf(payload, chunk_bytes):
    messages = list(chunks(bytes(range(32)), payload, offset=0, chunk_bytes=chunk_bytes))
    found = [fields(piece_of(message)) for message in messages]
    assert found == [fields(chunk) for chunk in read(messages)]


@given(st.binary(max_size=80), st.integers(0, 300), st.data())
def test_manually_decoded_chunks_equal_protobufs(payload, offset, data):
    whole = bytes(offset) + payload
    message = bytearray(next(chunks(bytes(32), whole, offset=offset, chunk_bytes=90), b""))
    for _ in range(data.draw(st.integers(0, 3))):
        if message:
            message[data.draw(st.integers(0, min(50, len(message)) - 1))] = data.draw(
                st.integers(0, 255)
            )
    message = bytes(message[: data.draw(st.integers(0, len(message)))]) + data.draw(
        st.binary(max_size=2)
    )
    piece = piece_of(message)
    if piece is not None:
        (chunk,) = read([message])
        assert fields(piece) == fields(chunk)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x2a",
        b"\x2a" + b"\xff" * 12,
        link_pb2.Envelope(ping=link_pb2.Ping()).SerializeToString(),
        link_pb2.Envelope(chunk=link_pb2.Chunk(sha256=bytes(32), absent=True)).SerializeToString(),
        link_pb2.Envelope(chunk=link_pb2.Chunk(sha256=b"short", data=b"x")).SerializeToString(),
    ],
)
def test_other_messages_are_decoded_by_protobuf(message):
    assert piece_of(message) is None


def test_a_full_chunk_equals_protobufs():
    payload = bytes(CHUNK_BYTES)
    (ours,) = chunks(bytes(32), payload, offset=0)
    theirs = link_pb2.Envelope(chunk=link_pb2.Chunk(sha256=bytes(32), data=payload))
    assert ours == theirs.SerializeToString()


def test_a_blob_is_identified_by_its_sha256_and_size():
    blob = describe(bytearray(b"abc"))
    assert (blob.sha256, blob.size) == (hashlib.sha256(b"abc").digest(), 3)


def assembly_of(payload):
    copy = bytearray(len(payload))
    return Assembly(describe(payload), into(copy)), copy


def chunk(offset, data):
    return link_pb2.Chunk(offset=offset, data=data)


@given(st.binary(min_size=1, max_size=500), st.data())
def test_one_damaged_byte_is_detected(payload, data):
    assembly, _ = assembly_of(payload)
    damaged = bytearray(payload)
    damaged[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(UpdateError, match="does not match its SHA-256"):
        assembly.add(chunk(0, bytes(damaged)))
    assert not assembly.complete


def test_a_repeated_chunk_is_ignored():
    assembly, copy = assembly_of(b"abcdef")
    for piece in (chunk(0, b"abc"), chunk(0, b"abc"), chunk(1, b"b"), chunk(3, b"def")):
        assembly.add(piece)
    assert assembly.complete
    assert copy == b"abcdef"


@pytest.mark.parametrize(
    ("offset", "data"), [(4, b"ef"), (3, b""), (2, b"cde"), (2**63, b"x")], ids=repr
)
def test_a_gap_or_an_overlap_is_refused(offset, data):
    assembly, _ = assembly_of(b"abcdef")
    assembly.add(chunk(0, b"abc"))
    if data:
        with pytest.raises(UpdateError, match="has a gap: at byte 3"):
            assembly.add(chunk(offset, data))
    else:
        assembly.add(chunk(offset, data))
    assert assembly.offset == 3


def test_nothing_is_written_beyond_the_agreed_size():
    written = []
    assembly = Assembly(describe(b"abc"), lambda offset, data: written.append(data))
    with pytest.raises(UpdateError, match="a transfer of 3 bytes continued to byte 4"):
        assembly.add(chunk(0, b"abcd"))
    assert written == []


def test_a_blob_that_is_not_verified_has_all_its_bytes_in_order():
    copy = bytearray(6)
    assembly = Assembly(link_pb2.Blob(sha256=bytes(32), size=6), into(copy), verified=False)
    assembly.add(chunk(0, b"abc"))
    assert not assembly.complete
    with pytest.raises(UpdateError, match="has a gap: at byte 3"):
        assembly.add(chunk(4, b"ef"))
    with pytest.raises(UpdateError, match="a transfer of 6 bytes continued to byte 7"):
        assembly.add(chunk(3, b"defg"))
    again = assembly.copy()
    again.add(chunk(3, b"def"))
    assert again.complete
    assert copy == b"abcdef"


def test_no_bytes_are_complete_at_once():
    assembly, _ = assembly_of(b"")
    assert assembly.complete
    assert list(chunks(describe(b"").sha256, b"", offset=0)) == []
