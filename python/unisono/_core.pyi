"""Types of the native module; what each thing does is in the docstrings of the module itself."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from os import PathLike
from types import GenericAlias
from typing import (
    Any,
    Final,
    Generic,
    Literal,
    Protocol,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    final,
    overload,
)

from numpy import generic
from numpy.typing import DTypeLike, NDArray

from unisono.errors import Error

__all__ = [
    "ANY_SOURCE",
    "Candidate",
    "Communicator",
    "Heap",
    "Message",
    "Options",
    "ReduceOp",
    "Setting",
    "Window",
    "Work",
    "__version__",
    "empty",
    "heap",
    "init",
    "settings",
]

__version__: Final[str]
ANY_SOURCE: Final = -1

class _DLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...

class _CudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

class _CudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

class _CuPyStream(Protocol):
    @property
    def ptr(self) -> int: ...

class _TorchStream(Protocol):
    @property
    def cuda_stream(self) -> int: ...

_Writable: TypeAlias = NDArray[Any] | _DLPack | _CudaArray | bytearray | memoryview
_Array: TypeAlias = _Writable | bytes | generic
_Seconds: TypeAlias = float | timedelta
_Stream: TypeAlias = SupportsIndex | _CudaStream | _CuPyStream | _TorchStream
_A = TypeVar("_A", bound=_Array)
_W = TypeVar("_W", bound=_Writable)
_T_co = TypeVar("_T_co", covariant=True)

def init(
    url: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: _Seconds | None = None,
    options: Options | None = None,
) -> Communicator: ...
def settings() -> list[Setting]: ...
def empty(
    shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike | None = None
) -> NDArray[Any]: ...
def heap() -> Heap: ...
def _explain(
    collective: str,
    size: int,
    hosts: Sequence[int],
    *,
    dtype: str = "float32",
    root: int = 0,
    cores: int | None = None,
    heap: bool = False,
    algorithm: str | None = None,
    typical: bool = False,
    latency: float | None = None,
    rate: float | None = None,
) -> dict[str, Any]: ...
def _simulate(
    hosts: Sequence[int],
    calls: Sequence[tuple[str, int, int]],
    *,
    latency: float,
    rate: float,
    event: tuple[str, int, float, float] | None,
    settings: Sequence[tuple[str, str]],
    seed: int,
    story: bool,
) -> dict[str, Any]: ...
def _world(seed: int) -> str: ...
def launch(
    arguments: Sequence[str | PathLike[str]],
    *,
    again: Sequence[str | PathLike[str]],
    interpreter: str | PathLike[str],
    note: str | None = None,
) -> int: ...

@final
class Heap:
    @property
    def in_use(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def reserved(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def segments(self) -> int: ...
    def __contains__(self, array: _Array, /) -> bool: ...

@final
class Setting:
    @property
    def name(self) -> str: ...
    @property
    def variable(self) -> str: ...
    @property
    def accepts(self) -> str: ...
    @property
    def default(self) -> str: ...
    @property
    def must_agree(self) -> bool: ...
    @property
    def consequence(self) -> str: ...

@final
class Options:
    def __new__(
        cls,
        *,
        timeout: _Seconds | str | None = None,
        join_timeout: _Seconds | str | None = None,
        peer_timeout: int | str | None = None,
        transport: Literal["auto", "shm", "tcp"] | None = None,
        interface: str | None = None,
        host: str | None = None,
        ring_bytes: int | str | None = None,
        algorithm: str | None = None,
        lend_bytes: int | str | None = None,
        heap_bytes: int | str | None = None,
        eager_bytes: int | str | None = None,
        window_bytes: int | str | None = None,
        device_failure: Literal["end", "raise"] | None = None,
        spin_us: int | str | None = None,
        threads: int | str | None = None,
        secret_file: str | PathLike[str] | None = None,
        encrypt: bool | str | None = None,
        flight_records: int | str | None = None,
        trace: str | PathLike[str] | None = None,
        log: str | None = None,
    ) -> Options: ...
    def keys(self) -> list[str]: ...
    def __getitem__(self, name: str, /) -> str: ...
    def __len__(self, /) -> int: ...
    def __iter__(self, /) -> Iterator[str]: ...

@final
class ReduceOp:
    SUM: Final[ReduceOp]
    AVG: Final[ReduceOp]
    PROD: Final[ReduceOp]
    MIN: Final[ReduceOp]
    MAX: Final[ReduceOp]
    BAND: Final[ReduceOp]
    BOR: Final[ReduceOp]
    BXOR: Final[ReduceOp]
    LAND: Final[ReduceOp]
    LOR: Final[ReduceOp]
    LXOR: Final[ReduceOp]
    @staticmethod
    def premul_sum(factor: float) -> ReduceOp: ...
    @property
    def name(self) -> str: ...
    @property
    def factor(self) -> float | None: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self, /) -> int: ...

@final
class Work(Generic[_T_co]):
    @classmethod
    def __class_getitem__(cls, key: Any) -> GenericAlias: ...
    def wait(self, timeout: _Seconds | None = None) -> None: ...
    def result(self, timeout: _Seconds | None = None) -> _T_co: ...
    def done(self) -> bool: ...
    def exception(self) -> Error | None: ...
    @property
    def source(self) -> int | None: ...
    @property
    def duration(self) -> float | None: ...
    @property
    def operation(self) -> str: ...

# The parts of `unisono.transports`.
@final
class _Port:
    def __new__(cls) -> _Port: ...
    def bind(self) -> bytes: ...
    def connect(self, peer: bytes, timeout: float) -> None: ...
    def is_connected(self) -> bool: ...
    def register(self, address: int, length: int, owner: object) -> _Region: ...
    def unregister(self, region: _Region, timeout: float) -> None: ...
    def remote(self, region: _Region) -> _RemoteRegion: ...
    def write(
        self, region: _Region, offset: int, length: int, remote: _RemoteRegion
    ) -> _Transfer: ...
    def read(
        self, region: _Region, offset: int, length: int, remote: _RemoteRegion
    ) -> _Transfer: ...
    def close(self, timeout: float) -> None: ...

@final
class _Region:
    def __len__(self) -> int: ...
    def is_registered(self) -> bool: ...
    def is_on_device(self) -> bool: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class _RemoteRegion:
    @staticmethod
    def from_bytes(data: bytes) -> _RemoteRegion: ...
    def to_bytes(self) -> bytes: ...
    def part(self, offset: int, length: int) -> _RemoteRegion: ...
    @property
    def length(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class _Transfer:
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def when_done(self, callback: Callable[[], None]) -> None: ...
    def exception(self) -> Error | None: ...

@final
class Candidate:
    def __new__(cls, options: Options | None = None) -> Candidate: ...
    @property
    def handle(self) -> str: ...
    def form(
        self, handles: Sequence[str], number: int, timeout: _Seconds | None = None
    ) -> Communicator: ...

@final
class Message:
    @property
    def source(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Communicator:
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def timeout(self) -> float | None: ...
    @timeout.setter
    def timeout(self, value: _Seconds | None, /) -> None: ...
    @property
    def error(self) -> Error | None: ...
    @overload
    def all_reduce(
        self,
        array: _W,
        op: ReduceOp | str = "sum",
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> _W: ...
    @overload
    def all_reduce(
        self,
        array: _W,
        op: ReduceOp | str = "sum",
        *,
        out: None = None,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[_W]: ...
    @overload
    def all_reduce(
        self,
        array: _Array,
        op: ReduceOp | str = "sum",
        *,
        out: _W,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> _W: ...
    @overload
    def all_reduce(
        self,
        array: _Array,
        op: ReduceOp | str = "sum",
        *,
        out: _W,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[_W]: ...
    @overload
    def scan(
        self,
        array: _W,
        op: ReduceOp | str = "sum",
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> _W: ...
    @overload
    def scan(
        self,
        array: _W,
        op: ReduceOp | str = "sum",
        *,
        out: None = None,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[_W]: ...
    @overload
    def scan(
        self,
        array: _Array,
        op: ReduceOp | str = "sum",
        *,
        out: _W,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> _W: ...
    @overload
    def scan(
        self,
        array: _Array,
        op: ReduceOp | str = "sum",
        *,
        out: _W,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[_W]: ...
    @overload
    def exscan(
        self,
        array: _W,
        op: ReduceOp | str = "sum",
        *,
        out: None = None,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> _W: ...
    @overload
    def exscan(
        self,
        array: _W,
        op: ReduceOp | str = "sum",
        *,
        out: None = None,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[_W]: ...
    @overload
    def exscan(
        self,
        array: _Array,
        op: ReduceOp | str = "sum",
        *,
        out: _W,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> _W: ...
    @overload
    def exscan(
        self,
        array: _Array,
        op: ReduceOp | str = "sum",
        *,
        out: _W,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[_W]: ...
    def all_reduce_int8(self, array: _W, op: ReduceOp | str = "sum") -> _W: ...
    @overload
    def reduce(
        self,
        array: _Array,
        op: ReduceOp | str = "sum",
        root: int = 0,
        *,
        out: _Writable | None = None,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Any: ...
    @overload
    def reduce(
        self,
        array: _Array,
        op: ReduceOp | str = "sum",
        root: int = 0,
        *,
        out: _Writable | None = None,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[Any]: ...
    @overload
    def broadcast(
        self,
        array: _A,
        root: int = 0,
        *,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> _A: ...
    @overload
    def broadcast(
        self,
        array: _A,
        root: int = 0,
        *,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[_A]: ...
    @overload
    def all_gather(
        self,
        array: _Array,
        *,
        out: _Writable | None = None,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Any: ...
    @overload
    def all_gather(
        self,
        array: _Array,
        *,
        out: _Writable | None = None,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[Any]: ...
    @overload
    def all_gather_v(
        self,
        array: _Array,
        counts: Iterable[int],
        *,
        out: _Writable | None = None,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Any: ...
    @overload
    def all_gather_v(
        self,
        array: _Array,
        counts: Iterable[int],
        *,
        out: _Writable | None = None,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[Any]: ...
    @overload
    def reduce_scatter(
        self,
        array: _Array,
        op: ReduceOp | str = "sum",
        *,
        out: _Writable | None = None,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Any: ...
    @overload
    def reduce_scatter(
        self,
        array: _Array,
        op: ReduceOp | str = "sum",
        *,
        out: _Writable | None = None,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[Any]: ...
    @overload
    def reduce_scatter_v(
        self,
        array: _Array,
        counts: Iterable[int],
        op: ReduceOp | str = "sum",
        *,
        out: _Writable | None = None,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Any: ...
    @overload
    def reduce_scatter_v(
        self,
        array: _Array,
        counts: Iterable[int],
        op: ReduceOp | str = "sum",
        *,
        out: _Writable | None = None,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[Any]: ...
    @overload
    def gather(
        self,
        array: _Array,
        root: int = 0,
        *,
        out: _Writable | None = None,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Any: ...
    @overload
    def gather(
        self,
        array: _Array,
        root: int = 0,
        *,
        out: _Writable | None = None,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[Any]: ...
    @overload
    def gather_v(
        self,
        array: _Array,
        counts: Iterable[int] | None = None,
        root: int = 0,
        *,
        out: _Writable | None = None,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Any: ...
    @overload
    def gather_v(
        self,
        array: _Array,
        counts: Iterable[int] | None = None,
        root: int = 0,
        *,
        out: _Writable | None = None,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[Any]: ...
    @overload
    def scatter(
        self,
        array: _Array | None = None,
        root: int = 0,
        *,
        out: _Writable | None = None,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Any: ...
    @overload
    def scatter(
        self,
        array: _Array | None = None,
        root: int = 0,
        *,
        out: _Writable | None = None,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[Any]: ...
    @overload
    def scatter_v(
        self,
        array: _Array | None = None,
        counts: Iterable[int] | None = None,
        root: int = 0,
        *,
        out: _Writable | None = None,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Any: ...
    @overload
    def scatter_v(
        self,
        array: _Array | None = None,
        counts: Iterable[int] | None = None,
        root: int = 0,
        *,
        out: _Writable | None = None,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[Any]: ...
    @overload
    def all_to_all(
        self,
        array: _Array,
        *,
        out: _Writable | None = None,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Any: ...
    @overload
    def all_to_all(
        self,
        array: _Array,
        *,
        out: _Writable | None = None,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[Any]: ...
    @overload
    def all_to_all_v(
        self,
        array: _Array,
        send_counts: Iterable[int],
        recv_counts: Iterable[int],
        *,
        out: _Writable | None = None,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Any: ...
    @overload
    def all_to_all_v(
        self,
        array: _Array,
        send_counts: Iterable[int],
        recv_counts: Iterable[int],
        *,
        out: _Writable | None = None,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[Any]: ...
    @overload
    def barrier(
        self,
        *,
        async_op: Literal[False] = False,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> None: ...
    @overload
    def barrier(
        self,
        *,
        async_op: Literal[True],
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[None]: ...
    def send(
        self,
        array: _Array,
        dest: int,
        tag: int = 0,
        *,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> None: ...
    def isend(
        self,
        array: _Array,
        dest: int,
        tag: int = 0,
        *,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[None]: ...
    def recv(
        self,
        array: _Writable,
        source: int = -1,
        tag: int = 0,
        *,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Message: ...
    def probe(
        self, source: int = -1, tag: int = 0, *, timeout: _Seconds | None = None
    ) -> Message | None: ...
    def irecv(
        self,
        array: _Writable,
        source: int = -1,
        tag: int = 0,
        *,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Work[Message]: ...
    def sendrecv(
        self,
        array: _Array,
        dest: int,
        out: _Writable,
        source: int = -1,
        tag: int = 0,
        *,
        timeout: _Seconds | None = None,
        stream: _Stream | None = None,
    ) -> Message: ...
    def all_gather_object(self, value: Any) -> list[Any]: ...
    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None: ...
    def broadcast_object(self, value: Any = None, root: int = 0) -> Any: ...
    def scatter_object(self, values: Sequence[Any] | None = None, root: int = 0) -> Any: ...
    def send_object(self, value: Any, dest: int, tag: int = 0) -> None: ...
    def recv_object(self, source: int = -1, tag: int = 0) -> Any: ...
    def window(self, array: _Writable) -> Window: ...
    def split(self, color: int | None, key: int = 0) -> Communicator | None: ...
    def shrink(
        self, exclude: Sequence[int] | None = None, timeout: _Seconds | None = None
    ) -> Communicator: ...
    def grow(
        self,
        world_size: int | None = None,
        *,
        url: str | None = None,
        timeout: _Seconds | None = None,
    ) -> Communicator: ...
    def mask(
        self, exclude: Sequence[int] | None = None, timeout: _Seconds | None = None
    ) -> Communicator: ...
    @property
    def living(self) -> list[int]: ...
    @property
    def newcomers(self) -> list[int]: ...
    @property
    def former_ranks(self) -> list[int] | None: ...
    @property
    def former_ended(self) -> int | None: ...
    @property
    def ended(self) -> int: ...
    def monitored_barrier(
        self, timeout: _Seconds | None = None, report_all: bool = True
    ) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def recent_operations(self) -> list[str]: ...
    def abort(self, reason: str = "abort() was called") -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Communicator: ...
    def __exit__(self, *exception: object) -> None: ...

@final
class Window:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def array(self) -> Any: ...
    def put(self, array: _Array, dest: int, offset: int = 0, *, wait: bool = True) -> None: ...
    def get(self, array: _W, source: int, offset: int = 0) -> _W: ...
    def signal(self, dest: int) -> None: ...
    def wait_signal(self, source: int, timeout: _Seconds | None = None) -> None: ...
    def flush(self, timeout: _Seconds | None = None) -> None: ...
    def fence(self) -> None: ...
    def can_map(self, rank: int) -> bool: ...
    def map(self, rank: int) -> Any: ...
    def close(self) -> None: ...
    def __enter__(self) -> Window: ...
    def __exit__(self, *exception: object) -> None: ...
