"""A whole front end before clients that count: 56 streams over four connections through windows of a few bytes.

In one process and without a clock: the engine's end of the slot, the steps and the clients are this test's. The clients
are h2's, which raises for every byte more than was granted, and every frame that a stream's state does not allow.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import msgspec
import pytest
import zmq
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from bridge.contracts.proto import message
from bridge.frontend import FrontEnd
from bridge.grpc.call import Call
from bridge.grpc.connection import Connection
from bridge.grpc.outflow import Flight, Outflow
from bridge.plugins.sim.encode import OutputEncoder, encode
from bridge.plugins.sim.model import facts_of
from bridge.plugins.sim.options import parse
from bridge.wire.codec import Frames
from bridge.wire.link import Slot, slot_addresses
from bridge.wire.vllm.layouts import for_version
from tests.bench.engine import LENGTH, VERSION, ready_map
from tests.bench.speech import Speech, VllmEngine, VllmInference, prompt

RANK = b"\0\0"
PLAIN, SEARCHED, BARE = "vllm.grpc.engine", "vllm.grpc.engine with stop strings", "vllm.Inference"
SPEECH: dict[str, Speech] = {PLAIN: VllmEngine(), SEARCHED: VllmEngine(stop="Z"), BARE: VllmInference()}
LARGE_IDS = (2**18 - 1, 2**18, 2**18 + 5, 2**21 - 1, 2**21, 2**31)
HIGH_WATER = 1500
# The first streams last to the end.
LASTING = 6
Reply = message("vllm.GenerateResponse")


class EngineEnd(Slot):
    """Keeps what is sent to the engine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0, *slot_addresses(folder, 0))
        self.sent: list[tuple[bytes, list[Any]]] = []

    def send(self, identity: bytes, frames: Frames) -> None:
        super().send(identity, frames)
        self.sent.append((bytes(frames[0]), msgspec.msgpack.decode(frames[1])))


class Pipe(asyncio.Transport):
    """What the server wrote and the client has not read; pushes back like a socket's."""

    def __init__(self, protocol: Connection) -> None:
        super().__init__()
        self.protocol = protocol
        self.buffer = bytearray()
        self.reading = True
        self.paused = False
        self.pauses = 0
        self.gone = False

    def write(self, data: Any) -> None:
        self.buffer += data
        if len(self.buffer) > HIGH_WATER and not self.paused:
            self.paused = True
            self.pauses += 1
            self.protocol.pause_writing()

    def read(self, size: int) -> bytes:
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        if self.paused and len(self.buffer) <= HIGH_WATER // 4:
            self.paused = False
            self.protocol.resume_writing()
        return data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """They are this test's."""

    def get_write_buffer_size(self) -> int:
        return len(self.buffer)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.gone

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self.gone:
            self.gone = True
            self.protocol.connection_lost(None)


class Stream:
    """One call, and what the engine said for it."""

    def __init__(self, number: int) -> None:
        self.kind = (PLAIN, SEARCHED, BARE)[number % 3]
        self.name = f"stream {number}"
        self.lasts = number < LASTING
        self.stops = self.kind == SEARCHED and number % 2 == 1
        self.tokens: list[int] = []
        self.cancelled = False
        self.body = b""
        self.trailers: dict[str, str] = {}
        self.closed = False

    def replies(self) -> list[Any]:
        """The messages that arrived; asserts that none is half."""
        found, body, kind = [], self.body, Reply if self.kind == BARE else pb.GenerateResponse
        while body:
            flag, size = struct.unpack_from(">BI", body)
            assert flag == 0 and len(body) >= 5 + size, f"{self.name}: a message is cut off"
            found.append(kind.FromString(body[5 : 5 + size]))
            body = body[5 + size :]
        return found


