"""A gRPC client that sends exactly the bytes of a case. HTTP/2 by hand; a call with bad headers has its own connection."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import unquote

import hpack

from tests.fuzz.cases import Case
from tests.fuzz.make import path_of
from tests.grpc import raw

WINDOW = 2**31 - 1
FRAME = 16384
CANCEL = 8

ANSWER_S = 60.0
"""An answer that takes longer is none."""

GIVEN_UP = ("cancelled", "nothing", "")
"""How a call ends that the server still works on."""

CUT_S = 2.0
"""How long a call of its own connection may stay without an answer: what a server makes of such headers may be nothing."""


@dataclass
class Answer:
    """What came back."""

    how: str = ""
    """`status`; `cancelled` by us; `reset`, `closed`, `refused` (an HTTP status) or `nothing`."""
    status: int | None = None
    text: str = ""
    messages: list[bytes] = field(default_factory=list)


class _Call:
    __slots__ = ("answer", "buffer", "cancel_after", "done", "window")

    def __init__(self, cancel_after: int | None, window: int, done: asyncio.Future[None]) -> None:
        self.answer = Answer()
        self.buffer = bytearray()
        self.cancel_after = cancel_after
        self.window = window
        self.done = done

    def end(self, how: str, status: int | None = None, text: str = "") -> None:
        if not self.done.done():
            self.answer.how, self.answer.status, self.answer.text = how, status, text
            self.done.set_result(None)


class Connection(asyncio.Protocol):
    """One HTTP/2 connection."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()
        self._buffer = b""
        self._block = b""
        self._calls: dict[int, _Call] = {}
        self._next = 1
        self._window = 65535
        self._stream_window = 65535
        self._received = 0
        self._room = asyncio.Event()
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(raw.PREFACE + raw.settings(window=WINDOW) + raw.window_update(0, WINDOW - 65535))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._room.set()
        for call in self._calls.values():
            call.end("closed", text=repr(exc) if exc else "")
        self._calls.clear()

    async def call(self, case: Case, timeout_s: float) -> Answer:
        stream, self._next = self._next, self._next + 2
        call = self._calls[stream] = _Call(case.cancel_after, self._stream_window, self._loop.create_future())
        self._transport.write(self._headers(case, stream))
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(case.body, stream, call)
                if case.cancel_after == 0:
                    await asyncio.wait({call.done}, timeout=0.2)
                    call.end("cancelled")
                await call.done
        except TimeoutError:
            call.end("nothing", text=f"no answer within {timeout_s:g} s")
        finally:
            self._calls.pop(stream, None)
            if call.answer.how in GIVEN_UP and not self.closed:
                self._transport.write(raw.reset(stream, CANCEL))
        return call.answer

    def close(self) -> None:
        self._transport.abort()

    def _headers(self, case: Case, stream: int) -> bytes:
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": case.path or path_of(case.method),
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        fields.update(case.headers)
        left = ((name, value) for name, value in fields.items() if value)
        block = bytes(self._encoder.encode([(name, value, False) for name, value in left], huffman=False))
        parts = [block[at : at + FRAME] for at in range(0, len(block), FRAME)]
        out = raw.frame(raw.HEADERS, raw.END_HEADERS if len(parts) == 1 else 0, stream, parts[0])
        for number, part in enumerate(parts[1:], 2):
            out += raw.frame(raw.CONTINUATION, raw.END_HEADERS if number == len(parts) else 0, stream, part)
        return out

    async def _send(self, body: bytes, stream: int, call: _Call) -> None:
        """DATA as the windows allow, the last frame with END_STREAM."""
        position = 0
        while not call.done.done():
            size = min(len(body) - position, FRAME, self._window, call.window)
            if size <= 0 and position < len(body):
                self._room.clear()
                await self._room.wait()
                continue
            end = position + size
            last = end == len(body)
            self._transport.write(raw.frame(raw.DATA, raw.END_STREAM if last else 0, stream, body[position:end]))
            self._window -= size
            call.window -= size
            position = end
            if last:
                return

    def data_received(self, data: bytes) -> None:
        data = self._buffer + data
        position = 0
        while len(data) - position >= 9:
            end = position + 9 + int.from_bytes(data[position : position + 3], "big")
            if end > len(data):
                break
            stream = int.from_bytes(data[position + 5 : position + 9], "big")
            self._frame(data[position + 3], data[position + 4], stream, data[position + 9 : end])
            position = end
        self._buffer = data[position:]

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        call = self._calls.get(stream)
        if kind == raw.DATA:
            self._received += len(payload)
            if self._received > WINDOW // 2:
                self._transport.write(raw.window_update(0, self._received))
                self._received = 0
            if call is not None:
                self._take(stream, call, payload)
        elif kind in (raw.HEADERS, raw.CONTINUATION):
            self._block += payload
            if flags & raw.END_HEADERS:
                block, self._block = self._block, b""
                fields = {str(name): str(value) for name, value in self._decoder.decode(block)}
                if call is not None:
                    self._fields(call, fields)
        elif kind == raw.RST_STREAM and call is not None:
            call.end("reset", text=f"error code {int.from_bytes(payload, 'big')}")
        elif kind == raw.WINDOW_UPDATE:
            increment = int.from_bytes(payload, "big")
            if stream == 0:
                self._window += increment
            elif call is not None:
                call.window += increment
            self._room.set()
        elif kind == raw.SETTINGS and not flags & raw.ACK:
            self._settings(payload)
        elif kind == raw.PING and not flags & raw.ACK:
            self._transport.write(raw.frame(raw.PING, raw.ACK, 0, payload))

    def _take(self, stream: int, call: _Call, payload: bytes) -> None:
        buffer, messages = call.buffer, call.answer.messages
        buffer += payload
        while len(buffer) >= 5 and len(buffer) >= (size := 5 + int.from_bytes(buffer[1:5], "big")):
            messages.append(bytes(buffer[5:size]))
            del buffer[:size]
        if call.cancel_after is not None and len(messages) >= call.cancel_after:
            call.end("cancelled")

    @staticmethod
    def _fields(call: _Call, fields: dict[str, str]) -> None:
        if "grpc-status" in fields:
            call.end("status", int(fields["grpc-status"]), unquote(fields.get("grpc-message", "")))
        elif fields.get(":status", "200") != "200":
            call.end("refused", text=f"HTTP {fields[':status']}")

    def _settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == raw.INITIAL_WINDOW_SIZE:
                for call in self._calls.values():
                    call.window += value - self._stream_window
                self._stream_window = value
        self._transport.write(raw.frame(raw.SETTINGS, raw.ACK, 0))
        self._room.set()


class Client:
    """Calls to one address. Good calls share a connection, which is opened anew when it was lost."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._shared: Connection | None = None
        self._opening = asyncio.Lock()

    async def call(self, case: Case, timeout_s: float = ANSWER_S) -> Answer:
        if not case.alone:
            async with self._opening:
                if self._shared is None or self._shared.closed:
                    self._shared = await self._connect()
                shared = self._shared
            return await shared.call(case, timeout_s)
        connection = await self._connect()
        try:
            return await connection.call(case, CUT_S)
        finally:
            connection.close()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port)
        return connection

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
