"""What is read of a caller's first message, and that nothing else passes for one."""

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_server.transport.client_hello import (
    LARGEST_HELLO,
    RECORD_HEADER,
    NotAClientHello,
    protocols_of,
    size_of,
)


def hello_of(protocols, name="hub.example.org", newest=None):
    """The first message that OpenSSL sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if protocols:
        context.set_alpn_protocols(protocols)
    if newest is not None:
        context.maximum_version = newest
    sent = ssl.MemoryBIO()
    connection = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return sent.read()


HELLO = hello_of(["isthmus-join", "h2"])


def vector(content, length_bytes):
    return len(content).to_bytes(length_bytes, "big") + content


def record(message, kind=1):
    """A record with one message of a handshake."""
    return b"\x16\x03\x01" + vector(bytes([kind]) + vector(message, 3), 2)


def written(extensions, session=b"", suites=b"\x13\x01", compression=b"\x00", end=b""):
    """A ClientHello with any fields."""
    said = b"".join(kind.to_bytes(2, "big") + vector(content, 2) for kind, content in extensions)
    fixed = b"\x03\x03" + bytes(32)
    fields = vector(session, 1) + vector(suites, 2) + vector(compression, 1)
    return record(fixed + fields + vector(said, 2) + end)


def alpn(*names):
    return 16, vector(b"".join(vector(name, 1) for name in names), 2)


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("name", ["hub.example.org", "192.0.2.7"])
@pytest.mark.parametrize("protocols", [[], ["h2"], ["h2", "http/1.1"], ["isthmus-join", "h2"]])
def test_the_offers_of_a_real_client_are_read(protocols, name, newest):
    hello = hello_of(protocols, name, newest)
    assert size_of(hello) == size_of(hello[:RECORD_HEADER]) == len(hello)
    assert protocols_of(hello) == tuple(each.encode() for each in protocols)


@given(
    st.lists(st.binary(min_size=1, max_size=255), min_size=1, max_size=20),
    st.lists(st.integers(0, 65535).filter(lambda kind: kind != 16), unique=True, max_size=9),
    st.binary(max_size=32),
)
def test_protocols_are_found_among_any_other_extensions(names, others, session):
    extensions = [(kind, bytes(kind % 7)) for kind in others]
    extensions.insert(len(others) // 2, alpn(*names))
    assert protocols_of(written(extensions, session)) == tuple(names)


@given(st.binary(max_size=600) | st.binary(max_size=600).map(record))
def test_bytes_of_any_kind_are_refused_or_read(data):
    """There is no other error, and never a size beyond that of a record."""
    try:
        assert RECORD_HEADER <= size_of(data) <= LARGEST_HELLO
        assert all(protocols_of(data))
    except NotAClientHello:
        pass


@given(st.integers(0, len(HELLO) - 1))
def test_a_part_of_a_message_is_never_taken_for_a_whole_one(length):
    assert size_of(HELLO[:length]) > length or length == RECORD_HEADER
    with pytest.raises(NotAClientHello):
        protocols_of(HELLO[:length])


@given(st.integers(RECORD_HEADER, len(HELLO) - 1), st.integers(1, 255))
def test_a_changed_message_is_refused_or_read_as_what_it_says(place, change):
    """It may offer something else than the client's did, and never what no client has written."""
    changed = bytearray(HELLO)
    changed[place] ^= change
    try:
        found = protocols_of(bytes(changed))
    except NotAClientHello:
        return
    assert all(name in changed for name in found)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "no handshake"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "no handshake"),
        (b"\x16\x02\x01\x00\x05", "no known version"),
        (b"\x16\x03\x01\x00\x00", "a size that TLS forbids"),
        (b"\x16\x03\x01\x40\x01", "a size that TLS forbids"),
        (record(b"", kind=2), "no ClientHello"),
        (HELLO + b"\x00", "incomplete"),
        (written([alpn(b"h2"), alpn(b"isthmus-join")]), "an extension twice"),
        (written([alpn(b"h2")], end=b"\x00"), "bytes after its end"),
        (written([alpn(b"h2", b"")]), "a protocol without a name"),
        (written([alpn()]), "a protocol without a name"),
        (written([(16, b"\x00\x03\x02h2\x00")]), "bytes after its end"),
        (written([(16, b"\x00\x04\x02h2")]), "ends within a field"),
        (written([(kind, b"") for kind in range(65)]), "too many extensions"),
        (written([alpn(*[b"h2"] * 65)]), "too many protocols"),
        (written([alpn(b"h2")], session=bytes(33)), "too long a name"),
        (written([alpn(b"h2")], suites=b""), "no ciphers"),
        (written([alpn(b"h2")], suites=b"\x13"), "no ciphers"),
        (written([alpn(b"h2")], compression=b""), "no compression"),
    ],
)
def test_what_differs_from_the_standard_is_refused(data, sentence):
    with pytest.raises(NotAClientHello, match=sentence):
        size_of(data) and protocols_of(data)
