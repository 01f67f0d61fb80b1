"""Sampling params in the same words are checked once, and every request still gets what its own prompt leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgpack
import msgspec
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from bridge.contracts.vllm_engine import CHECKED
from bridge.guard import Guard
from bridge.plugins.sim.model import facts_of
from bridge.plugins.sim.options import parse
from tests.fuzz.captured import Captured

CONTEXT = 100
SAMPLING = 3
"""Position in an EngineCoreRequest (vLLM 0.33)."""


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Captured]:
    facts = facts_of(parse(["--max-model-len", str(CONTEXT)]))
    async with Captured(tmp_path, msgspec.structs.replace(facts, engine_version="0.33.0")) as captured:
        yield captured


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The room of every check of sampling values."""
    made: list[int] = []
    check = Guard.check_values

    def counted(self: Guard, room: int, *args: Any) -> Any:
        made.append(room)
        return check(self, room, *args)

    monkeypatch.setattr(Guard, "check_values", counted)
    return made


async def asked(served: Captured, tokens: int = 3, **params: Any) -> dict[str, Any]:
    """The sampling params that the engine gets for a prompt of so many tokens."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=[5] * tokens), sampling_params=pb.SamplingParams(**params)
        )
        assert [reply async for reply in pb_grpc.VllmEngineStub(channel).Generate(request, timeout=20)]
    found: dict[str, Any] = msgpack.unpackb(served.peer.adds()[-1], strict_map_key=False)[SAMPLING]
    return found


async def test_the_same_words_are_checked_once_and_mean_the_same(served: Captured, checks: list[int]) -> None:
    first = await asked(served, temperature=0.5, max_tokens=7, stop_token_ids=[9])
    assert (first["temperature"], first["max_tokens"], first["stop_token_ids"]) == (0.5, 7, [9])
    assert await asked(served, temperature=0.5, max_tokens=7, stop_token_ids=[9]) == first
    assert await asked(served, temperature=0.25, max_tokens=7, stop_token_ids=[9]) == {**first, "temperature": 0.25}
    assert await asked(served, temperature=0.5, max_tokens=7, stop_token_ids=[9]) == first
    assert len(checks) == 2


async def test_max_tokens_is_what_each_prompt_leaves(served: Captured) -> None:
    sent = [(await asked(served, tokens, max_tokens=50))["max_tokens"] for tokens in (10, 90, 50, 51, 10, 99)]
    assert sent == [50, 10, 50, 49, 50, 1]
    sent = [(await asked(served, tokens))["max_tokens"] for tokens in (10, 90, 10)]
    assert sent == [90, 10, 90]


async def test_min_tokens_that_do_not_fit_are_refused_though_they_were_known(served: Captured) -> None:
    await asked(served, 10, max_tokens=50, min_tokens=40)
    with pytest.raises(grpc.aio.AioRpcError, match="min_tokens is 40"):
        await asked(served, 70, max_tokens=50, min_tokens=40)


async def test_what_was_refused_is_refused_again(served: Captured) -> None:
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError, match="top_p"):
            await asked(served, max_tokens=5, top_p=2.0)
    assert not served.peer.adds()


async def test_samples_have_their_own_seeds_each_time(served: Captured) -> None:
    for _ in range(2):
        await asked(served, max_tokens=5, n=3, seed=7, temperature=1.0)
    adds = [msgpack.unpackb(add, strict_map_key=False) for add in served.peer.adds()]
    assert [add[SAMPLING]["seed"] for add in adds] == [7, 8, 9] * 2


async def test_few_are_kept_and_none_of_another_engine(served: Captured, checks: list[int]) -> None:
    for seed in range(CHECKED + 5):
        await asked(served, max_tokens=5, seed=seed)
    (contract,) = [
        method.handler.__self__  # type: ignore[union-attr]
        for path, method in served.front_end.server.methods.items()
        if path.endswith(b"VllmEngine/Generate")
    ]
    assert 0 < len(contract._checked) <= CHECKED
    served.front_end.context.engine_up()
    before = len(checks)
    await asked(served, max_tokens=5, seed=CHECKED + 4)
    assert len(checks) == before + 1
