from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegistryRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class RegistryPart(_message.Message):
    __slots__ = ("version", "unchanged", "members", "revoked")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    version: str
    unchanged: bool
    members: _containers.RepeatedCompositeFieldContainer[Member]
    revoked: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, version: _Optional[str] = ..., unchanged: _Optional[bool] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., revoked: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("name", "kind", "identity", "joined", "revoked", "enrolment", "certificates", "rollout")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    ENROLMENT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    identity: bytes
    joined: float
    revoked: float
    enrolment: bytes
    certificates: _containers.RepeatedCompositeFieldContainer[IssuedCertificate]
    rollout: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., identity: _Optional[bytes] = ..., joined: _Optional[float] = ..., revoked: _Optional[float] = ..., enrolment: _Optional[bytes] = ..., certificates: _Optional[_Iterable[_Union[IssuedCertificate, _Mapping]]] = ..., rollout: _Optional[str] = ...) -> None: ...

class IssuedCertificate(_message.Message):
    __slots__ = ("serial", "not_after")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_FIELD_NUMBER: _ClassVar[int]
    serial: str
    not_after: float
    def __init__(self, serial: _Optional[str] = ..., not_after: _Optional[float] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("name", "signing_request", "serial")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    signing_request: bytes
    serial: str
    def __init__(self, name: _Optional[str] = ..., signing_request: _Optional[bytes] = ..., serial: _Optional[str] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("certificate",)
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    def __init__(self, certificate: _Optional[bytes] = ...) -> None: ...
