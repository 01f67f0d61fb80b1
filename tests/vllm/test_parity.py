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
ENDING = {
    "greedy": (
        "What is the internet?",
        "What is the purpose of a heart?",
        "What is an atom?",
        "What is bread made of?",
        "Why is the sky blue?",
    ),
    "seeded": (
        "Write a short poem about the moon.",
        "Describe a cat in three sentences.",
        "What is gravity?",
        "Summarize the water cycle.",
        "What causes rain?",
    ),
}
"""Questions whose answers end on EOS after 64 tokens or more."""
SEEDS = dict(zip(map(chat_text, ENDING["seeded"]), (1005, 1007, 1000, 1017, 1004), strict=True))
"""With these seeds."""
EOS = 2


def through_vllm(base: str, ids: list[int], sampling: dict[str, float]) -> tuple[object, ...]:
    reply = post_json(f"{base}/v1/completions", {"prompt": ids, "return_token_ids": True, **sampling})
    choice, usage = reply["choices"][0], reply["usage"]
    return choice["token_ids"], choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


def through_bridge(worker: Worker, ids: list[int], sampling: dict[str, float]) -> tuple[object, ...]:
    params = pb.SamplingParams(**sampling)
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=params, stream=True)
    chunks: list[int] = []
    for reply in worker.stub.Generate(request, timeout=120):
        chunks.extend(reply.chunk.token_ids)
    done = reply.complete
    assert chunks == list(done.output_ids), "the chunks do not add up to the output"
    return list(done.output_ids), done.finish_reason, done.prompt_tokens, done.completion_tokens


@pytest.mark.parametrize("mode", ["greedy", "seeded"])
def test_tokens_finish_and_usage_equal(vllm_http: str, served: Worker, tokenizer: Tokenizer, mode: str) -> None:
    cases = [(prompt, {"max_tokens": 64, "min_tokens": 64}) for prompt in OPEN_ENDED]
    cases += [(chat_text(question), {"max_tokens": 260}) for question in ENDING[mode]]
    ended = 0
    for number, (prompt, limits) in enumerate(cases):
        ids = tokenizer.encode(prompt).ids
        if mode == "greedy":
            sampling = {**limits, "temperature": 0.0}
        else:
            sampling = {**limits, "temperature": 0.9, "top_p": 0.95, "seed": SEEDS.get(prompt, number)}
        expected = through_vllm(vllm_http, ids, sampling)
        assert through_bridge(served, ids, sampling) == expected, f"case {number}: {prompt!r}"
        tokens = expected[0]
        assert isinstance(tokens, list) and len(tokens) >= 64, f"case {number} has {len(tokens)} tokens"
        ended += expected[1] == "stop" and tokens[-1] == EOS
    assert ended >= 5, f"only {ended} answers ended on EOS"
