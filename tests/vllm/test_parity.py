"""The same requests through vLLM's own HTTP server and through the bridge: token ids, finish reason and usage equal."""

from __future__ import annotations

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from tests.gateways import chat_text, post_json
from tests.running import Worker

OPEN_ENDED = (
    "The history of the lighthouse begins",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The three most important rules of cooking are",
    "In 1969, the crew of",
    "A binary search tree is",
    "Dear Sir or Madam,",
    "La capitale de la France",
    "1, 1, 2, 3, 5, 8,",
)
QUESTIONS = (
    "What is gravity?",
    "Why is the sky blue?",
    "Name three primary colors and describe each of them.",
    "Give me a short recipe for pancakes.",
    "What is photosynthesis?",
)
CASES = [(prompt, 64) for prompt in OPEN_ENDED] + [(chat_text(question), 400) for question in QUESTIONS]
EOS = 2


def through_vllm(base: str, ids: list[int], max_tokens: int, **sampling: object) -> tuple[object, ...]:
    reply = post_json(
        f"{base}/v1/completions", {"prompt": ids, "max_tokens": max_tokens, "return_token_ids": True, **sampling}
    )
    choice, usage = reply["choices"][0], reply["usage"]
    return choice["token_ids"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


def through_bridge(worker: Worker, ids: list[int], max_tokens: int, **sampling: object) -> tuple[object, ...]:
    params = pb.SamplingParams(max_tokens=max_tokens, **sampling)
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=params, stream=True)
    chunks: list[int] = []
    for reply in worker.stub.Generate(request, timeout=120):
        chunks.extend(reply.chunk.token_ids)
    done = reply.complete
    assert chunks == list(done.output_ids), "the chunks do not add up to the output"
    return list(done.output_ids), done.finish_reason, done.prompt_tokens, done.completion_tokens


@pytest.mark.parametrize(
    "sampling",
    [pytest.param({"temperature": 0.0}, id="greedy"), pytest.param({"temperature": 0.9, "top_p": 0.95}, id="seeded")],
)
def test_tokens_finish_and_usage_equal(
    vllm_http: str, served: Worker, tokenizer: Tokenizer, sampling: dict[str, float]
) -> None:
    ended = 0
    for number, (prompt, max_tokens) in enumerate(CASES):
        ids = tokenizer.encode(prompt).ids
        given = dict(sampling) if sampling["temperature"] == 0 else {**sampling, "seed": 1000 + number}
        expected = through_vllm(vllm_http, ids, max_tokens, **given)
        assert through_bridge(served, ids, max_tokens, **given) == expected, f"case {number}: {prompt!r}"
        tokens = expected[0]
        assert isinstance(tokens, list)
        ended += expected[1] == "stop" and tokens[-1] == EOS
        assert len(tokens) >= 64 or tokens[-1] == EOS, f"case {number} has only {len(tokens)} tokens"
    assert ended >= 3, f"only {ended} answers ended on EOS"
