"""A bucket of a store that speaks the protocol of S3: of a cloud, or MinIO, Ceph, R2 and others.

Its address, region and credentials are those of every program that uses Amazon's library:
`AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID` and so on, a profile, or the machine's role.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

from isthmus.errors import UserError, cause_of
from isthmus_server.mirror.place import MARKER, NAME

SIGNED_SECONDS = 6 * 3600
"""Validity of an address; a request is seldom open for longer, and then its blob is pulled."""
_CONNECT_SECONDS = 10
_ANSWER_SECONDS = 20


class MirrorBucket:
    """`s3:BUCKET/PREFIX`, see `isthmus_server.mirror.place.MirrorPlace`."""

    def __init__(self, target: str, url: str | None) -> None:
        """Name the bucket and the beginning of the names in it.

        Args:
            target: `BUCKET/PREFIX`, or a bucket.
            url: at which it is served to devices; None for addresses that are signed.

        Raises:
            UserError: Amazon's library is missing, or not configured.
        """
        try:
            import boto3
            from boto3.s3.transfer import TransferConfig
            from botocore.config import Config
        except ImportError:
            raise UserError(
                f"--mirror s3:{target} needs boto3, of 1.36 or newer: pip install boto3"
            ) from None
        self._shown = f"--mirror s3:{target}"
        self._bucket, _, prefix = target.partition("/")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._url = url
        config = Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_ANSWER_SECONDS,
            retries={"total_max_attempts": 2},
            signature_version="s3v4",
            request_checksum_calculation="when_required",  # which other stores may not know
            response_checksum_validation="when_required",
        )
        with self._refusing():
            self._client: Any = boto3.session.Session().client("s3", config=config)
        # In the thread that puts it: a large blob is sent in parts, of which few are in memory.
        self._transfer = TransferConfig(use_threads=False)
        if url is None and not self._client.meta.endpoint_url.startswith("https://"):
            raise UserError(
                f"{self._shown}: devices get nothing from {self._client.meta.endpoint_url}, which "
                "is without TLS; give the store's https:// address as AWS_ENDPOINT_URL, or one at "
                "which a web server serves it with --mirror-url"
            )

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
                    Bucket=self._bucket, Key=self._prefix + MARKER, Body=f"{owner}\n".encode()
                )
            elif found != owner:
                raise UserError(
                    f"{self._shown} is the mirror of another server; name another PREFIX"
                )

    def _marker(self) -> str | None:
        """The fingerprint of the server that has the mirror; None for no server."""
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + MARKER)
        except self._client.exceptions.NoSuchKey:
            return None
        text: bytes = answer["Body"].read(1000)
        return text.decode(errors="replace").strip()

    def names(self) -> Iterable[str]:
        """See `MirrorPlace.names`."""
        with _as_os_errors():
            found = [key.removeprefix(self._prefix) for key in self._keys()]
        return [name for name in found if NAME.fullmatch(name)]

    def put(self, name: str, stream: IO[bytes], size: int) -> None:
        """See `MirrorPlace.put`."""
        with _as_os_errors():
            self._client.upload_fileobj(
                stream, self._bucket, self._prefix + name, Config=self._transfer
            )
            answer = self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)
        if answer["ContentLength"] != size:
            raise OSError(f"{answer['ContentLength']} of {size} bytes were written")

    def remove(self, name: str) -> None:
        """See `MirrorPlace.remove`."""
        with _as_os_errors():
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    def address(self, name: str) -> str:
        """See `MirrorPlace.address`."""
        if self._url is not None:
            return f"{self._url}{name}"
        asked = {"Bucket": self._bucket, "Key": self._prefix + name}
        signed: str = self._client.generate_presigned_url(
            "get_object", Params=asked, ExpiresIn=SIGNED_SECONDS
        )
        return signed

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


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise the library's errors as `OSError`."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError, Boto3Error) as error:
        raise OSError(str(error)) from error
