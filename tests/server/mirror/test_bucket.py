"""A mirror in a store that speaks the protocol of S3."""

import pytest
from tests.server.mirror.test_mirrored_blobs import Offered, asked
from tests.server.scripted_participant import payload_of

from isthmus.errors import UserError
from isthmus.transport.blob_sources import Filling
from isthmus.transport.blobs import Assembly, into
from isthmus.transport.mirrors import MirrorSources
from isthmus_server.mirror.mirrored_blobs import MirroredBlobs
from isthmus_server.mirror.options import place_named
from isthmus_server.mirror.place import MARKER

pytest.importorskip("moto", reason="moto is not installed; pip install 'moto[s3,server]'")
pytest.importorskip("boto3", reason="boto3 is not installed; pip install boto3")
LARGE = 9 << 20
"""More than is sent in one part."""


def names(store):
    found = store.list_objects_v2(Bucket="models").get("Contents", ())
    return [item["Key"] for item in found if not item["Key"].endswith(MARKER)]


@pytest.mark.parametrize("size", [100_000, LARGE])
async def test_a_device_gets_a_model_from_a_signed_address(store, size):
    offered = Offered(payload_of(size))
    blobs = MirroredBlobs(place_named("s3:models/of/us", None))
    async with blobs.running("me"):
        blob = await asked(blobs, offered)
        assert blob.address.startswith("https://127.0.0.1:")
        assert "Signature=" in blob.address
        (name,) = names(store)
        assert name.startswith("of/us/")
        stored = store.get_object(Bucket="models", Key=name)["Body"].read()
        assert len(stored) == size
        assert offered.payload[:32] not in stored
        memory = bytearray(size)
        assembly = Assembly(blob, into(memory))
        source = MirrorSources(["https://127.0.0.1:*/models/*"], "x").of(blob)
        assert (await Filling(assembly, [source]).run()).complete
        assert memory == offered.payload
    assert names(store) == []


async def test_a_prefix_is_one_servers_and_has_nothing_else(store):
    place = place_named("s3:models/a", "https://cdn.example.org/a")
    for _ in range(2):
        place.claim("me")
    with pytest.raises(UserError, match="is the mirror of another server; name another PREFIX"):
        place.claim("you")
    assert place.address("ab") == "https://cdn.example.org/a/ab"
    store.put_object(Bucket="models", Key="b/file", Body=b"of others")
    with pytest.raises(UserError, match="s3:models/b has other files; name a PREFIX"):
        place_named("s3:models/b", None).claim("me")
    with pytest.raises(UserError, match=r"s3:nowhere cannot be used: .*NoSuchBucket"):
        place_named("s3:nowhere", None).claim("me")


async def test_a_store_without_tls_signs_no_addresses(store, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    with pytest.raises(UserError, match=r"devices get nothing from http://127\.0\.0\.1:9000"):
        place_named("s3:models", None)
