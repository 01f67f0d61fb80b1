"""The load client: `python -m tests.bench.client '{"port": …}'`, in a process of its own; prints its result as JSON.

Streams are opened on one connection, as a gateway does it, and on more only where the server allows no more streams
there. When a stream ends the next one is opened, `concurrency` of them at a time, until `requests` are done.
"""

from __future__ import annotations

import gc
import resource
import select
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from tests.bench.http2 import Connection, Stream
from tests.bench.pulse import STEPS, Pulse, offset_of, step_of, token_of
from tests.bench.speech import SPEECHES, Speech, messages, prompt, varint

FIRST_ID = 200
FIRST_IDS = 5000
"""First ids of prompts, in turn; each takes two bytes."""
SETTLE_S = 5.0
SILENCE_S = 30.0


class Load(msgspec.Struct, kw_only=True):
    """What to do. `requests` 0 means `concurrency`; `pulse` is the file that tells when steps left.

    `long_every_ms` sends a prompt of `long_prompt` tokens that often, each asking for one token, while the rest runs.
    With `hold_s` nothing is awaited: the streams are kept open that long after their first token. `logprobs` and `stop`
    are asked for by every stream (the former over vllm.grpc.engine only); no output holds `stop`. An empty `speech` is
    the server's own.
    """

    port: int
    speech: str = ""
    concurrency: int
    requests: int = 0
    prompt: int = 128
    tokens: int = 200
    pulse: str = ""
    long_every_ms: float = 0.0
    long_prompt: int = 100_000
    hold_s: float = 0.0
    logprobs: int | None = None
    stop: str = ""


class Result(msgspec.Struct, kw_only=True):
    """What happened. Times in seconds but `latency_ms`: from a step's leaving to the client's having each of its tokens."""

    wall_s: float
    requests: int
    tokens: int
    connections: int
    data_frames: int
    reads: int
    client_cpu_s: float
    latency_ms: dict[str, float]
    long_prompts: int
    errors: list[str]