class Client:
    """One connection of h2's, and the wire to it."""

    def __init__(self, front_end: FrontEnd, random_: random.Random) -> None:
        self._random = random_
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.streams: dict[int, Stream] = {}
        self.connection = Connection(front_end.server)
        self.pipe = Pipe(self.connection)
        self.connection.connection_made(self.pipe)
        self.h2.initiate_connection()
        # h2 takes the first acknowledgement for that of any change that is under way.
        self.write()
        self.read(HIGH_WATER)
        self.settings_sent = 0
        self.resize(300)

    def ask(self, stream: Stream, body: bytes) -> None:
        stream_id = self.h2.get_next_available_stream_id()
        fields = [(":method", "POST"), (":scheme", "http"), (":path", SPEECH[stream.kind].path)]
        fields += [(":authority", "h2"), ("te", "trailers"), ("content-type", "application/grpc")]
        self.h2.send_headers(stream_id, fields)
        self.h2.send_data(stream_id, body, end_stream=True)
        self.streams[stream_id] = stream

    def live(self) -> list[int]:
        return [stream_id for stream_id, stream in self.streams.items() if not stream.closed]

    def grant(self, stream_id: int, size: int) -> None:
        if stream_id == 0 or stream_id in self.h2.streams:
            self.h2.increment_flow_control_window(size, stream_id or None)

    def resize(self, window: int) -> None:
        """Change what every stream's window is counted from."""
        self.settings_sent += 1
        self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})

    def cancel(self, stream_id: int) -> None:
        self.streams[stream_id].cancelled = self.streams[stream_id].closed = True
        self.h2.reset_stream(stream_id, 8)

    def write(self) -> None:
        """Send what h2 has to say, in reads of any size."""
        data = self.h2.data_to_send()
        while data:
            size = self._random.choice((1, 5, 13, 20, 100, 10_000))
            self.connection.data_received(data[:size])
            data = data[size:]

    def read(self, size: int) -> None:
        for event in self.h2.receive_data(self.pipe.read(size)):
            stream = self.streams.get(getattr(event, "stream_id", None) or 0)
            if stream is None or stream.cancelled:
                assert not isinstance(event, h2.events.ConnectionTerminated), event
                continue
            assert not stream.closed, f"{stream.name}: {event} after its end"
            if isinstance(event, h2.events.DataReceived):
                stream.body += event.data
            elif isinstance(event, h2.events.TrailersReceived):
                stream.trailers = {str(name): str(value) for name, value in event.headers}
            elif isinstance(event, h2.events.StreamEnded):
                stream.closed = True
            assert not isinstance(event, h2.events.StreamReset), f"{stream.name} was reset"


