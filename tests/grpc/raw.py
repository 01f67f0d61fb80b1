"""HTTP/2 written by hand: a client that sends exactly what a test says and records every frame it gets."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS = 1, 1, 4
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 3, 4


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream_id) + payload


def message(data: bytes, flag: int = 0) -> bytes:
    """One gRPC message with its prefix."""
    return bytes([flag]) + struct.pack(">I", len(data)) + data


def settings(**values: int) -> bytes:
    """A SETTINGS frame."""
    names = {"streams": MAX_CONCURRENT_STREAMS, "window": INITIAL_WINDOW_SIZE}
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", names[name], value) for name, value in values.items()))


def window_update(stream_id: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream_id, struct.pack(">I", increment))


def reset(stream_id: int, code: int = 8) -> bytes:
    """An RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, struct.pack(">I", code))


@dataclass
class Frame:
    """A frame that arrived."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes
    headers: list[tuple[str, str]] = field(default_factory=list)


class RawClient:
    """One connection. Nothing is answered but SETTINGS (when ``polite``)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, polite: bool = True) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()
        self._buffer = b""
        self._polite = polite
        self.frames: list[Frame] = []
        self.closed = False
        self.reads = 0
        self.next_stream = 1

    @classmethod
    async def connect(cls, port: int, first: bytes | None = None, limit: int = 2**16) -> RawClient:
        """Connect, and send the preface and ``first`` (an empty SETTINGS unless given)."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
        client = cls(reader, writer)
        await client.send(PREFACE + (settings() if first is None else first))
        return client

    async def send(self, data: bytes) -> None:
        """Write bytes."""
        self._writer.write(data)
        await self._writer.drain()

    def headers(
        self, path: str = "/bridge.test.Probe/Raw", extra: Sequence[tuple[str, str]] = (), **change: str
    ) -> bytes:
        """The header block of a gRPC request."""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
            **{name.replace("_", "-"): value for name, value in change.items()},
        }
        method = fields.pop("method", None)
        if method is not None:
            fields[":method"] = method
        return bytes(self._encoder.encode([*fields.items(), *extra]))

    def request(self, path: str = "/bridge.test.Probe/Raw", data: bytes = b"", **change: str) -> tuple[int, bytes]:
        """A whole unary request: its stream and its bytes."""
        stream_id = self.stream()
        body = message(data)
        frames = [body[at : at + 16384] for at in range(0, len(body), 16384)]
        out = frame(HEADERS, END_HEADERS, stream_id, self.headers(path, **change))
        for index, part in enumerate(frames):
            out += frame(DATA, END_STREAM if index == len(frames) - 1 else 0, stream_id, part)
        return stream_id, out

    def stream(self) -> int:
        """A new stream's id."""
        self.next_stream += 2
        return self.next_stream - 2

    async def call(self, path: str = "/bridge.test.Probe/Raw", data: bytes = b"", **change: str) -> int:
        """Send a whole unary request."""
        stream_id, out = self.request(path, data, **change)
        await self.send(out)
        return stream_id

    async def read(self, timeout_s: float = 2.0) -> bool:
        """Read once and take the frames apart; False when the connection ended."""
        try:
            data = await asyncio.wait_for(self._reader.read(1 << 20), timeout_s)
        except ConnectionError:
            data = b""
        if not data:
            self.closed = True
            return False
        self.reads += 1
        self._buffer += data
        while len(self._buffer) >= 9:
            size = int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < 9 + size:
                break
            kind, flags = self._buffer[3], self._buffer[4]
            arrived = Frame(kind, flags, struct.unpack(">I", self._buffer[5:9])[0], self._buffer[9 : 9 + size])
            self._buffer = self._buffer[9 + size :]
            if kind == HEADERS:
                arrived.headers = [(str(n), str(v)) for n, v in self._decoder.decode(arrived.payload)]
            if kind == SETTINGS and not flags & ACK and self._polite:
                self._writer.write(frame(SETTINGS, ACK, 0))
            self.frames.append(arrived)
        return True

    async def until(self, condition: Callable[[RawClient], bool], timeout_s: float = 5.0) -> None:
        """Read until ``condition`` holds or the connection ends."""
        deadline = time.monotonic() + timeout_s
        while not condition(self) and not self.closed:
            await self.read(max(0.01, deadline - time.monotonic()))
        assert condition(self), f"ended without it; frames: {self.frames[-5:]}"

    async def quiet(self, seconds: float = 0.1) -> None:
        """Read until nothing has come for ``seconds``."""
        try:
            while await self.read(seconds):
                pass
        except TimeoutError:
            return

    def of(self, kind: int, stream_id: int | None = None) -> list[Frame]:
        """The frames of a kind (and stream) so far."""
        return [f for f in self.frames if f.kind == kind and (stream_id is None or f.stream_id == stream_id)]

    def body(self, stream_id: int) -> bytes:
        """The DATA of a stream so far."""
        return b"".join(f.payload for f in self.of(DATA, stream_id))

    def messages(self, stream_id: int) -> list[bytes]:
        """The complete gRPC messages of a stream so far."""
        body, found = self.body(stream_id), []
        while len(body) >= 5 and len(body) >= 5 + int.from_bytes(body[1:5], "big"):
            size = int.from_bytes(body[1:5], "big")
            found.append(body[5 : 5 + size])
            body = body[5 + size :]
        return found

    def ended(self, stream_id: int) -> bool:
        """Whether the server ended or reset the stream."""
        return any(
            f.kind == RST_STREAM or (f.kind in (DATA, HEADERS) and f.flags & END_STREAM)
            for f in self.frames
            if f.stream_id == stream_id
        )

    def trailers(self, stream_id: int) -> dict[str, str]:
        """The last header block of a stream."""
        return dict(self.of(HEADERS, stream_id)[-1].headers)

    async def finished(self, stream_id: int) -> dict[str, str]:
        """Wait for the end of a stream; its trailers."""
        await self.until(lambda client: client.ended(stream_id))
        return self.trailers(stream_id)

    def pause(self) -> None:
        """Stop taking bytes from the socket."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def close(self) -> None:
        """Close the connection, with or without its unsent bytes."""
        self._writer.transport.abort()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return