class Client:
    """One run of a load."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._speech: Speech = SPEECHES[load.speech](load.logprobs, load.stop)
        self._connections: list[Connection] = []
        self._poll = select.epoll()
        self._by_fd: dict[int, Connection] = {}
        self._writing: set[int] = set()
        total = load.requests or load.concurrency
        self._run = f"{time.time_ns():x}"
        ids = prompt(FIRST_ID, load.prompt)[2:]
        self._todo = [self._stream(f"{self._run}-{index}", index, ids, load.tokens) for index in range(total)]
        self._todo.reverse()
        self._long_ids = prompt(FIRST_ID, load.long_prompt)[2:]
        self._long: list[Stream] = []
        self._done: list[Stream] = []

    def _stream(self, name: str, index: int, rest_of_prompt: bytes, tokens: int, *, is_long: bool = False) -> Stream:
        first = FIRST_ID + index % FIRST_IDS
        return Stream(name, first, self._speech.request(name, varint(first) + rest_of_prompt, tokens), is_long=is_long)

    def run(self) -> Result:
        self._connect()
        gc.disable()
        begun = time.monotonic()
        self._drive()
        wall = time.monotonic() - begun
        used = resource.getrusage(resource.RUSAGE_SELF)
        return self._result(wall, used.ru_utime + used.ru_stime)

    def _connect(self) -> None:
        """A connection whose SETTINGS have come, and as many more as the streams need."""
        room = 0
        while room < self._load.concurrency + (8 if self._load.long_every_ms else 0):
            connection = Connection(self._load.port, self._speech.path)
            self._connections.append(connection)
            self._by_fd[connection.fileno()] = connection
            self._poll.register(connection.fileno(), select.EPOLLIN)
            connection.write()
            until = time.monotonic() + SETTLE_S
            while not connection.settled:
                if time.monotonic() > until:
                    raise ConnectionError("the server sent no SETTINGS")
                for fd, _ in self._poll.poll(0.1):
                    self._by_fd[fd].read(0)
            connection.write()
            room += connection.stream_limit

    def _drive(self) -> None:
        load = self._load
        for _ in range(load.concurrency):
            self._open(self._todo.pop())
        running = load.concurrency
        period = load.long_every_ms / 1000
        next_long = time.monotonic() + period
        heard = time.monotonic()
        held_since: float | None = None
        for connection in self._connections:
            connection.write()
        while running or self._unanswered_long():
            self._watch_writes()
            wait = min(next_long - time.monotonic(), 1.0) if period else 1.0
            events = self._poll.poll(max(wait, 0.0))
            now_ns = time.monotonic_ns()
            now = now_ns / 1e9
            if events:
                heard = now
            elif now - heard > SILENCE_S:
                return
            for fd, event in events:
                connection = self._by_fd[fd]
                if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                    for stream in connection.read(now_ns):
                        if stream.is_long:
                            continue
                        self._done.append(stream)
                        if self._todo:
                            self._open(self._todo.pop())
                        else:
                            running -= 1
                connection.write()
            if period and now >= next_long and running:
                next_long += period
                self._open_long()
            if load.hold_s and held_since is None and self._all_have_tokens():
                held_since = now
                print("holding", flush=True)
            if held_since is not None and now - held_since > load.hold_s:
                return

    def _open(self, stream: Stream) -> None:
        connection = min(self._connections, key=lambda one: len(one.open))
        connection.request(stream, time.monotonic_ns())

    def _open_long(self) -> None:
        index = len(self._long)
        stream = self._stream(f"{self._run}-long-{index}", index, self._long_ids, 1, is_long=True)
        self._long.append(stream)
        self._connections[0].request(stream, time.monotonic_ns())
        self._connections[0].write()

    def _watch_writes(self) -> None:
        for fd, connection in self._by_fd.items():
            if connection.wants_to_write != (fd in self._writing):
                self._writing ^= {fd}
                self._poll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if fd in self._writing else 0))

    def _unanswered_long(self) -> bool:
        return any(stream.status is None for stream in self._long)

    def _all_have_tokens(self) -> bool:
        return all(stream.frames for one in self._connections for stream in one.open.values())

    def _result(self, wall: float, cpu: float) -> Result:
        open_streams = [stream for one in self._connections for stream in one.open.values()]
        errors = [f"{stream.name} is still open" for stream in open_streams if not self._load.hold_s]
        marks = Pulse(Path(self._load.pulse)).marks() if self._load.pulse else []
        latencies: list[int] = []
        tokens = 0
        for stream in self._done:
            tokens += self._read(stream, marks, latencies, errors)
        errors += [f"a long prompt: {stream.status}" for stream in self._long if stream.status != "0"]
        return Result(
            wall_s=wall,
            requests=len(self._done),
            tokens=tokens,
            connections=len(self._connections),
            data_frames=sum(one.data_frames for one in self._connections),
            reads=sum(one.reads for one in self._connections),
            client_cpu_s=cpu,
            latency_ms=percentiles(latencies),
            long_prompts=len(self._long),
            errors=errors[:5],
        )

    def _read(self, stream: Stream, marks: list[int], latencies: list[int], errors: list[str]) -> int:
        """The number of tokens of a stream, all of which must be there and in order."""
        if stream.status != "0":
            errors.append(f"{stream.name}: status {stream.status}")
            return 0
        count = 0
        offset = offset_of(stream.first_id)
        step = -1
        for message in messages(stream, self._speech):
            for token in message.tokens:
                step = step + 1 if count else step_of(token, offset)
                if token != token_of(step, offset):
                    errors.append(f"{stream.name}: token {token} where {token_of(step, offset)} should be")
                    return count
                count += 1
                if marks:
                    latencies.append(message.at_ns - marks[step % STEPS])
        if count != self._load.tokens:
            errors.append(f"{stream.name}: {count} tokens instead of {self._load.tokens}")
        return count


def percentiles(latencies: list[int]) -> dict[str, float]:
    if not latencies:
        return {}
    ordered = sorted(latencies)
    at = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {name: ordered[min(int(len(ordered) * share), len(ordered) - 1)] / 1e6 for name, share in at.items()}


def main() -> None:
    result: Any = Client(msgspec.json.decode(sys.argv[1], type=Load)).run()
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main()
