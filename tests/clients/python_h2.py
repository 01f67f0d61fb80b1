"""A gRPC client on Python's h2, which checks every frame of the server against its own state machine."""

from __future__ import annotations

import base64
import contextlib
import gzip
import socket
import ssl
import time
import urllib.parse
from collections import deque
from collections.abc import Iterator

import h2.config
import h2.connection
import h2.errors
import h2.events

from tests.clients.asking import CODES, PLAIN, CallError, Certificates, Connect, How
from tests.grpc.raw import GOAWAY, message

QUIET_S = 0.05


class H2Stream:
    """A call's messages, and how it ended."""

    def __init__(self, client: H2Client, stream_id: int, deadline: float | None) -> None:
        self._client = client
        self._deadline = deadline
        self.stream_id = stream_id
        self.buffer = b""
        self.messages: deque[bytes] = deque()
        self.trailers: dict[str, str] = {}
        self.ended = False

    def __iter__(self) -> Iterator[bytes]:
        while True:
            while self.messages:
                yield self.messages.popleft()
            if self.ended:
                break
            if self._deadline is not None and time.monotonic() > self._deadline:
                self.cancel()
                raise CallError("DEADLINE_EXCEEDED", "on the client's own clock")
            self._client.pump()
        code = CODES[int(self.trailers.get("grpc-status", "2"))]
        if code != "OK":
            raise CallError(code, urllib.parse.unquote(self.trailers.get("grpc-message", "")))

    def cancel(self) -> None:
        self._client.reset(self.stream_id)

    def take(self, data: bytes) -> None:
        """Bytes of the response."""
        self.buffer += data
        while len(self.buffer) >= 5:
            end = 5 + int.from_bytes(self.buffer[1:5], "big")
            if len(self.buffer) < end:
                return
            body = self.buffer[5:end]
            self.messages.append(gzip.decompress(body) if self.buffer[0] else body)
            self.buffer = self.buffer[end:]


class H2Client:
    """The client. It reads while somebody waits for a stream; all of its streams make progress then."""

    def __init__(self, where: Connect) -> None:
        self._gzip = where.gzip
        self._ping_every_s = where.ping_every_s
        self._socket = _connect(where)
        self._socket.settimeout(QUIET_S)
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._streams: dict[int, H2Stream] = {}
        self._unread = b""
        self._pinged_at = time.monotonic()
        self._flush()

    def unary(self, path: str, request: bytes, how: How = PLAIN) -> bytes:
        (reply,) = self.stream(path, request, how)
        return reply

    def stream(self, path: str, request: bytes, how: How = PLAIN) -> H2Stream:
        stream_id = self._h2.get_next_available_stream_id()
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        fields += [("te", "trailers"), ("content-type", "application/grpc")]
        deadline = None
        if how.timeout_s is not None:
            fields.append(("grpc-timeout", f"{int(how.timeout_s * 1000)}m"))
            deadline = time.monotonic() + how.timeout_s
        if self._gzip:
            fields.append(("grpc-encoding", "gzip"))
        for name, value in how.metadata:
            fields.append((name, value if isinstance(value, str) else base64.b64encode(value).decode()))
        self._streams[stream_id] = stream = H2Stream(self, stream_id, deadline)
        self._h2.send_headers(stream_id, fields)
        self._send(stream_id, message(gzip.compress(request), 1) if self._gzip else message(request))
        return stream

    def _send(self, stream_id: int, body: bytes) -> None:
        """A request's body, as the windows allow."""
        while body:
            room = min(self._h2.local_flow_control_window(stream_id), self._h2.max_outbound_frame_size)
            if room <= 0:
                self.pump()
                continue
            part, body = body[:room], body[room:]
            self._h2.send_data(stream_id, part, end_stream=not body)
            self._flush()

    def pump(self) -> None:
        """Read what has come, or wait a little; send PINGs when it is time."""
        if self._ping_every_s is not None and time.monotonic() - self._pinged_at > self._ping_every_s:
            self._pinged_at = time.monotonic()
            self._h2.ping(b"anybody?")
            self._flush()
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return
        assert data, "the server closed the connection"
        self._unread += data
        for event in self._h2.receive_data(self._without_goaways()):
            self._take(event)
        self._flush()

    def _without_goaways(self) -> bytes:
        """The whole frames that have come but GOAWAY: h2 4 takes its connection for closed at the first of them."""
        frames = b""
        while len(self._unread) >= 9:
            end = 9 + int.from_bytes(self._unread[:3], "big")
            if len(self._unread) < end:
                break
            frame, self._unread = self._unread[:end], self._unread[end:]
            if frame[3] == GOAWAY:
                assert frame[13:17] == bytes(4), f"GOAWAY: {frame[13:]!r}"
            else:
                frames += frame
        return frames

    def _take(self, event: h2.events.Event) -> None:
        stream = self._streams.get(getattr(event, "stream_id", None) or 0)
        if stream is None:
            return
        if isinstance(event, h2.events.DataReceived):
            stream.take(event.data)
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            stream.trailers |= {str(name): str(value) for name, value in event.headers}
        elif isinstance(event, h2.events.StreamReset):
            stream.trailers.setdefault("grpc-status", "14")
            stream.ended = True
        elif isinstance(event, h2.events.StreamEnded):
            stream.ended = True

    def reset(self, stream_id: int) -> None:
        """Cancel a stream."""
        del self._streams[stream_id]
        self._h2.reset_stream(stream_id, h2.errors.ErrorCodes.CANCEL)
        self._flush()

    def _flush(self) -> None:
        self._socket.sendall(self._h2.data_to_send())

    def close(self) -> None:
        with self._socket, contextlib.suppress(OSError):
            self._h2.close_connection()
            self._flush()


def _connect(where: Connect) -> socket.socket:
    if where.address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(where.address.removeprefix("unix:"))
        return sock
    host, _, port = where.address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), 5)
    return sock if where.tls is None else _secure(sock, where.tls, host)


def _secure(sock: socket.socket, tls: Certificates, host: str) -> socket.socket:
    context = ssl.create_default_context(cafile=str(tls.authority))
    context.set_alpn_protocols(["h2"])
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    secure = context.wrap_socket(sock, server_hostname=host)
    assert secure.selected_alpn_protocol() == "h2"
    return secure
