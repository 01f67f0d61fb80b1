"""What a contract hands to the server: services, and the methods they serve."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from bridge.grpc.call import Call

RequestT = TypeVar("RequestT", contravariant=True)


class Message(Protocol):
    """A protobuf message, as far as the server needs one."""

    def SerializeToString(self) -> bytes: ...


Reply = Message | bytes
Kind = Literal["unary", "stream", "raw_stream", "bidi"]
UnaryHandler = Callable[[Any, "Call"], Awaitable[Reply]]
StreamHandler = Callable[[Any, "Call"], AsyncGenerator[Reply, None]]
Rest = Callable[[], Awaitable[None]]
RawStreamHandler = Callable[[Any, "Call"], Rest | None]
BidiHandler = Callable[[AsyncIterator[Any], "Call"], AsyncGenerator[Reply, None]]


@dataclass(frozen=True, slots=True)
class Method:
    """One method.

    kind        handler
    unary       ``async def h(request, call) -> Reply``
    stream      async generator ``h(request, call)`` that yields replies; waits while the call is blocked
    raw_stream  ``def h(request, call)``: no task; keeps ``call`` and uses send() and finish() later. What it
                returns is awaited in the call's task, and the request's bytes are counted until that is done
    bidi        async generator ``h(requests, call)`` over an async iterator of requests

    ``request_class`` has ``FromString`` (protobuf); None hands the handler bytes. ``endless`` streams end with
    UNAVAILABLE as soon as the server drains. ``compress`` sends gzip replies to clients that accept them (raw_stream
    handlers call ``call.send_compressed`` themselves). ``admin`` methods change the server for everybody: where there is
    a listener for administrators, they are served on no other.
    """

    path: str
    kind: Kind
    request_class: Any
    handler: UnaryHandler | StreamHandler | RawStreamHandler | BidiHandler
    endless: bool = False
    compress: bool = False
    admin: bool = False

    @property
    def lasts(self) -> bool:
        """Whether a call's length is the client's choice alone."""
        return self.endless or self.kind == "bidi"


class Service(Protocol):
    """One gRPC service."""

    @property
    def name(self) -> str:
        """The full name, "package.Service"."""

    def methods(self) -> Iterable[Method]:
        """The methods served."""
