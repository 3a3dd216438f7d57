import grpc
import grpc.aio
import pytest

from isthmus.grpc_errors import short_message
from isthmus.transport.uplink import METHOD

TO_ALL = "failed to connect to all addresses; last error: "
TLS = "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:"


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (
            f"{TO_ALL}UNKNOWN: ipv4:127.0.0.1:1: {TLS}OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: "
            "self signed certificate: OK",
            "its certificate does not pass: self signed certificate",
        ),
        (
            f"{TO_ALL}UNKNOWN: ipv4:127.0.0.1:1: {TLS}OPENSSL_internal:WRONG_VERSION_NUMBER: "
            "Invalid certificate verification context: OK",
            "what answers there does not speak TLS",
        ),
        (
            f"{TO_ALL}UNKNOWN: ipv4:127.0.0.1:1: Custom verification check failed with error: "
            "UNAUTHENTICATED: Hostname Verification Check failed.",
            "its certificate is for another name than the one dialled",
        ),
        (
            f"{TO_ALL}INTERNAL: ipv4:127.0.0.1:1: Failed parsing HTTP/2 (Expected SETTINGS frame "
            "as the first frame, got frame type 80) (Trying to connect an http1.x server)",
            "what answers there does not speak gRPC",
        ),
        (
            f"{TO_ALL}UNAVAILABLE: ipv4:127.0.0.1:1: Handshake read failed (recvmsg:Connection "
            "reset by peer (104))",
            "the connection was cut",
        ),
        (f"{TO_ALL}UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", "it closed the connection"),
        (
            f"{TO_ALL}UNKNOWN: ipv4:127.0.0.1:1: HTTP proxy returned response code 503",
            "the proxy answered 503",
        ),
        (
            f"{TO_ALL}UNKNOWN: ipv4:10.9.2.2:443: {TLS}OPENSSL_internal:"
            "TLSV1_ALERT_NO_APPLICATION_PROTOCOL: Invalid certificate verification context: OK",
            "what answers there takes none of gRPC's connections over TLS",
        ),
        (f"{TO_ALL}{'word ' * 100}", "word " * 39 + "word ..."),
        (f"{TO_ALL}UNKNOWN: something new", "UNKNOWN: something new"),
        ("", "no reason was given"),
    ],
)
def test_grpc_details_are_shortened(details, words):
    assert short_message(details) == words


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("unix:/nowhere/socket", "there is no such socket"),
        ("host.invalid:9400", "the name has no known address"),
        ("127.0.0.1:1", "nothing listens there (connection refused)"),
    ],
)
async def test_details_of_the_installed_grpc_are_recognised(address, words):
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_stream(METHOD)().read()
    assert short_message(caught.value.details()) == words
