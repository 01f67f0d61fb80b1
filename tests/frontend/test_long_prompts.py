"""Long prompts are prepared in pieces: every id arrives, others are served in between, and what ends early sends nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import msgpack
import msgspec
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from bridge import prompt
from bridge.contracts.proto import message
from bridge.plugins.sim.model import facts_of
from bridge.plugins.sim.options import parse
from bridge.prompt import LONG, PIECE, LongPrompt
from tests.fuzz.captured import Captured

CONTRACTS = ("vllm.grpc.engine", "vllm.Inference", "vllm.engine.v1")
VOCABULARY, CONTEXT = 151_936, 200_000
PROMPT_IDS = 1
"""Position in an EngineCoreRequest (vLLM 0.33)."""


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Captured]:
    options = parse(["--max-model-len", str(CONTEXT), "--vocab-size", str(VOCABULARY)])
    facts = msgspec.structs.replace(facts_of(options), engine_version="0.33.0")
    async with Captured(tmp_path, facts, contracts=CONTRACTS) as captured:
        yield captured
        assert captured.front_end.server.stats.buffered_bytes == 0
        assert not captured.front_end.server.waiting
        assert captured.front_end.engine.active_requests == 0


@pytest.fixture
async def channel(served: Captured) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as made:
        yield made


@pytest.fixture
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt takes thousands of turns."""
    monkeypatch.setattr(prompt, "PIECE", 1)


def ids_of(count: int) -> list[int]:
    """Ids of every width, the limits among them."""
    return random.Random(count).choices([0, 127, 128, 255, 256, 16383, 16384, 65535, 65536, VOCABULARY - 1], k=count)


def engine_request(ids: list[int], **fields: Any) -> pb.GenerateRequest:
    params = fields.pop("sampling_params", pb.SamplingParams(max_tokens=1))
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=params, stream=True, **fields)


async def generate(channel: grpc.aio.Channel, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [reply async for reply in pb_grpc.VllmEngineStub(channel).Generate(request, timeout=20)]


async def inference(channel: grpc.aio.Channel, ids: list[int]) -> None:
    request = message("vllm.GenerateRequest")(
        token_ids={"ids": ids}, stopping={"max_new_tokens": 1}, response={"output_text": False}
    )
    call: Any = channel.unary_stream("/vllm.Inference/GenerateStream")
    assert [reply async for reply in call(request.SerializeToString(), timeout=20)]


async def engine_v1(channel: grpc.aio.Channel, ids: list[int]) -> None:
    request = message("vllm.engine.v1.GenerateRequest")(prompt_token_ids=ids, sampling_params={"max_tokens": 1})
    call: Any = channel.unary_stream("/vllm.engine.v1.VllmEngine/GenerateStream")
    assert [reply async for reply in call(request.SerializeToString(), timeout=20)]


async def engine(channel: grpc.aio.Channel, ids: list[int]) -> None:
    assert await generate(channel, engine_request(ids))


def prompts(served: Captured) -> list[list[int]]:
    """What the engine got."""
    return [msgpack.unpackb(add, strict_map_key=False)[PROMPT_IDS] for add in served.peer.adds()]


@pytest.mark.parametrize("ask", [engine, inference, engine_v1])
@pytest.mark.parametrize("count", [LONG, LONG + 1, LONG + PIECE, 5 * PIECE + 1, 5 * PIECE + 20, 100_000])
async def test_every_id_arrives(
    served: Captured, channel: grpc.aio.Channel, ask: Callable[..., Awaitable[None]], count: int
) -> None:
    ids = ids_of(count)
    await ask(channel, ids)
    assert prompts(served) == [ids]


async def test_every_sample_has_them(served: Captured, channel: grpc.aio.Channel) -> None:
    ids, short = ids_of(50_000), ids_of(3)
    for prompt_ids in (ids, short):
        params = pb.SamplingParams(max_tokens=1, n=3, temperature=1.0)
        await generate(channel, engine_request(prompt_ids, sampling_params=params))
    assert prompts(served) == [ids] * 3 + [short] * 3


@pytest.mark.parametrize("kept", [-1, 2, LONG + 7, CONTEXT])
async def test_the_last_of_them_arrive_when_it_is_truncated(
    served: Captured, channel: grpc.aio.Channel, kept: int
) -> None:
    ids = ids_of(CONTEXT + 10 if kept == -1 else 60_000)
    params = pb.SamplingParams(max_tokens=1, truncate_prompt_tokens=kept)
    await generate(channel, engine_request(ids, sampling_params=params))
    assert prompts(served) == [ids[-(CONTEXT - 1 if kept == -1 else kept) :]]


@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 70_000])
async def test_an_id_outside_the_vocabulary_is_named(served: Captured, channel: grpc.aio.Channel, at: int) -> None:
    ids = ids_of(70_001)
    ids[at] = VOCABULARY
    with pytest.raises(grpc.aio.AioRpcError, match=rf"input_ids\[{at}\] is {VOCABULARY}") as caught:
        await generate(channel, engine_request(ids))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert prompts(served) == []


