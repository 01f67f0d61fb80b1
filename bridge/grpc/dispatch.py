"""Runs handlers: from a complete request body to a handler of its kind, and from its outcome to a status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, cast

from bridge.grpc.framing import PREFIX_BYTES, MessageTooLarge, inflate
from bridge.grpc.shape import COUNTED_FROM_BYTES, has_too_many_pieces
from bridge.grpc.status import Code, GrpcError

if TYPE_CHECKING:
    from bridge.grpc.call import Call
    from bridge.grpc.service import BidiHandler, RawStreamHandler, Reply, Rest, StreamHandler, UnaryHandler

log = logging.getLogger(__name__)

# A generator that never waits gives the loop and the socket a turn after this many bytes.
STREAM_TURN_BYTES = 65536
# Inflating more than this is done off the loop: 64 MiB takes about 0.2 s.
INFLATE_INLINE_BYTES = 262144
# Larger messages are parsed one after the other, with a turn of the loop behind each: 300 kB of token ids take 0.4 ms.
LARGE_BYTES = 65536


class RequestStream:
    """The requests of a bidi call, as its handler iterates them."""

    __slots__ = ("_call", "_closed", "_messages", "_waiter")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._messages: deque[bytes] = deque()
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: bytes) -> None:
        """Add one received message."""
        self._messages.append(message)
        self._wake()

    def close(self) -> None:
        """The client sends no more."""
        self._closed = True
        self._wake()

    def clear(self) -> int:
        """Drop the messages that wait; their bytes."""
        size = sum(map(len, self._messages))
        self._messages.clear()
        return size

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            while self._messages:
                message = self._messages.popleft()
                self._call.connection.intake.release(len(message))
                yield parse(self._call, message)
            if self._closed:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None


def one_message(body: bytes | bytearray) -> bytes | bytearray:
    """The framed message a unary request consists of; GrpcError INTERNAL for none, several, or a part of one."""
    if len(body) < PREFIX_BYTES:
        raise GrpcError(Code.INTERNAL, "request message is missing or truncated")
    size = int.from_bytes(body[1:PREFIX_BYTES], "big") + PREFIX_BYTES
    if size != len(body):
        problem = "truncated" if size > len(body) else "followed by another"
        raise GrpcError(Code.INTERNAL, f"request message is {problem}")
    return body


def plain_message(body: bytes | bytearray, encoding: int | None, limit: int) -> bytes:
    """The message of a frame, decompressed; GrpcError when it cannot be or exceeds ``limit`` bytes."""
    flag = body[0]
    if flag == 0:
        if len(body) - PREFIX_BYTES > limit:
            raise too_large(limit)
        return bytes(memoryview(body)[PREFIX_BYTES:])
    if flag != 1:
        raise GrpcError(Code.INTERNAL, f"message has the invalid compression flag {flag}")
    if encoding is None:
        raise GrpcError(Code.INTERNAL, "message is compressed but grpc-encoding is identity")
    try:
        return inflate(memoryview(body)[PREFIX_BYTES:], encoding, limit)
    except MessageTooLarge:
        raise too_large(limit) from None
    except ValueError as error:
        raise GrpcError(Code.INTERNAL, f"cannot decompress the request: {error}") from None


def too_large(limit: int) -> GrpcError:
    """The refusal of a message above ``limit`` bytes."""
    return GrpcError(Code.RESOURCE_EXHAUSTED, f"request message is larger than {limit} bytes")


def parse(call: Call, message: bytes) -> Any:
    """``message`` as the method's request type; GrpcError INTERNAL if it is not one, RESOURCE_EXHAUSTED for a bomb."""
    request_class = call.spec.request_class
    if request_class is None:
        return message
    if len(message) > COUNTED_FROM_BYTES and has_too_many_pieces(message, request_class.DESCRIPTOR):
        raise GrpcError(Code.RESOURCE_EXHAUSTED, f"{request_class.__name__} has too many fields or numbers")
    try:
        return request_class.FromString(message)
    except Exception as error:
        raise GrpcError(Code.INTERNAL, f"cannot parse {request_class.__name__}: {error}") from None


def dispatch(call: Call, body: bytes | bytearray) -> None:
    """Run the handler of a call whose request is complete; ``body`` is everything it sent."""
    limit = call.connection.limits.max_message_bytes
    try:
        body = one_message(body)
        try:
            message = plain_message(body, call.request_encoding, min(limit, INFLATE_INLINE_BYTES) if body[0] else limit)
        except GrpcError as error:
            if error.code is Code.RESOURCE_EXHAUSTED and limit > INFLATE_INLINE_BYTES:
                if call.connection.intake.hold(call, body):
                    spawn(call, _inflate_then_run(call, body, limit))
                return
            raise
        if len(message) <= LARGE_BYTES:
            run(call, parse(call, message))
        elif call.connection.intake.hold(call, message):
            spawn(call, _run_large(call, message))
    except GrpcError as error:
        call.connection.intake.refuse(call, error)


