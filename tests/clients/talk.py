"""What is said to the server in these tests, and whether the answer is right."""

from __future__ import annotations

import random
from collections.abc import Iterable

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.plugins.sim.tokens import expected_tokens
from tests.abuse.target import generate
from tests.clients.asking import PLAIN, Client, How

SERVICE = "/vllm.grpc.engine.VllmEngine/"
GENERATE = SERVICE + "Generate"


def prompt_of(size: int, seed: int = 0) -> list[int]:
    some = random.Random(seed)
    return [some.randrange(3, 32000) for _ in range(size)]


def request(prompt: list[int], tokens: int, *, stream: bool = True) -> bytes:
    return bytes(generate(prompt, tokens, stream=stream).SerializeToString())


def tokens_of(messages: Iterable[bytes]) -> list[int]:
    """The tokens of a streamed answer, each once; the terminal repeats them all."""
    tokens: list[int] = []
    complete = None
    for message in messages:
        reply = pb.GenerateResponse.FromString(message)
        assert complete is None, "a message after the terminal"
        if reply.HasField("complete"):
            complete = reply.complete
        else:
            tokens += reply.chunk.token_ids
            assert reply.chunk.completion_tokens == len(tokens)
    assert complete is not None, "no terminal"
    assert complete.finish_reason == "length"
    assert not tokens or list(complete.output_ids)[: len(tokens)] == tokens
    return list(complete.output_ids)


def must_generate(client: Client, how: How = PLAIN, *, size: int = 20, tokens: int = 300, stream: bool = True) -> int:
    """A generation gives the tokens that the engine made, all of them and in order; how many."""
    prompt = prompt_of(size)
    answer = client.stream(GENERATE, request(prompt, tokens, stream=stream), how)
    got = tokens_of(answer)
    assert got == expected_tokens(prompt, tokens)
    return len(got)


def healthy(client: Client, how: How = PLAIN) -> bool:
    reply = client.unary(SERVICE + "HealthCheck", b"", how)
    return bool(pb.HealthCheckResponse.FromString(reply).healthy)


def flush_cache(client: Client, wait_s: float, how: How = PLAIN) -> common_pb2.FlushCacheResponse:
    """A unary call that the server answers when the engine is idle, after `wait_s` at the latest."""
    message = common_pb2.FlushCacheRequest(timeout_s=wait_s).SerializeToString()
    return common_pb2.FlushCacheResponse.FromString(client.unary(SERVICE + "FlushCache", message, how))
