from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class AuthorityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuthorityReply(_message.Message):
    __slots__ = ("certificate",)
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    def __init__(self, certificate: _Optional[bytes] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("version", "kind", "secret", "signing_request", "identity", "proof")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    version: int
    kind: str
    secret: bytes
    signing_request: bytes
    identity: bytes
    proof: bytes
    def __init__(self, version: _Optional[int] = ..., kind: _Optional[str] = ..., secret: _Optional[bytes] = ..., signing_request: _Optional[bytes] = ..., identity: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("name", "certificate", "link_port", "server")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    LINK_PORT_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    name: str
    certificate: bytes
    link_port: int
    server: str
    def __init__(self, name: _Optional[str] = ..., certificate: _Optional[bytes] = ..., link_port: _Optional[int] = ..., server: _Optional[str] = ...) -> None: ...
