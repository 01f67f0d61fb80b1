"""The good neighbours: one connection with 64 streams whose every token is checked, in a process of its own.

`python -m tests.abuse.crowd PORT STREAMS TOKENS` keeps STREAMS Generate calls of about TOKENS tokens open, each
ended one followed by another with a new prompt. Each line on its standard input is answered by one JSON line: `window`
with what happened since the last answer, `stop` with the same once the open calls have ended.
"""

from __future__ import annotations

import math
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import hpack
import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.plugins.sim.tokens import expected_tokens
from tests.grpc import raw

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
WINDOW = (1 << 31) - 1
ROOT = Path(__file__).resolve().parent.parent.parent


class Window(msgspec.Struct):
    """What the crowd saw since the last time it was asked. Times in milliseconds."""

    tokens: int
    calls: int
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    errors: list[str]


class Stream:
    """One call: what it must get, and when it got something last."""

    def __init__(self, prompt: list[int], tokens: int) -> None:
        self.expected = expected_tokens(prompt, tokens)
        self.received = 0
        self.buffer = b""
        self.last: float | None = None
        self.complete = False


class Crowd:
    """The client. Everything wrong becomes a line in `errors`."""

    def __init__(self, port: int, streams: int, tokens: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()
        self._random = random.Random(port)
        self._size = tokens
        self._next_stream = 1
        self._buffer = b""
        self._spent = 0
        self.streams: dict[int, Stream] = {}
        self.ending = False
        self.closed = False
        self.gaps: list[float] = []
        self.tokens = 0
        self.calls = 0
        self.errors: list[str] = []
        self._send(raw.PREFACE + raw.settings(window=WINDOW) + raw.window_update(0, WINDOW - 65535))
        for _ in range(streams):
            self._begin()

    def fileno(self) -> int:
        return self._socket.fileno()

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            self._lost(str(error))

    def _lost(self, why: str) -> None:
        self.closed = True
        self.errors.append(f"the connection was lost: {why}")

    def _begin(self) -> None:
        prompt = [self._random.randrange(3, 32000) for _ in range(20)]
        stream_id, self._next_stream = self._next_stream, self._next_stream + 2
        size = self._random.randrange(self._size // 2, self._size * 3 // 2)
        self.streams[stream_id] = Stream(prompt, size)
        sampling = pb.SamplingParams(temperature=0.0, max_tokens=size, ignore_eos=True)
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=prompt), sampling_params=sampling, stream=True
        )
        fields = [(":method", "POST"), (":scheme", "http"), (":path", GENERATE), (":authority", "localhost")]
        block = self._encoder.encode([*fields, ("te", "trailers"), ("content-type", "application/grpc")])
        body = raw.message(request.SerializeToString())
        self._send(
            raw.frame(raw.HEADERS, raw.END_HEADERS, stream_id, block)
            + raw.frame(raw.DATA, raw.END_STREAM, stream_id, body)
        )

    def read(self) -> None:
        try:
            data = self._socket.recv(1 << 18)
        except OSError as error:
            self._lost(str(error))
            return
        now = time.perf_counter()
        if not data:
            self._lost("end of file")
            return
        buffer, position = self._buffer + data, 0
        while len(buffer) - position >= 9:
            size = int.from_bytes(buffer[position : position + 3], "big")
            end = position + 9 + size
            if len(buffer) < end:
                break
            kind, flags = buffer[position + 3], buffer[position + 4]
            stream_id = int.from_bytes(buffer[position + 5 : position + 9], "big")
            self._take(kind, flags, stream_id, buffer[position + 9 : end], now)
            position = end
        self._buffer = buffer[position:]
        if self._spent > 1 << 20:
            self._send(raw.window_update(0, self._spent))
            self._spent = 0

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes, now: float) -> None:
        if kind == raw.DATA:
            self._spent += len(payload)
            self._data(self.streams[stream_id], payload, now)
        elif kind == raw.HEADERS:
            fields = {str(name): str(value) for name, value in self._decoder.decode(payload)}
            if flags & raw.END_STREAM:
                self._end(stream_id, fields)
        elif kind == raw.SETTINGS and not flags & raw.ACK:
            self._send(raw.frame(raw.SETTINGS, raw.ACK, 0))
        elif kind == raw.PING and not flags & raw.ACK:
            self._send(raw.frame(raw.PING, raw.ACK, 0, payload))
        elif kind in (raw.RST_STREAM, raw.GOAWAY):
            self.errors.append(f"frame {kind} on stream {stream_id}: {payload!r}")
            self.streams.pop(stream_id, None)

    def _data(self, stream: Stream, payload: bytes, now: float) -> None:
        if stream.last is not None:
            self.gaps.append(now - stream.last)
        stream.last = now
        stream.buffer += payload
        while len(stream.buffer) >= 5:
            end = 5 + struct.unpack(">I", stream.buffer[1:5])[0]
            if len(stream.buffer) < end:
                return
            reply = pb.GenerateResponse.FromString(stream.buffer[5:end])
            stream.buffer = stream.buffer[end:]
            if reply.HasField("complete"):
                stream.complete = True
                got, want = list(reply.complete.output_ids), stream.expected
            else:
                got = list(reply.chunk.token_ids)
                want = stream.expected[stream.received : stream.received + len(got)]
                stream.received += len(got)
                self.tokens += len(got)
            if got != want:
                self.errors.append(f"wrong tokens after {stream.received}: {got[:5]}, not {want[:5]}")

    def _end(self, stream_id: int, fields: dict[str, str]) -> None:
        stream = self.streams.pop(stream_id)
        self.calls += 1
        if fields.get("grpc-status") != "0" or not stream.complete:
            self.errors.append(f"a call ended with {fields}")
        if not self.ending:
            self._begin()

    def window(self) -> Window:
        now = time.perf_counter()
        waits = [now - stream.last for stream in self.streams.values() if stream.last is not None]
        gaps, self.gaps = sorted(self.gaps + waits), []
        p50, p99, most = (_percentile(gaps, share) * 1000 for share in (0.5, 0.99, 1.0))
        window = Window(self.tokens, self.calls, p50, p99, most, self.errors[:20])
        self.tokens, self.calls, self.errors = 0, 0, []
        return window


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)] if ordered else 0.0


