"""A store for the tests of mirrors and of stored updates."""

import pytest
from tests.s3_server import s3_server


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A client of an S3-compatible server over HTTPS, with an empty bucket."""
    pytest.importorskip("moto", reason="moto is not installed; pip install 'moto[s3,server]'")
    pytest.importorskip("boto3", reason="boto3 is not installed; pip install boto3")
    with s3_server(tmp_path / "s3-keys") as served:
        for name, value in served.environment.items():
            monkeypatch.setenv(name, value)
        yield served.client
