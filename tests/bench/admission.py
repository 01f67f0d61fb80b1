"""What a request costs the front end from its last byte to the engine's socket: `python -m tests.bench.admission`.

In one process: a real front end (server, contract, guard, request table, slot) whose connection is fed a request's bytes
as a socket would bring them. The time is CPU of the whole process, from the read that holds the last byte to the return
of the send on the slot's ZMQ socket. What happens after the send (response headers, their write) is not in it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import hpack
import uvloop
import zmq

from bridge.frontend import FrontEnd
from bridge.grpc.connection import Connection
from bridge.plugins.sim.encode import OutputEncoder, encode
from bridge.plugins.sim.model import facts_of
from bridge.plugins.sim.options import parse
from bridge.wire.codec import Frames
from bridge.wire.link import Slot, slot_addresses
from bridge.wire.vllm.layouts import for_version
from tests.bench.engine import CONTEXT, LENGTH, VERSION, ready_map
from tests.bench.http2 import ACK, DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, WINDOW_UPDATE, frame
from tests.bench.pulse import FIRST_TOKEN, VOCABULARY
from tests.bench.speech import VllmEngine, prompt

RANK = b"\0\0"
SHORT, LONG = 128, 100_000
OPEN = 1024
SHORT_RUNS, LONG_RUNS, WARM_UP = 400, 20, 200
READ = 1 << 18
"""Bytes of one read: uvloop reads at most this much."""
FRAME = 16384


class TimedSlot(Slot):
    """Notes when a send returned."""

    sent_ns = 0
    wire_id = ""

    def send(self, identity: bytes, frames: Frames) -> None:
        super().send(identity, frames)
        self.sent_ns = time.process_time_ns()
        if frames[0] == b"\x00":
            # An ADD's second element's start is its id: array header (3 bytes), string header, id.
            size = frames[1][3] & 0x1F
            self.wire_id = bytes(frames[1][4 : 4 + size]).decode()


class Sink(asyncio.Transport):
    """A transport to a client that reads everything at once."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = True
        self.written = 0

    def write(self, data: Any) -> None:
        self.written += len(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever buffered."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """The client is not told."""

    def close(self) -> None:
        """The client is not told."""

    def abort(self) -> None:
        """The client is not told."""


class Bench:
    """A front end, the engine's end of its slot, and one connection."""

    def __init__(self, folder: Path) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.slot = TimedSlot(0, *slot_addresses(folder, 0))
        self.front_end = FrontEnd(
            "sim", self.slot, incarnation=1, contracts=["vllm.grpc.engine"], options={}, on_death=_die
        )
        self._context = context
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.IDENTITY, RANK)
        self._dealer.setsockopt(zmq.RCVHWM, 0)
        self._dealer.connect(self.slot.input_address)
        self._dealer.send(encode(ready_map(0)))
        layouts = for_version(VERSION)
        self._encoder = OutputEncoder(layouts.order("EngineCoreOutputs"), layouts.order("EngineCoreOutput"), 0, 8)
        self._speech = VllmEngine()
        self._hpack = hpack.Encoder()
        self._stream = 1
        self._counter = 0

    async def start(self) -> None:
        while self.slot.receive_ready() is None:
            await asyncio.sleep(0.01)
        options = parse(
            ["--max-model-len", str(CONTEXT), "--vocab-size", str(VOCABULARY), "--num-gpu-blocks", str(1 << 20)]
        )
        self.front_end.engine_up([(RANK, ready_map(0))], facts_of(options))
        self.transport = Sink()
        self.connection = Connection(self.front_end.server)
        self.connection.connection_made(self.transport)
        window = struct.pack(">I", (1 << 31) - 1 - 65535)
        settings = struct.pack(">HI", 4, (1 << 31) - 1)
        self.connection.data_received(
            PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, window) + frame(SETTINGS, ACK, 0)
        )

    def _request(self, ids: bytes, tokens: int) -> bytes:
        """The next request's frames."""
        self._counter += 1
        body = self._speech.request(f"admission-{self._counter}", ids, tokens)
        fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", self._speech.path),
            (":authority", "127.0.0.1:50051"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "bench"),
        ]
        out = frame(HEADERS, END_HEADERS, self._stream, self._hpack.encode(fields))
        for start in range(0, len(body), FRAME):
            flags = END_STREAM if start + FRAME >= len(body) else 0
            out += frame(DATA, flags, self._stream, body[start : start + FRAME])
        self._stream += 2
        return out

    async def admit(self, ids: bytes, tokens: int = 200) -> float:
        """Microseconds of CPU that one request took."""
        data = self._request(ids, tokens)
        reads = [data[start : start + READ] for start in range(0, len(data), READ)]
        self.slot.sent_ns = 0
        begun = 0
        for read in reads:
            while not self.transport.reading:
                await asyncio.sleep(0)
            begun = time.process_time_ns()
            self.connection.data_received(read)
        while not self.slot.sent_ns:
            await asyncio.sleep(0)
        taken = (self.slot.sent_ns - begun) / 1000
        await asyncio.sleep(0)
        while self._dealer.poll(0):
            self._dealer.recv_multipart(zmq.NOBLOCK)
        return taken

    def finish_last(self) -> None:
        """The engine ends the last request with its only token."""
        engine = self.front_end.engine
        parts = [
            self._encoder.prefix(self.slot.wire_id),
            b"\x91" + encode(FIRST_TOKEN),
            self._encoder.tail({"finish_reason": encode(LENGTH)}),
        ]
        codec = engine._codec
        engine.table.deliver([codec.step([self._encoder.message(0.0, {}, parts, 1)])])
        self.front_end.server.flush()

    async def median_us(self, ids: bytes, runs: int) -> float:
        """The median of `runs` requests, one after the other, each ended before the next comes."""
        taken = []
        for _ in range(runs):
            taken.append(await self.admit(ids))
            self.finish_last()
        return statistics.median(taken)

    async def close(self) -> None:
        await self.front_end.close()
        self._dealer.close(0)
        self._context.destroy(0)


def _die(reason: str) -> None:
    raise RuntimeError(reason)


async def _measure(folder: Path) -> dict[str, float]:
    short, long = prompt(200, SHORT), prompt(200, LONG)
    bench = Bench(folder)
    await bench.start()
    try:
        await bench.median_us(short, WARM_UP)
        idle = await bench.median_us(short, SHORT_RUNS)
        long_us = await bench.median_us(long, LONG_RUNS)
        for _ in range(OPEN):
            await bench.admit(short)
        crowded = await bench.median_us(short, SHORT_RUNS)
    finally:
        await bench.close()
    return {"admission_us_128_idle": idle, "admission_us_128_1024_open": crowded, "admission_us_100k": long_us}


def measure() -> dict[str, float]:
    """The three admission figures, in microseconds."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        runner: Callable[[Awaitable[dict[str, float]]], dict[str, float]] = cast(Any, uvloop.run)
        return runner(_measure(Path(folder)))


if __name__ == "__main__":
    gc.freeze()
    print(json.dumps(measure()))