class Stage:
    """A front end whose engine and clients are this test."""

    def __init__(self, folder: Path, model: Path, random_: random.Random) -> None:
        self.random = random_
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.slot = EngineEnd(folder)
        contracts = ["vllm.grpc.engine", "vllm.Inference"]
        self.front_end = FrontEnd("sim", self.slot, incarnation=1, contracts=contracts, options={}, on_death=_die)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.IDENTITY, RANK)
        self._dealer.connect(self.slot.input_address)
        self._dealer.send(encode(ready_map(0)))
        layouts = for_version(VERSION)
        self._encoder = OutputEncoder(layouts.order("EngineCoreOutputs"), layouts.order("EngineCoreOutput"), 0, 8)
        self._options = parse(["--max-model-len", "131072", "--vocab-size", "259", "--model-path", str(model)])
        self._last = {"finish_reason": encode(LENGTH)}
        self.characters = Tokenizer.from_file(str(model / "tokenizer.json")).encode(
            "abcdefgh", add_special_tokens=False
        )
        self.stop_id = Tokenizer.from_file(str(model / "tokenizer.json")).encode("Z", add_special_tokens=False).ids[0]
        self.streams: list[Stream] = []
        self.clients: list[Client] = []
        self.running: dict[str, Stream] = {}

    async def start(self, clients: int, streams: int) -> None:
        while self.slot.receive_ready() is None:
            await asyncio.sleep(0.01)
        self.front_end.engine_up([(RANK, ready_map(0))], facts_of(self._options))
        self.clients = [Client(self.front_end, self.random) for _ in range(clients)]
        await self.front_end.context.text.tokenizer()
        for number in range(streams):
            stream = Stream(number)
            self.streams.append(stream)
            self.clients[number % clients].ask(
                stream, SPEECH[stream.kind].request(stream.name, prompt(number, 2), 100_000)
            )
        for client in self.clients:
            client.write()
        while len(self.front_end.engine.table) < streams:
            await asyncio.sleep(0)
        # The first id of a prompt says whose it is.
        for kind, content in self.slot.sent:
            if kind == b"\x00":
                self.running[content[0]] = self.streams[content[1][0]]

    def token(self, stream: Stream) -> int:
        if stream.kind == SEARCHED:
            return self.random.choice(self.characters.ids)
        return self.random.choice(LARGE_IDS) if self.random.random() < 0.003 else self.random.randrange(50_000)

    def step(self, *, ending: bool = False) -> Any:
        """One message of the engine: one token for each running request, or none, or more."""
        parts, random_ = [], self.random
        if ending:
            # The end of all, some by their stop string.
            for wire_id, stream in self.running.items():
                tokens = [self.stop_id if stream.stops else 7]
                stream.tokens += tokens
                parts.append((wire_id, tokens, {} if stream.stops else self._last))
            self.running.clear()
        for wire_id, stream in list(self.running.items()):
            chance = random_.random()
            if stream.cancelled:
                del self.running[wire_id]
            elif chance < 0.9:
                tokens = [self.token(stream) for _ in range(1 if chance > 0.01 else 3)]
                stream.tokens += tokens
                parts.append((wire_id, tokens, {}))
            elif chance < 0.902 and not stream.lasts:
                stream.tokens.append(9)
                del self.running[wire_id]
                parts.append((wire_id, [9], self._last))
        encoded = [
            self._encoder.prefix(wire_id) + bytes((0x90 | len(tokens),)) + b"".join(map(encode, tokens)) + tail
            for wire_id, tokens, fields in parts
            for tail in (self._encoder.tail(fields),)
        ]
        return self.front_end.engine._codec.step([self._encoder.message(0.0, {}, encoded, len(encoded))])

    def deliver(self, steps: list[Any]) -> None:
        """As the engine's reader does."""
        server = self.front_end.server
        server.cork()
        self.front_end.engine.table.deliver(steps)
        server.flush()

    def disturb(self, client: Client) -> None:
        """What a client may do between two steps."""
        random_ = self.random
        live = client.live()
        for stream_id in live:
            if random_.random() < 0.15:
                client.grant(stream_id, random_.choice((1, 19, 33, 60, 200, 1000)))
        if random_.random() < 0.3:
            client.grant(0, random_.choice((1, 100, 500, 2000, 8000)))
        if random_.random() < 0.05:
            client.resize(random_.choice((0, 20, 100, 300, 301, 900)))
        chosen = random_.choice(live) if live and random_.random() < 0.004 else 0
        if chosen and not client.streams[chosen].lasts:
            client.cancel(chosen)
        client.write()
        if random_.random() < 0.7:
            client.read(random_.choice((1, 10, 100, 1000, 50_000)))

    async def close(self) -> None:
        for client in self.clients:
            client.pipe.abort()
        await self.front_end.close()
        self._dealer.close(0)
        self._context.destroy(0)


def _die(reason: str) -> None:
    raise RuntimeError(reason)


@pytest.fixture
async def stage_of(tiny_llama: Path) -> AsyncIterator[Callable[[int], Stage]]:
    """Makes stages by their seed."""
    stages: list[Stage] = []
    with TemporaryDirectory(prefix="strict-") as folder:

        def make(seed: int) -> Stage:
            stages.append(Stage(Path(folder), tiny_llama, random.Random(seed)))
            return stages[-1]

        yield make
        for stage in stages:
            await stage.close()


