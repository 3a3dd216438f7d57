"""A server that speaks the protocol of S3 over HTTPS, with one bucket, on a port of loopback."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.static_https import new_certificate

BUCKET = "models"
_OBJECT = re.compile(r"/[0-9a-f]{64}$")


class S3Server:
    """The server, a client of it, and what programs need to find it."""

    def __init__(self, app: Callable[..., Any], certificate: Path) -> None:
        self.app = app
        self.certificate = certificate
        self.port = 0
        self.client: Any = None
        self.put: list[str] = []
        """Paths of the blobs that were to be put there."""
        self.gate: threading.Event | None = None
        """What these wait for."""
        self.free = 0
        """How many of the first of them do not wait."""
        self.refuses = False
        """Whether they are refused."""

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        """Answer a request, see PEP 3333."""
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] == "PUT" and _OBJECT.search(path):
            self.put.append(path)
            if self.gate is not None and len(self.put) > self.free:
                self.gate.wait(100)
            if self.refuses:
                environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
                start("403 Forbidden", [("Content-Length", "0")])
                return [b""]
        return self.app(environ, start)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for servers and devices."""
        return {
            "SSL_CERT_FILE": str(self.certificate),
            "AWS_CA_BUNDLE": str(self.certificate),
            "AWS_ENDPOINT_URL": f"https://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @property
    def keys(self) -> list[str]:
        """What is in the bucket."""
        found = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", ())
        return [item["Key"] for item in found]


@contextmanager
def s3_server(keys: Path) -> Iterator[S3Server]:
    """Serve during the block; the certificate is written to `keys`. It needs moto and boto3."""
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    certificate, key = new_certificate(keys)
    s3 = S3Server(DomainDispatcherApplication(create_backend_app), certificate)
    server = make_server(
        "127.0.0.1", 0, s3, threaded=True, ssl_context=(str(certificate), str(key))
    )
    s3.port = server.port
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        s3.client = boto3.client(
            "s3",
            endpoint_url=f"https://127.0.0.1:{s3.port}",
            aws_access_key_id="a",
            aws_secret_access_key="b",
            region_name="us-east-1",
            verify=str(certificate),
        )
        s3.client.create_bucket(Bucket=BUCKET)
        yield s3
    finally:
        if s3.gate is not None:
            s3.gate.set()
        for name in s3.keys:
            s3.client.delete_object(Bucket=BUCKET, Key=name)
        s3.client.delete_bucket(Bucket=BUCKET)
        server.shutdown()
        thread.join()
        server.server_close()
