"""Files of a model come from a store that speaks the protocol of S3, by presigned addresses."""

from __future__ import annotations

import threading

import pytest
from tests.static_https import new_certificate

from isthmus.job import with_changes

pytest.importorskip("moto", reason="moto is not installed; pip install 'moto[s3,server]'")
boto3 = pytest.importorskip("boto3", reason="boto3 is not installed; pip install boto3")
BUCKET = "models"
KEYS = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A client of an S3-compatible server over HTTPS, with an empty bucket."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    certificate, key = new_certificate(tmp_path / "s3-keys")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server(
        "127.0.0.1", 0, app, threaded=True, ssl_context=(str(certificate), str(key))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    client = boto3.client("s3", endpoint_url=f"https://127.0.0.1:{server.port}", **KEYS)
    client.create_bucket(Bucket=BUCKET)
    yield client
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_file_comes_from_a_presigned_address_and_is_continued(
    device, job, model, manifest, store
):
    """The job names the address, and the owner permits its host."""
    file = model / "model.safetensors"
    store.upload_file(str(file), BUCKET, "base/model.safetensors")
    asked = {"Bucket": BUCKET, "Key": "base/model.safetensors"}
    address = store.generate_presigned_url("get_object", Params=asked, ExpiresIn=600)
    assert "Signature=" in address
    job = with_changes(job, {"model.sources": [address]})
    # What an interrupted download has left.
    device.store.partial.mkdir(parents=True)
    partial = device.store.partial / manifest.files[0].sha256
    partial.write_bytes(file.read_bytes()[:300_000])
    limits = "weights_mb = 20\n[weights]\nlink = false\njob_sources = ['https://127.0.0.1:*/*']\n"
    place = await device.get(job, limits)
    assert place is not None
    assert min(each.bytes for each in device.reports) >= 300_000
    (stored,) = device.store.models()
    assert stored.manifest == manifest
