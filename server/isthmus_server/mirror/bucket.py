"""A bucket of a store that speaks the protocol of S3: of a cloud, or MinIO, Ceph, R2 and others.

Its address, region and credentials are those of every program that uses Amazon's library:
`AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID` and so on, a profile, or the machine's role.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

from isthmus.errors import UserError, cause_of
from isthmus_server.mirror.place import MARKER, NAME, UPLOADS_MARKER

SIGNED_SECONDS = 6 * 3600
"""Validity of an address; a request is seldom open for longer, and then its blob is pulled."""
UPLOAD_SECONDS = 3600
"""Validity of an address for an upload, which begins at once."""
_CONNECT_SECONDS = 10
_ANSWER_SECONDS = 20
_CONNECTIONS = 16
"""Most that are kept open: some updates are read at the same time."""


class StoreBucket:
    """The names with one beginning in a bucket, which are one server's alone."""

    _MARKER = MARKER
    """A file that says whose they are."""
    _PURPOSE = "the mirror"
    """What they are, for sentences."""

    def __init__(self, option: str, target: str) -> None:
        """Name the bucket and the beginning of the names in it.

        Args:
            option: which says so, for sentences.
            target: `BUCKET/PREFIX`, or a bucket.

        Raises:
            UserError: Amazon's library is missing, or not configured.
        """
        self._shown = f"{option} s3:{target}"
        try:
            import boto3
            from botocore.config import Config
        except ImportError:
            raise UserError(
                f"{self._shown} needs boto3, of 1.36 or newer: pip install boto3"
            ) from None
        self._bucket, _, prefix = target.partition("/")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        config = Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_ANSWER_SECONDS,
            retries={"total_max_attempts": 2},
            max_pool_connections=_CONNECTIONS,
            signature_version="s3v4",
            request_checksum_calculation="when_required",  # which other stores may not know
            response_checksum_validation="when_required",
        )
        with self._refusing():
            self._client: Any = boto3.session.Session().client("s3", config=config)

    def claim(self, owner: str) -> None:
        """See `MirrorPlace.claim`."""
        with self._refusing(), _as_os_errors():
            found = self._marker()
            if found is None:
                if any(True for _ in self._keys(most=1)):
                    raise UserError(
                        f"{self._shown} has other files; name a PREFIX under which there are none"
                    )
                self._client.put_object(
                    Bucket=self._bucket, Key=self._prefix + self._MARKER, Body=f"{owner}\n".encode()
                )
            elif found != owner:
                raise UserError(
                    f"{self._shown} is {self._PURPOSE} of another server; name another PREFIX"
                )

    def _marker(self) -> str | None:
        """The fingerprint of the server whose names they are; None for no server."""
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + self._MARKER)
        except self._client.exceptions.NoSuchKey:
            return None
        text: bytes = answer["Body"].read(1000)
        return text.decode(errors="replace").strip()

    def names(self) -> Iterable[str]:
        """See `MirrorPlace.names`."""
        with _as_os_errors():
            found = [key.removeprefix(self._prefix) for key in self._keys()]
        return [name for name in found if NAME.fullmatch(name)]

    def remove(self, name: str) -> None:
        """See `MirrorPlace.remove`."""
        with _as_os_errors():
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    def _check_tls(self, devices: str, otherwise: str = "") -> None:
        """Refuse a store without TLS.

        Args:
            devices: what they do not do there.
            otherwise: what helps besides, as a clause.
        """
        address = self._client.meta.endpoint_url
        if not address.startswith("https://"):
            raise UserError(
                f"{self._shown}: devices {devices} {address}, which is without TLS; give the "
                f"store's https:// address as AWS_ENDPOINT_URL{otherwise}"
            )

    def _keys(self, most: int | None = None) -> Iterator[str]:
        """Names in the bucket that begin with the prefix, without those in folders below."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket,
            Prefix=self._prefix,
            Delimiter="/",
            PaginationConfig={"MaxItems": most} if most else {},
        )
        for page in pages:
            for item in page.get("Contents", ()):
                yield item["Key"]

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn what is wrong with the bucket into a sentence."""
        from botocore.exceptions import BotoCoreError

        try:
            yield
        except (OSError, BotoCoreError, ValueError) as error:
            raise UserError(f"{self._shown} cannot be used: {cause_of(error)}") from None


class MirrorBucket(StoreBucket):
    """`s3:BUCKET/PREFIX`, see `isthmus_server.mirror.place.MirrorPlace`."""

    def __init__(self, target: str, url: str | None) -> None:
        """Name the bucket and the beginning of the names in it.

        Args:
            target: `BUCKET/PREFIX`, or a bucket.
            url: at which it is served to devices; None for addresses that are signed.

        Raises:
            UserError: Amazon's library is missing, or not configured.
        """
        super().__init__("--mirror", target)
        from boto3.s3.transfer import TransferConfig

        self._url = url
        # In the thread that puts it: a large blob is sent in parts, of which few are in memory.
        self._transfer = TransferConfig(use_threads=False)
        if url is None:
            self._check_tls(
                "get nothing from", ", or one at which a web server serves it with --mirror-url"
            )

    def put(self, name: str, stream: IO[bytes], size: int) -> None:
        """See `MirrorPlace.put`."""
        with _as_os_errors():
            self._client.upload_fileobj(
                stream, self._bucket, self._prefix + name, Config=self._transfer
            )
            answer = self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)
        if answer["ContentLength"] != size:
            raise OSError(f"{answer['ContentLength']} of {size} bytes were written")

    def address(self, name: str) -> str:
        """See `MirrorPlace.address`."""
        if self._url is not None:
            return f"{self._url}{name}"
        asked = {"Bucket": self._bucket, "Key": self._prefix + name}
        signed: str = self._client.generate_presigned_url(
            "get_object", Params=asked, ExpiresIn=SIGNED_SECONDS
        )
        return signed


class UploadBucket(StoreBucket):
    """`s3:BUCKET/PREFIX`, see `isthmus_server.mirror.place.UploadStore`."""

    _MARKER = UPLOADS_MARKER
    _PURPOSE = "for the updates"

    def __init__(self, target: str) -> None:
        """Name the bucket and the beginning of the names in it.

        Args:
            target: `BUCKET/PREFIX`, or a bucket.

        Raises:
            UserError: Amazon's library is missing, or not configured.
        """
        super().__init__("--uploads", target)
        self._check_tls("send nothing to")

    def upload_address(self, name: str, size: int) -> str:
        """See `UploadStore.upload_address`."""
        # The length is signed, too: the store takes no file of another size.
        asked = {"Bucket": self._bucket, "Key": self._prefix + name, "ContentLength": size}
        signed: str = self._client.generate_presigned_url(
            "put_object", Params=asked, ExpiresIn=UPLOAD_SECONDS
        )
        return signed

    def open(self, name: str) -> tuple[IO[bytes], int]:
        """See `UploadStore.open`."""
        with _as_os_errors():
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            except self._client.exceptions.NoSuchKey:
                raise FileNotFoundError(name) from None
        return answer["Body"], answer["ContentLength"]


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise the library's errors as `OSError`."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError, Boto3Error) as error:
        raise OSError(str(error)) from error