async def test_more_than_the_context_holds_is_refused(served: Captured, channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=f"input_ids has {CONTEXT} tokens") as caught:
        await generate(channel, engine_request(ids_of(CONTEXT)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert prompts(served) == []


async def being_prepared(served: Captured) -> None:
    while not served.front_end.context.guard._turn.locked():
        await asyncio.sleep(0)


@pytest.mark.usefixtures("tiny_pieces")
async def test_others_are_served_while_it_is_prepared(served: Captured, channel: grpc.aio.Channel) -> None:
    ids = ids_of(CONTEXT - 1)
    long = asyncio.ensure_future(generate(channel, engine_request(ids)))
    await being_prepared(served)
    await generate(channel, engine_request([1, 2, 3]))
    assert prompts(served) == [[1, 2, 3]], "the short request waited for the long one"
    await long
    assert prompts(served) == [[1, 2, 3], ids]


async def test_a_turn_has_one_piece(served: Captured, channel: grpc.aio.Channel) -> None:
    """Of all long prompts together."""
    pieces, turns, most = 0, 0, 0
    guard = served.front_end.context.guard
    check = guard._check_ids

    def count(*args: Any) -> None:
        nonlocal pieces
        pieces += 1
        check(*args)

    guard._check_ids = count  # type: ignore[assignment]
    calls = [asyncio.ensure_future(generate(channel, engine_request(ids_of(100_000)))) for _ in range(4)]
    while not all(call.done() for call in calls):
        before = pieces
        await asyncio.sleep(0)
        turns, most = turns + 1, max(most, pieces - before)
    assert pieces == 4 * -(-100_000 // PIECE)
    assert most == 1 and turns >= pieces
    assert prompts(served) == [ids_of(100_000)] * 4


async def cancelled(call: Any, channel: grpc.aio.Channel) -> None:
    call.cancel()


async def disconnected(call: Any, channel: grpc.aio.Channel) -> None:
    await channel.close()


async def expired(call: Any, channel: grpc.aio.Channel) -> None:
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.usefixtures("tiny_pieces")
@pytest.mark.parametrize("end", [cancelled, disconnected, expired])
async def test_what_ends_while_it_is_prepared_is_not_sent(
    served: Captured, end: Callable[..., Awaitable[None]]
) -> None:
    server = served.front_end.server
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as leaving:
        call = pb_grpc.VllmEngineStub(leaving).Generate(
            engine_request(ids_of(CONTEXT - 1), request_id="long"), timeout=0.5 if end is expired else 20
        )
        await being_prepared(served)
        await end(call, leaving)
        while server.stats.calls_open:
            await asyncio.sleep(0.01)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        await generate(channel, engine_request([4, 5], request_id="long"))
    assert prompts(served) == [[4, 5]]
    assert sum(server.stats.cancelled.values()) == 1
    assert not served.front_end.context.guard._turn.locked()


@pytest.mark.usefixtures("tiny_pieces")
async def test_an_engine_that_ends_meanwhile_is_told(served: Captured, channel: grpc.aio.Channel) -> None:
    call = asyncio.ensure_future(generate(channel, engine_request(ids_of(CONTEXT - 1))))
    await being_prepared(served)
    served.front_end.engine_down("it was killed")
    with pytest.raises(grpc.aio.AioRpcError, match="it was killed") as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert prompts(served) == []


@pytest.mark.usefixtures("tiny_pieces")
async def test_a_drain_that_is_cut_ends_it(served: Captured, channel: grpc.aio.Channel) -> None:
    call = asyncio.ensure_future(generate(channel, engine_request(ids_of(CONTEXT - 1))))
    await being_prepared(served)
    await served.front_end.server.drain(0.0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert prompts(served) == []


def test_a_long_prompt_is_a_sequence() -> None:
    ids = list(range(100))
    made = LongPrompt(ids, 10, msgspec.Raw(b""), None)
    assert (len(made), made[0], made[-1], made[-5:], made[3:5]) == (90, 10, 99, ids[-5:], [13, 14])
    assert made[:] == ids[10:] and made[::-1] == ids[:9:-1] and list(made) == ids[10:]
    with pytest.raises(IndexError):
        made[90]
