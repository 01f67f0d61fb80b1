"""One client connection of HTTP/2 as gRPC uses it, cheap enough to measure servers with.

It obeys the server's windows, frame size and stream limit, and offers the windows of hyper's client, which SMG and
vLLM Router use. What arrives is only cut into frames and kept with its time; messages are read after the run.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections import deque

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 3, 4, 5
DEFAULT_WINDOW = 65535
STREAM_WINDOW = 2 << 20
CONNECTION_WINDOW = 5 << 20
READ = 1 << 20
WRITE = 1 << 18

_head = struct.Struct(">HBBBI")
_setting = struct.Struct(">HI")


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _head.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


class Stream:
    """A request on its way and what came back: `frames` are (time in ns, DATA payload)."""

    __slots__ = ("body", "first_id", "frames", "is_long", "name", "offset", "sent_ns", "status", "stream_id", "window")

    def __init__(self, name: str, first_id: int, body: bytes, *, is_long: bool = False) -> None:
        self.name = name
        self.first_id = first_id
        """The first id of the prompt."""
        self.body = body
        self.is_long = is_long
        self.offset = 0
        self.stream_id = 0
        self.window = 0
        self.sent_ns = 0
        self.frames: list[tuple[int, bytes]] = []
        self.status: str | None = None
        """The grpc-status with its message; None while the stream is open."""


class Connection:
    """A connection to 127.0.0.1:`port`; every stream asks for `path`."""

    def __init__(self, port: int, path: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=5)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.open: dict[int, Stream] = {}
        self.settled = False
        self.stream_limit = 100
        """SETTINGS_MAX_CONCURRENT_STREAMS; before the server's SETTINGS what RFC 9113 recommends to assume."""
        self.data_frames = 0
        self.reads = 0
        self._window = DEFAULT_WINDOW
        self._initial_window = DEFAULT_WINDOW
        self._frame_size = 16384
        self._next = 1
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()
        self._fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", f"127.0.0.1:{port}"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "bench"),
        ]
        self._waiting: deque[Stream] = deque()
        self._taken = 0
        self._rest = b""
        self._out = bytearray(PREFACE)
        self._out += frame(
            SETTINGS, 0, 0, _setting.pack(INITIAL_WINDOW_SIZE, STREAM_WINDOW) + _setting.pack(MAX_FRAME_SIZE, 1 << 20)
        )
        self._out += frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", CONNECTION_WINDOW - DEFAULT_WINDOW))

    @property
    def wants_to_write(self) -> bool:
        return bool(self._out)

    def fileno(self) -> int:
        return self.socket.fileno()

    def request(self, stream: Stream, now_ns: int) -> None:
        """Open `stream`; its body follows as the windows allow."""
        stream.stream_id = self._next
        stream.window = self._initial_window
        stream.sent_ns = now_ns
        self._next += 2
        self.open[stream.stream_id] = stream
        self._out += frame(HEADERS, END_HEADERS, stream.stream_id, self._encoder.encode(self._fields))
        self._waiting.append(stream)

    def write(self) -> None:
        """Send what the windows and the socket take."""
        while True:
            if len(self._out) < WRITE:
                self._fill()
            if not self._out:
                return
            try:
                sent = self.socket.send(self._out)
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    raise
                return
            del self._out[:sent]

    def _fill(self) -> None:
        """Frame bodies in the order of their requests; one whose own window is spent lets the next go first."""
        for _ in range(len(self._waiting)):
            stream = self._waiting.popleft()
            body = stream.body
            while stream.offset < len(body) and len(self._out) < WRITE:
                size = min(len(body) - stream.offset, self._frame_size, self._window, stream.window)
                if size <= 0:
                    break
                end = stream.offset + size
                self._out += frame(
                    DATA, END_STREAM if end == len(body) else 0, stream.stream_id, body[stream.offset : end]
                )
                stream.offset = end
                self._window -= size
                stream.window -= size
            if stream.offset < len(body) and stream.status is None:
                self._waiting.append(stream)
            if self._window <= 0 or len(self._out) >= WRITE:
                return

    def read(self, now_ns: int) -> list[Stream]:
        """Take one read of the socket, which is readable; returns the streams that ended."""
        data = self.socket.recv(READ)
        if not data:
            raise ConnectionError("the server closed the connection")
        self.reads += 1
        if self._rest:
            data = self._rest + data
        ended: list[Stream] = []
        position, size = 0, len(data)
        unpack, streams = _head.unpack_from, self.open
        while size - position >= 9:
            high, low, kind, flags, stream_id = unpack(data, position)
            start = position + 9
            end = start + (high << 8 | low)
            if end > size:
                break
            position = end
            if kind == DATA:
                self.data_frames += 1
                self._taken += end - start
                stream = streams.get(stream_id)
                if stream is not None:
                    stream.frames.append((now_ns, data[start:end]))
                    if flags & END_STREAM:
                        self._end(stream, "no trailers", ended)
            else:
                self._control(kind, flags, stream_id, data[start:end], ended)
        self._rest = data[position:]
        if self._taken >= CONNECTION_WINDOW // 2:
            self._out += frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._taken))
            self._taken = 0
        return ended

    def _control(self, kind: int, flags: int, stream_id: int, payload: bytes, ended: list[Stream]) -> None:
        stream = self.open.get(stream_id)
        if kind == HEADERS:
            fields = dict(self._decoder.decode(payload))
            if stream is not None and flags & END_STREAM:
                self._end(stream, f"{fields.get('grpc-status')} {fields.get('grpc-message', '')}".strip(), ended)
        elif kind == RST_STREAM:
            if stream is not None:
                self._end(stream, f"reset {int.from_bytes(payload, 'big')}", ended)
        elif kind == WINDOW_UPDATE:
            increment = int.from_bytes(payload, "big")
            if stream is not None:
                stream.window += increment
            elif stream_id == 0:
                self._window += increment
        elif kind == SETTINGS and not flags & ACK:
            self._settings(payload)
        elif kind == PING and not flags & ACK:
            self._out += frame(PING, ACK, 0, payload)
        elif kind == GOAWAY:
            raise ConnectionError(f"GOAWAY {payload[8:].decode(errors='replace')}")

    def _end(self, stream: Stream, status: str, ended: list[Stream]) -> None:
        stream.status = status
        del self.open[stream.stream_id]
        ended.append(stream)

    def _settings(self, payload: bytes) -> None:
        self.stream_limit = 1 << 31 if not self.settled else self.stream_limit
        self.settled = True
        for offset in range(0, len(payload), 6):
            name, value = _setting.unpack_from(payload, offset)
            if name == MAX_CONCURRENT_STREAMS:
                self.stream_limit = value
            elif name == MAX_FRAME_SIZE:
                self._frame_size = min(value, 1 << 16)
            elif name == INITIAL_WINDOW_SIZE:
                for stream in self.open.values():
                    stream.window += value - self._initial_window
                self._initial_window = value
        self._out += frame(SETTINGS, ACK, 0)

    def close(self) -> None:
        self.socket.close()
