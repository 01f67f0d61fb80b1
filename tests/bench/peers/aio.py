"""The least that serves vllm.grpc.engine with grpc.aio: `python -m tests.bench.peers.aio PORT HANDSHAKE_ADDRESS FOLDER`.

One handler coroutine a stream that an event wakes, and pyzmq's asyncio sockets; deltas that wait for a handler leave as
one message, as vLLM's own output collector merges them. No guard, no aborts, no errors: what it leaves out makes it
cheaper.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop
import zmq.asyncio
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from bridge.wire.codec import GenerateCall, Sampling
from bridge.wire.handshake import Handshake, HandshakeServer
from bridge.wire.vllm.codec import VllmCodec, from_ready


class Pending:
    """What a stream's handler has not taken yet."""

    __slots__ = ("arrived", "done", "tokens")

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.tokens: list[int] = []
        self.done = False


class Servicer(pb_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Generate on one rank."""

    def __init__(self, inputs: zmq.asyncio.Socket, codec: VllmCodec, rank: bytes) -> None:
        self._inputs = inputs
        self._codec = codec
        self._rank = rank
        self._streams: dict[str, Pending] = {}
        self._counter = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self._counter += 1
        wire_id = f"aio.{self._counter:x}"
        prompt = list(request.tokenized.input_ids)
        params = request.sampling_params
        sampling = Sampling(
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            eos_token_ids=[2],
        )
        call = GenerateCall(wire_id=wire_id, prompt_token_ids=prompt, sampling=sampling, arrival_time=time.time())
        pending = self._streams[wire_id] = Pending()
        await self._inputs.send_multipart([self._rank, *self._codec.add(call)])
        output: list[int] = []
        while not pending.done or pending.tokens:
            await pending.arrived.wait()
            pending.arrived.clear()
            tokens, pending.tokens = pending.tokens, []
            output += tokens
            chunk = pb.GenerateStreamChunk(token_ids=tokens, prompt_tokens=len(prompt), completion_tokens=len(output))
            yield pb.GenerateResponse(chunk=chunk)
        del self._streams[wire_id]
        complete = pb.GenerateComplete(
            output_ids=output, finish_reason="length", prompt_tokens=len(prompt), completion_tokens=len(output)
        )
        yield pb.GenerateResponse(complete=complete)

    async def read(self, outputs: zmq.asyncio.Socket) -> None:
        """Hand the engine's steps to the streams, for ever."""
        while True:
            for delta in self._codec.step(await outputs.recv_multipart()).outputs:
                pending = self._streams.get(delta.request_id)
                if pending is not None:
                    pending.tokens += delta.new_token_ids
                    pending.done = delta.finish_reason is not None
                    pending.arrived.set()


async def serve(port: str, address: str, folder: Path) -> None:
    context = zmq.asyncio.Context()
    inputs, outputs = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
    inputs.setsockopt(zmq.SNDHWM, 0)
    outputs.setsockopt(zmq.RCVHWM, 0)
    addresses = f"ipc://{folder}/ai", f"ipc://{folder}/ao"
    inputs.bind(addresses[0])
    outputs.bind(addresses[1])
    server = HandshakeServer(zmq.Context(), address)
    handshake = Handshake(inputs=[addresses[0]], outputs=[addresses[1]], rank_count=1)
    while not handshake.done:
        while (received := server.receive()) is not None:
            for reply in handshake.receive(*received):
                server.send(*reply)
        if await inputs.poll(10):
            handshake.receive_ready_map(*await inputs.recv_multipart())
    (state,) = handshake.ranks.values()
    grpc_server = grpc.aio.server()
    servicer = Servicer(inputs, from_ready(state.ready or {}, None, 0), state.identity)
    pb_grpc.add_VllmEngineServicer_to_server(servicer, grpc_server)
    grpc_server.add_insecure_port(f"127.0.0.1:{port}")
    await grpc_server.start()
    await servicer.read(outputs)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
