"""The request half of a connection: header blocks into calls, request bytes into messages, both within limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.grpc.call import RESPONSE_FIELDS, Call
from bridge.grpc.dispatch import RequestStream, dispatch, plain_message, run_bidi, too_large
from bridge.grpc.framing import ACCEPT_ENCODING, PREFIX_BYTES, REQUEST_ENCODINGS, parse_timeout
from bridge.grpc.metadata import PLAIN_FIELDS, PROTOCOL_FIELDS, Metadata
from bridge.grpc.status import Code, GrpcError, RawHeader, RawHeaders, status_fields

if TYPE_CHECKING:
    from bridge.grpc.connection import Connection

GRPC_CONTENT_TYPE = b"application/grpc"
# A tuple and two bytes objects. A field that a client sends as one byte, HPACK's index, takes its whole length here.
FIELD_BYTES = 128
TOO_MANY_BYTES = "too many request bytes in flight"
# A client with no more ended calls than this has no part in there being too many.
FEW_LINGERING = 64
# Calls share the metadata that is no more than the client's name.
LONG_AGENT_BYTES = 256


class Refusal(Exception):
    """A request that is answered without becoming a call."""

    def __init__(self, reason: str, fields: RawHeaders) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fields = fields


def refusal(reason: str, code: Code, message: str, extra: RawHeaders | None = None) -> Refusal:
    """A refusal with a gRPC status, as a trailers-only response."""
    return Refusal(reason, RESPONSE_FIELDS + status_fields(code, message, (), None) + (extra or []))


class Intake:
    """Makes calls of requests, and keeps the bytes of those that are not complete."""

    __slots__ = (
        "_agent",
        "_connection",
        "_limits",
        "_methods",
        "_plain",
        "_ready",
        "_server",
        "_stats",
        "buffered",
        "receiving",
    )

    def __init__(self, connection: Connection) -> None:
        server = connection.server
        self._connection = connection
        self._server = server
        self._limits = server.limits
        self._methods = server.methods
        self._stats = server.stats
        # Metadata of calls that send none of their own, shared by all of them.
        self._agent: bytes | None = None
        self._plain = Metadata()
        # Request bytes kept for incomplete requests, and the metadata of open calls.
        self.buffered = 0
        # Whole requests of the turn that is being fed.
        self._ready: list[tuple[Call, bytes | bytearray]] = []
        # Unary requests whose end has not arrived.
        self.receiving: dict[int, Call] = {}

    def open_call(self, stream_id: int, fields: tuple[RawHeader, ...], now: float) -> Call:
        """The call that a request's header block opens; raises Refusal if it opens none."""
        headers = dict(fields)
        if headers.get(b":method") != b"POST":
            raise Refusal("http_method", [(b":status", b"405"), (b"allow", b"POST")])
        content_type = headers.get(b"content-type", b"")
        end = len(GRPC_CONTENT_TYPE)
        if not content_type.startswith(GRPC_CONTENT_TYPE) or content_type[end : end + 1] not in (b"", b"+", b";"):
            raise Refusal("content_type", [(b":status", b"415")])
        spec = self._methods.get(headers[b":path"])
        if spec is None:
            path = headers[b":path"][:256].decode("ascii", "replace")
            raise refusal("unknown_method", Code.UNIMPLEMENTED, f"unknown method {path}")
        if spec.endless and self._server.draining:
            raise refusal("draining", Code.UNAVAILABLE, "the server is draining")
        stats, limits = self._stats, self._limits
        if stats.calls_open >= limits.max_calls and not self._server.make_room_for_a_call():
            message = f"the server's limit of {limits.max_calls} calls in flight is reached"
            raise refusal("calls", Code.RESOURCE_EXHAUSTED, message)
        lingering = self._connection.lingering
        if lingering > FEW_LINGERING and stats.calls_lingering >= limits.max_lingering_calls:
            message = f"{lingering} answers wait for this client to take them"
            raise refusal("lingering_calls", Code.RESOURCE_EXHAUSTED, message)
        if spec.lasts and stats.calls_lasting >= limits.max_lasting_calls:
            message = f"the server's limit of {limits.max_lasting_calls} client-streaming and endless calls is reached"
            raise refusal("lasting_calls", Code.RESOURCE_EXHAUSTED, message)
        metadata, size = self._plain, 0
        agent = headers.get(b"user-agent")
        if not headers.keys() <= PLAIN_FIELDS or (agent is not None and len(agent) > LONG_AGENT_BYTES):
            metadata, size = self._own_metadata(fields)
        elif agent != self._agent:
            self._agent = agent
            metadata = self._plain = Metadata(((b"user-agent", agent),) if agent is not None else ())
        encoding = headers.get(b"grpc-encoding", b"identity")
        if encoding not in REQUEST_ENCODINGS:
            message = f"unknown grpc-encoding {encoding[:64].decode('ascii', 'replace')!r}"
            raise refusal("encoding", Code.UNIMPLEMENTED, message, [(b"grpc-accept-encoding", ACCEPT_ENCODING)])
        timeout = headers.get(b"grpc-timeout")
        call = self._connection.new_call(spec, stream_id, metadata)
        if timeout is not None:
            try:
                call.deadline = now + parse_timeout(timeout)
            except ValueError as error:
                raise refusal("timeout", Code.INTERNAL, str(error)) from None
            self._server.deadlines.add(call, call.deadline)
        call.request_encoding = REQUEST_ENCODINGS[encoding]
        if spec.compress and b"gzip" in headers.get(b"grpc-accept-encoding", b""):
            call.reply_gzip = True
        stats.calls_open += 1
        stats.calls_total += 1
        if spec.lasts:
            stats.calls_lasting += 1
        if size:
            call.metadata_bytes = size
            self._take(size)
        return call

    def start(self, call: Call, end: bool, now: float) -> None:
        """Begin to receive the request of a call that was just opened."""
        if call.spec.kind == "bidi":
            call.requests = RequestStream(call)
            run_bidi(call)
        elif not end:
            call.receiving_since = now
            self.receiving[call.stream_id] = self._server.waiting[call] = call
        if end:
            self.data(call, b"", True)

    def data(self, call: Call, data: bytes, end: bool) -> None:
        """Request bytes of a live call."""
        if end:
            call.half_closed = True
        if call.requests is not None:
            self._messages(call, call.requests, data, end)
            return
        body = call.body
        if end:
            self._no_longer_receiving(call)
            if body is None:
                self._ready.append((call, data))
                return
            self.let_go(call)
            body += data
            self._ready.append((call, body))
        elif data:
            if body is None:
                body = call.body = data
            else:
                if isinstance(body, bytes):
                    body = call.body = bytearray(body)
                body += data
            self._keep(call, len(data))
            limit = self._limits.max_message_bytes
            if len(body) >= PREFIX_BYTES and max(message_size(body), len(body) - PREFIX_BYTES) > limit:
                self.refuse(call, too_large(limit))

    def run_ready(self) -> None:
        """Run the calls whose requests are complete; a client that has reset one by now has cost the engine nothing."""
        if not self._ready:
            return
        ready, self._ready = self._ready, []
        for call, body in ready:
            if not call.ended:
                dispatch(call, body)

    def refuse(self, call: Call, error: GrpcError, reason: str | None = None) -> None:
        """End a call whose request the server cannot accept, and count why."""
        if not call.ended:
            self._stats.refusals[reason or error.code.name.lower()] += 1
            task = call.task
            call.fail(error)
            if task is not None:
                task.cancel()

    def hold(self, call: Call, body: bytes | bytearray) -> bool:
        """Count a whole request that has to wait; False if there is no room for it and the call was refused."""
        call.body = body
        self._server.waiting[call] = call
        self._keep(call, len(body))
        return not call.ended

    def let_go(self, call: Call) -> None:
        """The call's request bytes were handed over or dropped."""
        self._server.waiting.pop(call, None)
        if call.body is not None:
            self.release(len(call.body))
            call.body = None

    def release(self, size: int) -> None:
        """``size`` kept bytes were handed over or dropped."""
        self.buffered -= size
        self._stats.buffered_bytes -= size

    def call_ended(self, call: Call) -> None:
        """Drop what an ended call still kept."""
        self._no_longer_receiving(call)
        if call.metadata_bytes:
            self.release(call.metadata_bytes)
            call.metadata, call.metadata_bytes = self._plain, 0
        self.let_go(call)
        if call.requests is not None:
            self.release(call.requests.clear())
            call.requests = None

    def close(self) -> None:
        """The connection is gone."""
        self._ready.clear()
        self.receiving.clear()
        self.release(self.buffered)

    def _no_longer_receiving(self, call: Call) -> None:
        if call.receiving_since is not None:
            call.receiving_since = None
            self.receiving.pop(call.stream_id, None)
            self._server.waiting.pop(call, None)

    def _own_metadata(self, fields: tuple[RawHeader, ...]) -> tuple[Metadata, int]:
        """The metadata of a call that shares it with no other, and the memory it takes."""
        limits = self._limits
        size = sum(len(name) + len(value) + 32 for name, value in fields)
        if size > limits.max_header_list_bytes or len(fields) > limits.max_header_fields:
            message = f"metadata exceeds {limits.max_header_list_bytes} bytes or {limits.max_header_fields} fields"
            raise refusal("metadata", Code.RESOURCE_EXHAUSTED, message)
        own = tuple(field for field in fields if field[0] not in PROTOCOL_FIELDS)
        size = sum(len(name) + len(value) + FIELD_BYTES for name, value in own)
        if self._is_over(size):
            raise refusal("buffered_bytes", Code.RESOURCE_EXHAUSTED, TOO_MANY_BYTES)
        return Metadata(own), size

    def _take(self, size: int) -> None:
        self.buffered += size
        self._stats.buffered_bytes += size

    def _is_over(self, more: int = 0) -> bool:
        limits = self._limits
        return (
            self.buffered + more > limits.max_buffered_bytes_per_connection
            or self._stats.buffered_bytes + more > limits.max_buffered_bytes
        )

    def _keep(self, call: Call, size: int) -> None:
        self._take(size)
        if self._is_over():
            self.refuse(call, GrpcError(Code.RESOURCE_EXHAUSTED, TOO_MANY_BYTES), "buffered_bytes")

    def _messages(self, call: Call, requests: RequestStream, data: bytes, end: bool) -> None:
        """Hand over each message of a client-streaming call that is complete."""
        limits = self._limits
        body = call.body if isinstance(call.body, bytearray) else bytearray()
        call.body = body
        body += data
        self._keep(call, len(data))
        try:
            while not call.ended and len(body) >= PREFIX_BYTES:
                size = message_size(body)
                if size > limits.max_message_bytes:
                    raise too_large(limits.max_message_bytes)
                if len(body) < PREFIX_BYTES + size:
                    break
                if len(requests) >= limits.max_pending_messages:
                    message = f"more than {limits.max_pending_messages} requests wait to be answered"
                    raise GrpcError(Code.RESOURCE_EXHAUSTED, message)
                request = plain_message(body[: PREFIX_BYTES + size], call.request_encoding, limits.max_message_bytes)
                del body[: PREFIX_BYTES + size]
                self.release(PREFIX_BYTES + size)
                self._keep(call, len(request))
                requests.put(request)
            if end and not call.ended:
                if body:
                    raise GrpcError(Code.INTERNAL, "request message is truncated")
                requests.close()
        except GrpcError as error:
            self.refuse(call, error)


def message_size(body: bytes | bytearray) -> int:
    """The size in the prefix of a framed message."""
    return int.from_bytes(body[1:PREFIX_BYTES], "big")
