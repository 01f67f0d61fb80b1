"""A front end of ours in this process, and a scheduler that says what a test tells it to, on the real lane."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import zmq
import zmq.asyncio
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as pb_grpc

from bridge.frontend import FrontEnd
from bridge.wire.companion import Facts
from bridge.wire.handshake import identity_of
from bridge.wire.link import Slot, slot_addresses
from tests.wire.sglang.recorded import VECTORS, ready_of

VERSION = "0.5.23"
DECLARED = VECTORS[VERSION]["declared"]
VOCABULARY = 1 << 21
CONTEXT = 4096

FACTS = Facts(
    engine="sglang",
    engine_version=VERSION,
    bridge_version="0",
    model_path="models/tiny",
    tokenizer_path="models/tiny",
    served_model_name="tiny",
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=VOCABULARY,
    max_model_len=CONTEXT,
    eos_token_ids=[2],
    default_sampling={"temperature": 0.6, "top_p": 0.95},
    server_args={"model_path": "models/tiny", "enable_return_hidden_states": True, "max_running_requests": None},
)

Row = dict[str, Any]


class Scripted:
    """The scheduler's end of one rank's sockets, and what arrived there."""

    def __init__(self, context: zmq.asyncio.Context, slot: Slot, rank: int) -> None:
        self.rank = rank
        self._input: Any = context.socket(zmq.DEALER)
        self._input.setsockopt(zmq.IDENTITY, identity_of(rank))
        self._input.connect(slot.input_address)
        self._output: Any = context.socket(zmq.PUSH)
        self._output.connect(slot.output_address)

    async def hello(self) -> None:
        await self._input.send(msgspec.msgpack.encode({"vllm_version": f"sglang-{VERSION}"}))

    async def frames(self) -> list[bytes]:
        """The next message of the front end."""
        async with asyncio.timeout(10):
            received: list[bytes] = await self._input.recv_multipart()
        return received

    async def request(self) -> Row:
        """The next ADD by field name, its sampling values under `sampling_params` likewise."""
        kind, payload, *_ = await self.frames()
        assert kind == b"\x00", (kind, payload)
        tag, *values = msgspec.msgpack.decode(payload)
        fields = dict(zip(DECLARED[tag], values, strict=False))
        fields["sampling_params"] = dict(zip(DECLARED["SamplingParams"], fields["sampling_params"], strict=False))
        return fields

    async def call(self) -> tuple[int, str, list[Any]]:
        """The next control call."""
        kind, payload = await self.frames()
        assert kind == b"\x02", kind
        call_id, method, args = msgspec.msgpack.decode(payload)
        return call_id, method, args

    async def aborted(self) -> list[str]:
        kind, payload = await self.frames()
        assert kind == b"\x01", kind
        ids: list[str] = msgspec.msgpack.decode(payload)
        return ids

    async def say(self, *rows: Row, **load: int) -> None:
        """One batch of tokens: a row has `rid`, `ids`, `reason` and any later column by its name."""
        count = len(rows)

        def column(name: str, default: Any) -> list[Any]:
            return [row.get(name, default) for row in rows]

        def optional(name: str) -> list[Any] | None:
            return column(name, []) if any(name in row for row in rows) else None

        message: list[Any] = [
            "BatchTokenIDSlimOutput",
            column("rid", ""),
            column("ids", []),
            column("reason", ""),
            column("message", None),
            column("matched", None),
            column("prompt_tokens", 0),
            column("completion_tokens", 0),
            column("cached_tokens", 0),
            column("output_token_logprobs_val", []),
            column("output_token_logprobs_idx", []),
            self.rank,
            *(load.get(name, 0) for name in ("running", "waiting", "kv_used", "kv_total")),
            column("status", None),
            optional("output_top_logprobs_val"),
            optional("output_top_logprobs_idx"),
            column("reasoning_tokens", 0),
            optional("input_token_logprobs_val"),
            optional("input_token_logprobs_idx"),
            optional("input_top_logprobs_val"),
            optional("input_top_logprobs_idx"),
            optional("output_token_ids_logprobs_val"),
            optional("output_token_ids_logprobs_idx"),
            column("err_type", None),
            column("hidden", None) if any("hidden" in row for row in rows) else None,
        ]
        assert all(len(one) == count for one in message[1:11])
        await self.raw(msgspec.msgpack.encode(message))

    async def raw(self, *frames: bytes) -> None:
        await self._output.send_multipart(frames)

    async def reply(self, call_id: int, success: bool, message: str | None = None) -> None:
        await self.raw(msgspec.msgpack.encode(["ControlReplySlim", call_id, success, message, self.rank]))

    def close(self) -> None:
        self._input.close(0)
        self._output.close(0)


class Stage:
    """A served front end: `stub` asks it, `engine` is its scheduler, `engines` all ranks of it."""

    def __init__(self, front_end: FrontEnd, stub: pb_grpc.SglangSchedulerStub, engines: Sequence[Scripted]) -> None:
        self.front_end = front_end
        self.stub = stub
        self.engines = engines
        self.deaths: list[str] = []

    @property
    def engine(self) -> Scripted:
        return self.engines[0]

    def generate(self, ids: Sequence[int] = (1, 2, 3), **given: Any) -> Any:
        """A Generate call; `sampling` are the fields of SamplingParams."""
        params = pb.SamplingParams(**given.pop("sampling", {}))
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=params, **{"stream": True, **given}
        )
        return self.stub.Generate(request, timeout=20)


@asynccontextmanager
async def stage(folder: Path, *, facts: Facts = FACTS, ranks: int = 1, **ready: Any) -> AsyncIterator[Stage]:
    """A front end on loopback that an engine of `ranks` ranks has come up for."""
    theirs = zmq.asyncio.Context()
    slot = Slot(0, *slot_addresses(folder, 0))
    deaths: list[str] = []
    front_end = FrontEnd(
        "sglang",
        slot,
        incarnation=1,
        contracts=["sglang.grpc.scheduler"],
        options={},
        on_death=deaths.append,
    )
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    engines = [Scripted(theirs, slot, rank) for rank in range(ranks)]
    try:
        await front_end.server.serve(listening)
        for engine in engines:
            await engine.hello()
        for _ in engines:
            while slot.receive_ready() is None:
                await asyncio.sleep(0.005)
        whole = ready_of(VERSION, max_model_len=CONTEXT, kv_cache_size_tokens=1000, max_num_seqs=8, **ready)
        front_end.engine_up([(identity_of(engine.rank), whole) for engine in engines], facts)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            made = Stage(front_end, pb_grpc.SglangSchedulerStub(channel), engines)
            made.deaths = deaths
            yield made
    finally:
        await front_end.close()
        for engine in engines:
            engine.close()
        theirs.destroy(0)
