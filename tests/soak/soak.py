"""The load of the soak, and the slopes of what it measures."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from tests.chaos.served import Served

STREAMS = 48
FIRST_S = 20.0
"""Of short calls, thousands of them: what remembers the last N of something is full after that."""
WARM_SHARE = 0.25
"""Of the time, before anything is measured: allocators find their size."""
SAMPLE_S = 1.0
SLOPE_LIMIT = 1.0
"""Megabytes a minute."""
PARTS = {"supervisor": "bridge serve", "front end": "bridge.frontend"}


@dataclass
class Report:
    """Samples by part: (seconds, resident megabytes). Descriptors are counted idle, before and after the load."""

    seconds: float = 0.0
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {part: [] for part in PARTS})
    descriptors: dict[str, tuple[int, int]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)
    """Generations in the engine after everybody has gone."""

    def slope(self, part: str) -> float:
        """Megabytes a minute, by least squares."""
        points = self.memory[part]
        count = len(points)
        mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        return 60 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0

    def passed(self) -> bool:
        slopes = all(self.slope(part) < SLOPE_LIMIT for part in PARTS)
        return slopes and all(before == after for before, after in self.descriptors.values()) and not self.left

    def text(self) -> str:
        lines = [f"{self.seconds:.0f} s, {sum(self.ends.values())} calls: {dict(self.ends)}"]
        for part in PARTS:
            before, after = self.descriptors[part]
            lines.append(
                f"{part}: {self.memory[part][-1][1]:.1f} MB, {self.slope(part):+.2f} MB/min "
                f"(limit {SLOPE_LIMIT:g}); descriptors {before} before, {after} after"
            )
        lines.append(f"left in the engine: {len(self.left)}")
        return "\n".join(lines)


async def run(folder: Path, seconds: float) -> Report:
    """Load for that long; then everybody goes, and what is left is counted."""
    report = Report(seconds)
    with Served(folder, step_ms=20) as served:
        served.wait_until_serving(30)
        served.channel.close()
        load = Load(served.address, report.ends)
        await load.run(FIRST_S, longest=2)
        before = await descriptors(served)
        began = time.monotonic()
        sampling = asyncio.ensure_future(sample(served, report, began + WARM_SHARE * seconds))
        await load.run(seconds)
        sampling.cancel()
        after = await descriptors(served)
        report.descriptors = {part: (before[part], after[part]) for part in PARTS}
        state = served.engine_state()
        report.left = [*state["running_ids"], *state["waiting_ids"]]
    return report


async def sample(served: Served, report: Report, start: float) -> None:
    await asyncio.sleep(max(0.0, start - time.monotonic()))
    processes = {part: served.part(words) for part, words in PARTS.items()}
    while True:
        now = time.monotonic()
        for part, process in processes.items():
            report.memory[part].append((now, process.memory_info().rss / 2**20))
        await asyncio.sleep(SAMPLE_S)


async def descriptors(served: Served) -> dict[str, int]:
    """Once connections are closed."""
    await asyncio.sleep(2.0)
    return {part: served.part(words).num_fds() for part, words in PARTS.items()}


class Load:
    """`STREAMS` clients, each of which does one thing after the other."""

    def __init__(self, address: str, ends: Counter[str]) -> None:
        self._address = address
        self._ends = ends
        self._numbers = itertools.count()
        self._longest = 0

    async def run(self, seconds: float, longest: int = 60) -> None:
        """Calls of up to `longest` tokens and a few more, for that long."""
        self._longest = longest
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._client(number, until) for number in range(STREAMS)))

    async def _client(self, number: int, until: float) -> None:
        while time.monotonic() < until:
            async with grpc.aio.insecure_channel(
                self._address, options=[("grpc.use_local_subchannel_pool", 1)]
            ) as channel:
                stub = pb_grpc.VllmEngineStub(channel)
                for _ in range(5 + number % 20):
                    if time.monotonic() >= until:
                        break
                    await self._one(stub)

    async def _one(self, stub: pb_grpc.VllmEngineStub) -> None:
        number = next(self._numbers)
        kind = ("stream", "unary", "cancelled", "aborted", "refused", "stream", "logprobs", "samples")[number % 8]
        params = pb.SamplingParams(temperature=0.0, max_tokens=2 + number % self._longest, ignore_eos=True)
        request = pb.GenerateRequest(
            request_id=f"soak-{number}",
            tokenized=pb.TokenizedInput(
                input_ids=[5 + (number * 31 + place) % 1000 for place in range(1 + number % 300)]
            ),
            sampling_params=params,
            stream=kind != "unary",
        )
        if kind == "refused":
            params.temperature = -1.0
        if kind == "logprobs":
            params.stop.append("never to be found")
        if kind == "samples":
            params.n, params.temperature = 2, 1.0
        try:
            await self._talk(stub, request, kind)
            self._ends[kind] += 1
        except grpc.aio.AioRpcError as error:
            self._ends[f"{kind}: {error.code().name}"] += 1

    async def _talk(self, stub: pb_grpc.VllmEngineStub, request: pb.GenerateRequest, kind: str) -> None:
        call = stub.Generate(request)
        if kind == "cancelled":
            await call.read()
            call.cancel()
            return
        if kind == "aborted":
            await call.read()
            await stub.Abort(pb.AbortRequest(request_ids=[request.request_id]))
        while await call.read() is not grpc.aio.EOF:
            pass