async def _inflate_then_run(call: Call, body: bytes | bytearray, limit: int) -> None:
    try:
        async with call.connection.server.inflating:
            message = await asyncio.to_thread(plain_message, body, call.request_encoding, limit)
        if not call.ended:
            call.connection.intake.let_go(call)
            if call.connection.intake.hold(call, message):
                await _run_large(call, message)
    except GrpcError as error:
        call.connection.intake.refuse(call, error)


async def _run_large(call: Call, message: bytes) -> None:
    """Parse and run a request whose bytes are held, in its turn."""
    try:
        async with call.connection.server.parsing:
            request = parse(call, message)
            await asyncio.sleep(0)
    except GrpcError as error:
        call.connection.intake.refuse(call, error)
        return
    if not run(call, request):
        call.connection.intake.let_go(call)
    call.connection.mark_dirty()


def run(call: Call, request: Any) -> bool:
    """Hand a parsed request to its handler; whether that takes longer before the engine has it."""
    spec = call.spec
    handler = spec.handler
    rest = None
    if spec.kind == "raw_stream":
        try:
            rest = cast("RawStreamHandler", handler)(request, call)
        except GrpcError as error:
            call.fail(error)
        except Exception as error:
            _failed(call, error)
        if not call.headers_sent:
            call.send_initial_metadata()
            call.connection.mark_dirty()
        if rest is not None:
            spawn(call, _rest(call, rest))
    elif spec.kind == "unary":
        spawn(call, _unary(call, cast("UnaryHandler", handler), request))
    else:
        spawn(call, _stream(call, cast("StreamHandler", handler), request))
        # After the handler's first step: an immediate error is still a trailers-only response.
        asyncio.get_running_loop().call_soon(_headers_at_once, call)
    return rest is not None


async def _rest(call: Call, rest: Rest) -> None:
    """What a raw_stream handler has to wait for."""
    try:
        with _ending(call):
            await rest()
    finally:
        call.connection.intake.let_go(call)


def run_bidi(call: Call) -> None:
    """Start the handler of a client-streaming method when its headers arrive."""
    spawn(call, _stream(call, cast("BidiHandler", call.spec.handler), call.requests))
    asyncio.get_running_loop().call_soon(_headers_at_once, call)


def spawn(call: Call, coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a handler as a task that ends with its call."""
    call.task = call.connection.server.spawn(coroutine)


def _headers_at_once(call: Call) -> None:
    if not call.headers_sent and not call.ended:
        call.send_initial_metadata()
        call.connection.mark_dirty()


def encode(reply: Reply) -> bytes:
    """The bytes of what a handler returned."""
    return reply if isinstance(reply, bytes) else reply.SerializeToString()


@contextlib.contextmanager
def _ending(call: Call) -> Iterator[None]:
    """What a handler's task raises ends its call."""
    try:
        yield
    except GrpcError as error:
        call.fail(error)
    except asyncio.CancelledError:
        # Cancelled with its call, or the handler cancelled itself.
        call.finish(Code.CANCELLED, "cancelled")
    except Exception as error:
        _failed(call, error)


async def _unary(call: Call, handler: UnaryHandler, request: Any) -> None:
    with _ending(call):
        call.send_compressed(encode(await handler(request, call)))
        call.finish()


async def _stream(call: Call, handler: StreamHandler | BidiHandler, request: Any) -> None:
    replies = handler(request, call)
    unsent = 0
    try:
        with _ending(call):
            async for reply in replies:
                message = encode(reply)
                call.send_compressed(message)
                unsent += len(message)
                if unsent >= STREAM_TURN_BYTES:
                    unsent = 0
                    call.connection.flush()
                    await asyncio.sleep(0)
                if call.blocked:
                    call.connection.flush()
                    await call.writable()
                if call.ended:
                    break
            call.finish()
    finally:
        try:
            await replies.aclose()
        except Exception:
            log.exception("%s: handler failed while closing", call.spec.path)


def _failed(call: Call, error: Exception) -> None:
    log.error("%s: handler failed", call.spec.path, exc_info=error)
    call.finish(Code.INTERNAL, f"internal error: {type(error).__name__}")
