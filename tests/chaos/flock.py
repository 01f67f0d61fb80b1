"""Many streams at once that never stop: each generates, checks every token, and begins again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from bridge.plugins.sim.tokens import expected_tokens

CALL_LIMIT_S = 60.0
PROMPT_SIZE = 16

NO_RETRIES = (("grpc.enable_retries", 0),)


@dataclass(frozen=True)
class Ended:
    """One call: `kind` is whole, refused (no token came, the client may try again), cut (tokens came, the end did not), or
    hung. `code` is the gRPC status, times are of `time.monotonic`."""

    kind: str
    code: str
    began: float
    ended: float
    detail: str = ""


@dataclass
class Flock:
    """`streams` continuous streams of `tokens` tokens, and up to half as many more, over `channels` connections.

    Use as an async context manager.
    """

    address: str
    streams: int = 64
    tokens: int = 20
    channels: int = 4
    pause_s: float = 0.25
    """Between a call that failed and the next."""
    exact: bool = True
    """The engine is the simulated one with its own vocabulary, so every token is known."""
    vocabulary: int = 30000
    ends: list[Ended] = field(default_factory=list)
    running: dict[int, float] = field(default_factory=dict)
    """Calls in flight, by number, and when they began."""

    async def __aenter__(self) -> Flock:
        self._numbers = itertools.count()
        self._stopping = False
        self._channels = [
            grpc.aio.insecure_channel(self.address, options=[*NO_RETRIES, ("grpc.use_local_subchannel_pool", 1)])
            for _ in range(self.channels)
        ]
        self._tasks = [asyncio.ensure_future(self._stream(number)) for number in range(self.streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close(None)

    async def stop(self) -> None:
        """Let every stream end the call it is in."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def flows(self, calls: int = 64, within_s: float = 30.0) -> None:
        """Until that many more calls have ended whole, and all streams are in one."""
        start = self.count("whole")
        async with asyncio.timeout(within_s):
            while self.count("whole") < start + calls or len(self.running) < self.streams:
                await asyncio.sleep(0.02)

    def count(self, kind: str) -> int:
        return sum(one.kind == kind for one in self.ends)

    def since(self, when: float) -> list[Ended]:
        return [one for one in self.ends if one.ended >= when]

    def counts(self) -> Counter[str]:
        return Counter(f"{one.kind} {one.code}" for one in self.ends)

    async def broken_within(self, when: float, limit_s: float) -> float:
        """Until every call that was in flight at `when` has ended; seconds from then to the last of those ends."""
        async with asyncio.timeout(limit_s):
            while any(began <= when for began in self.running.values()):
                await asyncio.sleep(0.01)
        ends = [one.ended for one in self.ends if one.began <= when <= one.ended]
        return max(ends, default=when) - when

    async def served_again(self, when: float, limit_s: float) -> float:
        """Seconds from `when` until a call that began after it has ended whole."""
        async with asyncio.timeout(limit_s):
            while True:
                whole = [one.ended for one in self.ends if one.began > when and one.kind == "whole"]
                if whole:
                    return min(whole) - when
                await asyncio.sleep(0.01)

    async def _stream(self, number: int) -> None:
        stub = pb_grpc.VllmEngineStub(self._channels[number % self.channels])
        while not self._stopping:
            call = next(self._numbers)
            self.running[call] = time.monotonic()
            try:
                ended = await self._call(stub, call)
            finally:
                began = self.running.pop(call)
            self.ends.append(ended)
            if ended.kind != "whole":
                await asyncio.sleep(max(0.0, began + self.pause_s - time.monotonic()))

    async def _call(self, stub: pb_grpc.VllmEngineStub, call: int) -> Ended:
        tokens = self.tokens + call * 7 % (self.tokens // 2)
        prompt = [(call * 7919 + place * 104729) % self.vocabulary + 100 for place in range(PROMPT_SIZE)]
        prompt = [token % self.vocabulary or 5 for token in prompt]
        request = pb.GenerateRequest(
            request_id=f"flock-{call}",
            tokenized=pb.TokenizedInput(input_ids=prompt),
            sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
            stream=True,
        )
        began = time.monotonic()
        got: list[int] = []
        complete: pb.GenerateComplete | None = None
        try:
            async with asyncio.timeout(CALL_LIMIT_S):
                async for answer in stub.Generate(request):
                    if answer.HasField("chunk"):
                        got.extend(answer.chunk.token_ids)
                    else:
                        complete = answer.complete
        except TimeoutError:
            return Ended("hung", "", began, time.monotonic())
        except grpc.aio.AioRpcError as error:
            kind = "cut" if got else "refused"
            return Ended(kind, error.code().name, began, time.monotonic(), error.details() or "")
        now = time.monotonic()
        if complete is None or complete.finish_reason != "length":
            return Ended("cut", "OK", began, now, "no terminal" if complete is None else complete.finish_reason)
        answer_ids = list(complete.output_ids)
        if got != answer_ids or (self.exact and answer_ids != expected_tokens(prompt, tokens)):
            return Ended("cut", "OK", began, now, f"{len(got)} tokens streamed, {len(answer_ids)} in the terminal")
        return Ended("whole", "OK", began, now)


@contextlib.asynccontextmanager
async def one_stream(address: str, request_id: str, tokens: int) -> AsyncIterator[Any]:
    """A stream of its own connection whose first chunk has come; cancelled on the way out."""
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = pb_grpc.VllmEngineStub(channel).Generate(
            pb.GenerateRequest(
                request_id=request_id,
                tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]),
                sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
                stream=True,
            )
        )
        await call.read()
        yield call
        call.cancel()