class CrowdProcess:
    """The crowd as its test sees it. Errors are kept until somebody looks: `must_be_right`."""

    def __init__(self, port: int, streams: int = 64, tokens: int = 50) -> None:
        self.streams = streams
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.abuse.crowd", *map(str, (port, streams, tokens))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self._errors: list[str] = []
        self.tokens = 0

    def _ask(self, word: str) -> Window:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(word.encode() + b"\n")
        self._process.stdin.flush()
        window = msgspec.json.decode(self._process.stdout.readline(), type=Window)
        self._errors += window.errors
        self.tokens += window.tokens
        return window

    def window(self) -> Window:
        """What happened since the last time."""
        return self._ask("window")

    def must_be_right(self) -> None:
        """Every token so far was the expected one, and no call failed."""
        self.window()
        assert not self._errors, "\n".join(self._errors[:5])

    def stop(self) -> None:
        """Let the open calls end, see that they all went right, and end the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._ask("stop")
        finally:
            self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
        assert not self._errors, "\n".join(self._errors[:5])


def main(port: int, streams: int, tokens: int) -> None:
    crowd = Crowd(port, streams, tokens)
    selector = selectors.DefaultSelector()
    selector.register(crowd, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is crowd:
                crowd.read()
                if crowd.closed:
                    selector.unregister(crowd)
                continue
            word = os.read(sys.stdin.fileno(), 100)
            if not word:
                return
            if word == b"stop\n":
                crowd.ending = True
                while crowd.streams and not crowd.closed:
                    crowd.read()
            print(msgspec.json.encode(crowd.window()).decode(), flush=True)
            break  # what was readable may have been read


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