class Flown:
    """How often each call went the express way, and how many chunks did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.boardings: Counter[str] = Counter()
        self.chunks = 0
        self.full = 0
        board, express = Outflow.board, Outflow.express

        def counting_board(outflow: Outflow, flight: Flight) -> bytes | None:
            header = board(outflow, flight)
            self.boardings[flight.name] += header is not None
            told = flight.on_full

            def on_full(full: Flight) -> None:
                self.full += 1
                told(full)

            flight.on_full = on_full
            return header

        def counting_express(outflow: Outflow, chunks: bytes, count: int) -> None:
            self.chunks += count
            express(outflow, chunks, count)

        monkeypatch.setattr(Outflow, "board", counting_board)
        monkeypatch.setattr(Outflow, "express", counting_express)


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6])
async def test_every_stream_is_whole_through_windows_that_never_suffice(
    stage_of: Callable[[int], Stage], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    flown, stage = Flown(monkeypatch), stage_of(seed)
    await stage.start(clients=4, streams=56)
    table = stage.front_end.engine.table
    for _ in range(300):
        waiting = 1 if stage.random.random() < 0.8 else stage.random.randrange(2, 5)
        stage.deliver([stage.step() for _ in range(waiting)])
        for client in stage.clients:
            stage.disturb(client)
        await asyncio.sleep(0)
    stage.deliver([stage.step(ending=True)])
    calls: list[Call] = [call for client in stage.clients for call in client.connection.calls.values()]
    for _ in range(10_000):
        if not any(client.live() for client in stage.clients):
            break
        for client in stage.clients:
            for stream_id in client.live():
                client.grant(stream_id, 400)
            client.grant(0, 3000)
            client.write()
            client.read(2000)
        await asyncio.sleep(0)
    whole = [stream for stream in stage.streams if not stream.cancelled]
    assert len(whole) >= 40 and all(stream.closed for stream in whole)
    assert [stream.trailers for stream in whole] == [{"grpc-status": "0"}] * len(whole)
    for stream in whole:
        replies, tokens = stream.replies(), []
        if stream.kind == BARE:
            head, *replies = replies
            assert head.HasField("prompt_info")
            for reply in replies:
                tokens += reply.outputs.token_ids
                assert reply.outputs.num_tokens == len(reply.outputs.token_ids)
            ends = [reply.outputs.HasField("finish_info") for reply in replies]
            assert replies[-1].outputs.finish_info.num_output_tokens == len(tokens)
        else:
            for reply in replies[:-1]:
                tokens += reply.chunk.token_ids
                assert reply.chunk.completion_tokens == len(tokens)
                assert reply.chunk.prompt_tokens == 2
            ends = [reply.WhichOneof("response") == "complete" for reply in replies]
            assert list(replies[-1].complete.output_ids) == tokens
        assert ends == [False] * (len(replies) - 1) + [True], "not exactly one terminal, at the end"
        assert tokens == stream.tokens
    stopped = [s.replies()[-1].complete for s in whole if s.stops and s.tokens[-1] == stage.stop_id]
    assert stopped and {complete.matched_stop_str for complete in stopped} == {"Z"}
    # The express way was gone, left and gone again, because of a window and for other reasons.
    assert flown.chunks > 2000
    assert flown.full > 0
    assert len(flown.boardings) > 50
    assert sum(count >= 3 for count in flown.boardings.values()) > 40
    assert sum(client.pipe.pauses for client in stage.clients) > 0
    assert sum(client.settings_sent for client in stage.clients) > 20
    # Nothing is left of any of them.
    assert len(table) == 0 and not table._live and not table._express and not table._watched
    for client in stage.clients:
        outflow = client.connection.outflow
        assert not client.connection.calls and not outflow.waiting and not outflow._flights
        assert outflow.step_bytes == 0
        assert outflow.window == client.h2.inbound_flow_control_window
    assert not any(call.unsent for call in calls)
