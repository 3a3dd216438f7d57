from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    CLIENT: _ClassVar[Role]
    DATACENTER: _ClassVar[Role]
    AGGREGATOR: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
CLIENT: Role
DATACENTER: Role
AGGREGATOR: Role

class Envelope(_message.Message):
    __slots__ = ("hello", "welcome", "ping", "pull", "chunk", "request", "reply", "receipt", "cancel", "progress", "renew", "renewed", "leave", "check_in", "caller", "through", "hang_up", "passed", "store", "stored")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    CHECK_IN_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    THROUGH_FIELD_NUMBER: _ClassVar[int]
    HANG_UP_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    welcome: Welcome
    ping: Ping
    pull: Pull
    chunk: Chunk
    request: Request
    reply: Reply
    receipt: Receipt
    cancel: Cancel
    progress: Progress
    renew: Renew
    renewed: Renewed
    leave: Leave
    check_in: CheckIn
    caller: Caller
    through: Through
    hang_up: HangUp
    passed: Passed
    store: Store
    stored: Stored
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., reply: _Optional[_Union[Reply, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., renewed: _Optional[_Union[Renewed, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., check_in: _Optional[_Union[CheckIn, _Mapping]] = ..., caller: _Optional[_Union[Caller, _Mapping]] = ..., through: _Optional[_Union[Through, _Mapping]] = ..., hang_up: _Optional[_Union[HangUp, _Mapping]] = ..., passed: _Optional[_Union[Passed, _Mapping]] = ..., store: _Optional[_Union[Store, _Mapping]] = ..., stored: _Optional[_Union[Stored, _Mapping]] = ...) -> None: ...

class Caller(_message.Message):
    __slots__ = ("channel", "certificate")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    channel: int
    certificate: bytes
    def __init__(self, channel: _Optional[int] = ..., certificate: _Optional[bytes] = ...) -> None: ...

class Through(_message.Message):
    __slots__ = ("channel", "message")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    channel: int
    message: bytes
    def __init__(self, channel: _Optional[int] = ..., message: _Optional[bytes] = ...) -> None: ...

class HangUp(_message.Message):
    __slots__ = ("channel", "status", "reason")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    channel: int
    status: int
    reason: str
    def __init__(self, channel: _Optional[int] = ..., status: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Passed(_message.Message):
    __slots__ = ("channel", "sha256", "bytes", "more", "end", "from_caller", "is_last")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FROM_CALLER_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    channel: int
    sha256: bytes
    bytes: int
    more: int
    end: int
    from_caller: bool
    is_last: bool
    def __init__(self, channel: _Optional[int] = ..., sha256: _Optional[bytes] = ..., bytes: _Optional[int] = ..., more: _Optional[int] = ..., end: _Optional[int] = ..., from_caller: _Optional[bool] = ..., is_last: _Optional[bool] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version_min", "version_max", "name", "role", "instance", "identity", "software", "stores")
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    version_min: int
    version_max: int
    name: str
    role: Role
    instance: str
    identity: bytes
    software: str
    stores: bool
    def __init__(self, version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., instance: _Optional[str] = ..., identity: _Optional[bytes] = ..., software: _Optional[str] = ..., stores: _Optional[bool] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("version", "lease_seconds", "authority", "enrolment", "instance", "is_new", "clock", "spread_seconds")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    ENROLMENT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    IS_NEW_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SPREAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: int
    lease_seconds: float
    authority: bytes
    enrolment: bytes
    instance: str
    is_new: bool
    clock: float
    spread_seconds: float
    def __init__(self, version: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., authority: _Optional[bytes] = ..., enrolment: _Optional[bytes] = ..., instance: _Optional[str] = ..., is_new: _Optional[bool] = ..., clock: _Optional[float] = ..., spread_seconds: _Optional[float] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckIn(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class Blob(_message.Message):
    __slots__ = ("sha256", "size", "address", "key")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    size: int
    address: str
    key: bytes
    def __init__(self, sha256: _Optional[bytes] = ..., size: _Optional[int] = ..., address: _Optional[str] = ..., key: _Optional[bytes] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("sha256", "offset", "machine", "length")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    offset: int
    machine: str
    length: int
    def __init__(self, sha256: _Optional[bytes] = ..., offset: _Optional[int] = ..., machine: _Optional[str] = ..., length: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("sha256", "offset", "data", "absent", "file")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    offset: int
    data: bytes
    absent: bool
    file: OpenFile
    def __init__(self, sha256: _Optional[bytes] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., absent: _Optional[bool] = ..., file: _Optional[_Union[OpenFile, _Mapping]] = ...) -> None: ...

class Store(_message.Message):
    __slots__ = ("blob",)
    BLOB_FIELD_NUMBER: _ClassVar[int]
    blob: Blob
    def __init__(self, blob: _Optional[_Union[Blob, _Mapping]] = ...) -> None: ...

class Stored(_message.Message):
    __slots__ = ("sha256", "bytes", "complete", "declined")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    bytes: int
    complete: bool
    declined: bool
    def __init__(self, sha256: _Optional[bytes] = ..., bytes: _Optional[int] = ..., complete: _Optional[bool] = ..., declined: _Optional[bool] = ...) -> None: ...

class OpenFile(_message.Message):
    __slots__ = ("process", "descriptor")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    process: int
    descriptor: int
    def __init__(self, process: _Optional[int] = ..., descriptor: _Optional[int] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "open", "train_local", "train_steps", "export", "close", "secure_step", "score", "mean_gradient", "agree", "evaluate", "prepare", "app", "open_sum", "add_vector", "hand_over")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    TRAIN_LOCAL_FIELD_NUMBER: _ClassVar[int]
    TRAIN_STEPS_FIELD_NUMBER: _ClassVar[int]
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    SECURE_STEP_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    MEAN_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    AGREE_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    APP_FIELD_NUMBER: _ClassVar[int]
    OPEN_SUM_FIELD_NUMBER: _ClassVar[int]
    ADD_VECTOR_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    id: str
    open: OpenRun
    train_local: TrainLocal
    train_steps: TrainSteps
    export: Export
    close: CloseRun
    secure_step: SecureStep
    score: Score
    mean_gradient: MeanGradient
    agree: Agree
    evaluate: Evaluate
    prepare: Prepare
    app: AppMessage
    open_sum: OpenSum
    add_vector: AddVector
    hand_over: HandOver
    def __init__(self, id: _Optional[str] = ..., open: _Optional[_Union[OpenRun, _Mapping]] = ..., train_local: _Optional[_Union[TrainLocal, _Mapping]] = ..., train_steps: _Optional[_Union[TrainSteps, _Mapping]] = ..., export: _Optional[_Union[Export, _Mapping]] = ..., close: _Optional[_Union[CloseRun, _Mapping]] = ..., secure_step: _Optional[_Union[SecureStep, _Mapping]] = ..., score: _Optional[_Union[Score, _Mapping]] = ..., mean_gradient: _Optional[_Union[MeanGradient, _Mapping]] = ..., agree: _Optional[_Union[Agree, _Mapping]] = ..., evaluate: _Optional[_Union[Evaluate, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., app: _Optional[_Union[AppMessage, _Mapping]] = ..., open_sum: _Optional[_Union[OpenSum, _Mapping]] = ..., add_vector: _Optional[_Union[AddVector, _Mapping]] = ..., hand_over: _Optional[_Union[HandOver, _Mapping]] = ...) -> None: ...

class OpenSum(_message.Message):
    __slots__ = ("sum", "updates", "masked", "about")
    SUM_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    sum: str
    updates: UpdateSum
    masked: MaskedSum
    about: str
    def __init__(self, sum: _Optional[str] = ..., updates: _Optional[_Union[UpdateSum, _Mapping]] = ..., masked: _Optional[_Union[MaskedSum, _Mapping]] = ..., about: _Optional[str] = ...) -> None: ...

class UpdateSum(_message.Message):
    __slots__ = ("layout", "declared_weight", "clip", "fraction_bits")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DECLARED_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    FRACTION_BITS_FIELD_NUMBER: _ClassVar[int]
    layout: bytes
    declared_weight: int
    clip: float
    fraction_bits: int
    def __init__(self, layout: _Optional[bytes] = ..., declared_weight: _Optional[int] = ..., clip: _Optional[float] = ..., fraction_bits: _Optional[int] = ...) -> None: ...

class MaskedSum(_message.Message):
    __slots__ = ("length", "bits", "figures")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    length: int
    bits: int
    figures: int
    def __init__(self, length: _Optional[int] = ..., bits: _Optional[int] = ..., figures: _Optional[int] = ...) -> None: ...

class AddVector(_message.Message):
    __slots__ = ("sum", "channel", "vector", "weight", "name")
    SUM_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    sum: str
    channel: int
    vector: Blob
    weight: int
    name: str
    def __init__(self, sum: _Optional[str] = ..., channel: _Optional[int] = ..., vector: _Optional[_Union[Blob, _Mapping]] = ..., weight: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class HandOver(_message.Message):
    __slots__ = ("sum", "added")
    SUM_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    sum: str
    added: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sum: _Optional[str] = ..., added: _Optional[_Iterable[str]] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("run_id", "job", "files", "memory")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    job: str
    files: _containers.RepeatedCompositeFieldContainer[StartFile]
    memory: Memory
    def __init__(self, run_id: _Optional[str] = ..., job: _Optional[str] = ..., files: _Optional[_Iterable[_Union[StartFile, _Mapping]]] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ...) -> None: ...

class StartFile(_message.Message):
    __slots__ = ("part", "name", "blob")
    PART_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    part: str
    name: str
    blob: Blob
    def __init__(self, part: _Optional[str] = ..., name: _Optional[str] = ..., blob: _Optional[_Union[Blob, _Mapping]] = ...) -> None: ...

class OpenRun(_message.Message):
    __slots__ = ("run_id", "job", "base", "layout", "package", "frozen", "task_digest", "personal", "memory")
    class FrozenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Fingerprint
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Fingerprint, _Mapping]] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    TASK_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PERSONAL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    job: str
    base: str
    layout: bytes
    package: Package
    frozen: _containers.MessageMap[str, Fingerprint]
    task_digest: bytes
    personal: bytes
    memory: Memory
    def __init__(self, run_id: _Optional[str] = ..., job: _Optional[str] = ..., base: _Optional[str] = ..., layout: _Optional[bytes] = ..., package: _Optional[_Union[Package, _Mapping]] = ..., frozen: _Optional[_Mapping[str, Fingerprint]] = ..., task_digest: _Optional[bytes] = ..., personal: _Optional[bytes] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("frozen", "trained")
    class FrozenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    frozen: _containers.ScalarMap[str, int]
    trained: int
    def __init__(self, frozen: _Optional[_Mapping[str, int]] = ..., trained: _Optional[int] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class Package(_message.Message):
    __slots__ = ("blob", "digest", "author")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    blob: Blob
    digest: bytes
    author: bytes
    def __init__(self, blob: _Optional[_Union[Blob, _Mapping]] = ..., digest: _Optional[bytes] = ..., author: _Optional[bytes] = ...) -> None: ...

class RoundPosition(_message.Message):
    __slots__ = ("start", "steps", "cohort")
    START_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COHORT_FIELD_NUMBER: _ClassVar[int]
    start: int
    steps: int
    cohort: int
    def __init__(self, start: _Optional[int] = ..., steps: _Optional[int] = ..., cohort: _Optional[int] = ...) -> None: ...

class TrainLocal(_message.Message):
    __slots__ = ("run_id", "round", "attempt", "model", "secure", "with_gradient", "keep", "gradient_scale", "group", "position", "summed_round", "summed_attempt", "changes", "first_model", "ranges", "seconds")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    WITH_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_SCALE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SUMMED_ROUND_FIELD_NUMBER: _ClassVar[int]
    SUMMED_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_MODEL_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    attempt: int
    model: Blob
    secure: bytes
    with_gradient: bool
    keep: bool
    gradient_scale: float
    group: str
    position: RoundPosition
    summed_round: int
    summed_attempt: int
    changes: _containers.RepeatedCompositeFieldContainer[ModelChange]
    first_model: bytes
    ranges: bytes
    seconds: float
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., model: _Optional[_Union[Blob, _Mapping]] = ..., secure: _Optional[bytes] = ..., with_gradient: _Optional[bool] = ..., keep: _Optional[bool] = ..., gradient_scale: _Optional[float] = ..., group: _Optional[str] = ..., position: _Optional[_Union[RoundPosition, _Mapping]] = ..., summed_round: _Optional[int] = ..., summed_attempt: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[ModelChange, _Mapping]]] = ..., first_model: _Optional[bytes] = ..., ranges: _Optional[bytes] = ..., seconds: _Optional[float] = ...) -> None: ...

class ModelChange(_message.Message):
    __slots__ = ("base", "blob")
    BASE_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    base: bytes
    blob: Blob
    def __init__(self, base: _Optional[bytes] = ..., blob: _Optional[_Union[Blob, _Mapping]] = ...) -> None: ...

class Agree(_message.Message):
    __slots__ = ("run_id", "round", "attempt", "secure", "starts", "ranges")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    attempt: int
    secure: bytes
    starts: _containers.RepeatedCompositeFieldContainer[BufferedStart]
    ranges: bytes
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., secure: _Optional[bytes] = ..., starts: _Optional[_Iterable[_Union[BufferedStart, _Mapping]]] = ..., ranges: _Optional[bytes] = ...) -> None: ...

class BufferedStart(_message.Message):
    __slots__ = ("round", "model", "with_gradient", "position")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WITH_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    round: int
    model: bytes
    with_gradient: bool
    position: RoundPosition
    def __init__(self, round: _Optional[int] = ..., model: _Optional[bytes] = ..., with_gradient: _Optional[bool] = ..., position: _Optional[_Union[RoundPosition, _Mapping]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("run_id", "comparison", "attempt", "models", "candidates", "secure", "first_model")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    COMPARISON_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    FIRST_MODEL_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    comparison: int
    attempt: int
    models: Blob
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    secure: bytes
    first_model: bytes
    def __init__(self, run_id: _Optional[str] = ..., comparison: _Optional[int] = ..., attempt: _Optional[int] = ..., models: _Optional[_Union[Blob, _Mapping]] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., secure: _Optional[bytes] = ..., first_model: _Optional[bytes] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("of",)
    OF_FIELD_NUMBER: _ClassVar[int]
    of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, of: _Optional[_Iterable[int]] = ...) -> None: ...

class Evaluate(_message.Message):
    __slots__ = ("run_id", "round", "attempt", "model", "secure", "group", "changes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    attempt: int
    model: Blob
    secure: bytes
    group: str
    changes: _containers.RepeatedCompositeFieldContainer[ModelChange]
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., model: _Optional[_Union[Blob, _Mapping]] = ..., secure: _Optional[bytes] = ..., group: _Optional[str] = ..., changes: _Optional[_Iterable[_Union[ModelChange, _Mapping]]] = ...) -> None: ...

class MeanGradient(_message.Message):
    __slots__ = ("run_id", "round", "attempt", "from_step", "until_step", "model", "statistics")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    UNTIL_STEP_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    attempt: int
    from_step: int
    until_step: int
    model: Blob
    statistics: bool
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., from_step: _Optional[int] = ..., until_step: _Optional[int] = ..., model: _Optional[_Union[Blob, _Mapping]] = ..., statistics: _Optional[bool] = ...) -> None: ...

class SecureStep(_message.Message):
    __slots__ = ("run_id", "round", "attempt", "roster", "inbox", "survivors", "consistency_signatures")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    INBOX_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    attempt: int
    roster: Blob
    inbox: bytes
    survivors: bytes
    consistency_signatures: bytes
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., roster: _Optional[_Union[Blob, _Mapping]] = ..., inbox: _Optional[bytes] = ..., survivors: _Optional[bytes] = ..., consistency_signatures: _Optional[bytes] = ...) -> None: ...

class AppMessage(_message.Message):
    __slots__ = ("run_id", "id", "kind", "group", "node", "records")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    id: str
    kind: str
    group: str
    node: int
    records: Blob
    def __init__(self, run_id: _Optional[str] = ..., id: _Optional[str] = ..., kind: _Optional[str] = ..., group: _Optional[str] = ..., node: _Optional[int] = ..., records: _Optional[_Union[Blob, _Mapping]] = ...) -> None: ...

class TrainSteps(_message.Message):
    __slots__ = ("run_id", "round", "attempt", "from_step", "until_step", "model", "evaluate", "hand_back", "position", "compressed", "summed_round", "summed_attempt")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    UNTIL_STEP_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    HAND_BACK_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_FIELD_NUMBER: _ClassVar[int]
    SUMMED_ROUND_FIELD_NUMBER: _ClassVar[int]
    SUMMED_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    attempt: int
    from_step: int
    until_step: int
    model: Blob
    evaluate: bool
    hand_back: bool
    position: int
    compressed: bool
    summed_round: int
    summed_attempt: int
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., from_step: _Optional[int] = ..., until_step: _Optional[int] = ..., model: _Optional[_Union[Blob, _Mapping]] = ..., evaluate: _Optional[bool] = ..., hand_back: _Optional[bool] = ..., position: _Optional[int] = ..., compressed: _Optional[bool] = ..., summed_round: _Optional[int] = ..., summed_attempt: _Optional[int] = ...) -> None: ...

class Export(_message.Message):
    __slots__ = ("run_id", "step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class CloseRun(_message.Message):
    __slots__ = ("run_id", "finished")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    finished: bool
    def __init__(self, run_id: _Optional[str] = ..., finished: _Optional[bool] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("id", "opened", "trained", "exported", "closed", "failure", "secure_stepped", "scored", "counted", "prepared", "app_replied", "added", "summed")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SECURE_STEPPED_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    APP_REPLIED_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    SUMMED_FIELD_NUMBER: _ClassVar[int]
    id: str
    opened: Opened
    trained: Trained
    exported: Exported
    closed: Closed
    failure: Failure
    secure_stepped: SecureStepped
    scored: Scored
    counted: Counted
    prepared: Prepared
    app_replied: AppReply
    added: Added
    summed: Summed
    def __init__(self, id: _Optional[str] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., trained: _Optional[_Union[Trained, _Mapping]] = ..., exported: _Optional[_Union[Exported, _Mapping]] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., secure_stepped: _Optional[_Union[SecureStepped, _Mapping]] = ..., scored: _Optional[_Union[Scored, _Mapping]] = ..., counted: _Optional[_Union[Counted, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., app_replied: _Optional[_Union[AppReply, _Mapping]] = ..., added: _Optional[_Union[Added, _Mapping]] = ..., summed: _Optional[_Union[Summed, _Mapping]] = ...) -> None: ...

class Added(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Summed(_message.Message):
    __slots__ = ("sum", "weight", "has_small")
    SUM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    HAS_SMALL_FIELD_NUMBER: _ClassVar[int]
    sum: Blob
    weight: int
    has_small: bool
    def __init__(self, sum: _Optional[_Union[Blob, _Mapping]] = ..., weight: _Optional[int] = ..., has_small: _Optional[bool] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Opened(_message.Message):
    __slots__ = ("examples", "hours", "group")
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    HOURS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    examples: int
    hours: _containers.RepeatedScalarFieldContainer[str]
    group: str
    def __init__(self, examples: _Optional[int] = ..., hours: _Optional[_Iterable[str]] = ..., group: _Optional[str] = ...) -> None: ...

class Trained(_message.Message):
    __slots__ = ("result", "examples", "steps", "seconds", "training", "evaluation", "events", "secure", "profile", "step_figures", "other_weight")
    class TrainingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class EvaluationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ProfileEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RESULT_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIGURES_FIELD_NUMBER: _ClassVar[int]
    OTHER_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    result: Blob
    examples: int
    steps: int
    seconds: float
    training: _containers.ScalarMap[str, float]
    evaluation: _containers.ScalarMap[str, float]
    events: _containers.RepeatedScalarFieldContainer[str]
    secure: bytes
    profile: _containers.ScalarMap[str, float]
    step_figures: _containers.RepeatedCompositeFieldContainer[StepFigures]
    other_weight: bool
    def __init__(self, result: _Optional[_Union[Blob, _Mapping]] = ..., examples: _Optional[int] = ..., steps: _Optional[int] = ..., seconds: _Optional[float] = ..., training: _Optional[_Mapping[str, float]] = ..., evaluation: _Optional[_Mapping[str, float]] = ..., events: _Optional[_Iterable[str]] = ..., secure: _Optional[bytes] = ..., profile: _Optional[_Mapping[str, float]] = ..., step_figures: _Optional[_Iterable[_Union[StepFigures, _Mapping]]] = ..., other_weight: _Optional[bool] = ...) -> None: ...

class SecureStepped(_message.Message):
    __slots__ = ("message", "masked")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    message: bytes
    masked: Blob
    def __init__(self, message: _Optional[bytes] = ..., masked: _Optional[_Union[Blob, _Mapping]] = ...) -> None: ...

class Scored(_message.Message):
    __slots__ = ("scores",)
    SCORES_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, scores: _Optional[_Iterable[float]] = ...) -> None: ...

class Counted(_message.Message):
    __slots__ = ("counts", "own_figures")
    class OwnFiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    OWN_FIGURES_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    own_figures: _containers.ScalarMap[str, float]
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., own_figures: _Optional[_Mapping[str, float]] = ...) -> None: ...

class AppReply(_message.Message):
    __slots__ = ("records", "error_code", "error", "seconds")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    records: Blob
    error_code: int
    error: str
    seconds: float
    def __init__(self, records: _Optional[_Union[Blob, _Mapping]] = ..., error_code: _Optional[int] = ..., error: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Exported(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Blob
    def __init__(self, model: _Optional[_Union[Blob, _Mapping]] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failure(_message.Message):
    __slots__ = ("reason", "code")
    REASON_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    code: str
    def __init__(self, reason: _Optional[str] = ..., code: _Optional[str] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("id", "accepted", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: str
    accepted: bool
    reason: str
    def __init__(self, id: _Optional[str] = ..., accepted: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("id", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: str
    reason: str
    def __init__(self, id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class StepFigures(_message.Message):
    __slots__ = ("step", "loss", "gradient_norm", "learning_rate", "units_per_second")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    UNITS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    units_per_second: float
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., gradient_norm: _Optional[float] = ..., learning_rate: _Optional[float] = ..., units_per_second: _Optional[float] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("id", "steps", "loss", "total_steps", "examples_per_second", "units_per_second", "note", "step_figures", "fetched")
    ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    UNITS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIGURES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    id: str
    steps: int
    loss: float
    total_steps: int
    examples_per_second: float
    units_per_second: float
    note: str
    step_figures: _containers.RepeatedCompositeFieldContainer[StepFigures]
    fetched: Fetched
    def __init__(self, id: _Optional[str] = ..., steps: _Optional[int] = ..., loss: _Optional[float] = ..., total_steps: _Optional[int] = ..., examples_per_second: _Optional[float] = ..., units_per_second: _Optional[float] = ..., note: _Optional[str] = ..., step_figures: _Optional[_Iterable[_Union[StepFigures, _Mapping]]] = ..., fetched: _Optional[_Union[Fetched, _Mapping]] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("bytes", "of", "pause")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    of: int
    pause: str
    def __init__(self, bytes: _Optional[int] = ..., of: _Optional[int] = ..., pause: _Optional[str] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("signing_request", "proof")
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    signing_request: bytes
    proof: bytes
    def __init__(self, signing_request: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Renewed(_message.Message):
    __slots__ = ("certificate", "reason", "enrolment", "nonce")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENROLMENT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    reason: str
    enrolment: bytes
    nonce: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., reason: _Optional[str] = ..., enrolment: _Optional[bytes] = ..., nonce: _Optional[bytes] = ...) -> None: ...
