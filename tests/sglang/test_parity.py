"""The same requests through SGLang's own HTTP server and through the bridge, in float32: ids, ends, log-probabilities, usage.

Both servers get them in the same order with empty caches, so the prompt tokens that each finds in its cache are the same
too. The contract has no seed, so every case is greedy, or as good as.
"""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from tokenizers import Tokenizer

from tests.gateways import chat_text, post_json
from tests.running import Running, unused_port
from tests.sglang.engines import ENVIRONMENT, FLAGS
from tests.sglang.worker import SglangWorker

PROMPTS = {
    "france": chat_text("What is the capital of France?"),
    "story": "Once upon a time, in a village by the sea,",
    "unicode": "Le café du quartier était fermé, car l'été",
}
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
EBNF = 'root ::= "SELECT " column " FROM " table\ncolumn ::= "id" | "name"\ntable ::= "users" | "orders"'
TAG = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "only this"}})


@dataclass
class Case:
    """`sampling` and `request` read the same in both, but for what `grpc` has instead."""

    name: str
    prompt: str
    sampling: dict[str, Any]
    request: dict[str, Any] = field(default_factory=dict)
    grpc: dict[str, Any] = field(default_factory=dict)


def cases() -> Iterator[Case]:
    for prompt in PROMPTS:
        yield Case(f"greedy {prompt}", prompt, {"max_new_tokens": 16})
        yield Case(f"stops {prompt}", prompt, {"max_new_tokens": 20, "stop": [".", " a", "ee"]})
        yield Case(f"a stop that never comes {prompt}", prompt, {"max_new_tokens": 6, "stop": ["never to be seen"]})
        yield Case(f"stop id {prompt}", prompt, {"max_new_tokens": 16, "stop_token_ids": [28, 30, 216]})
        yield Case(
            f"penalties {prompt}", prompt, {"max_new_tokens": 12, "frequency_penalty": 1.5, "presence_penalty": -0.5}
        )
        yield Case(f"repetition {prompt}", prompt, {"max_new_tokens": 12, "repetition_penalty": 1.3})
        yield Case(f"min_new_tokens {prompt}", prompt, {"max_new_tokens": 14, "min_new_tokens": 12})
        yield Case(f"ignore_eos {prompt}", prompt, {"max_new_tokens": 14, "ignore_eos": True})
        yield Case(f"top_k 1 {prompt}", prompt, {"max_new_tokens": 8, "temperature": 0.8, "top_k": 1, "top_p": 0.9})
        yield Case(f"bias {prompt}", prompt, {"max_new_tokens": 8, "logit_bias": {"28": 4.0, "30": -100.0}})
        yield Case(f"n 2 {prompt}", prompt, {"max_new_tokens": 6, "n": 2})
        output_only = {"return_logprob": True, "logprob_start_len": -1}
        yield Case(f"logprobs {prompt}", prompt, {"max_new_tokens": 8}, output_only)
        yield Case(f"top logprobs {prompt}", prompt, {"max_new_tokens": 8}, {**output_only, "top_logprobs_num": 4})
        for start in (0, 3):
            asked = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2}
            yield Case(f"prompt logprobs from {start} {prompt}", prompt, {"max_new_tokens": 2}, asked)
        chosen = {**output_only, "token_ids_logprob": [5, 400]}
        yield Case(f"logprobs of chosen ids {prompt}", prompt, {"max_new_tokens": 4}, chosen)
        yield Case(f"scoring {prompt}", prompt, {"max_new_tokens": 0}, chosen)
    for prompt in ("france", "story"):
        yield Case(f"json_schema {prompt}", prompt, {"max_new_tokens": 30, "json_schema": SCHEMA})
        yield Case(f"regex {prompt}", prompt, {"max_new_tokens": 12, "regex": r"\d{3}-[a-f]{2}"})
        grammar = {"max_new_tokens": 16, "ebnf": EBNF}
        yield Case(f"ebnf {prompt}", prompt, grammar, grpc={"max_new_tokens": 16, "ebnf_grammar": EBNF})
        yield Case(f"structural_tag {prompt}", prompt, {"max_new_tokens": 12, "structural_tag": TAG})


CASES = list(cases())


@pytest.fixture(scope="module")
def http(sglang_python: Path, smollm2: Path, logs: Path) -> Iterator[str]:
    """SGLang's own HTTP server on the same model and flags; its base URL."""
    port = unused_port()
    command = [sglang_python, "-m", "sglang.launch_server", "--model-path", smollm2, "--port", port, *FLAGS]
    with Running([*command, "--host", "127.0.0.1"], logs / "sglang_http.log", ENVIRONMENT) as server:
        server.wait_for("fired up and ready to roll", 240)
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def pair(http: str, served: SglangWorker) -> tuple[str, SglangWorker]:
    """Both servers with empty caches."""
    with urllib.request.urlopen(urllib.request.Request(f"{http}/flush_cache", data=b""), timeout=30) as done:
        assert done.status == 200
    assert served.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5), timeout=30).success
    return http, served


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_answer(pair: tuple[str, SglangWorker], smollm2: Path, case: Case) -> None:
    base, served = pair
    ids = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(PROMPTS[case.prompt]).ids
    sampling = {"temperature": 0.0, **case.sampling}
    found = post_json(f"{base}/generate", {"input_ids": ids, "sampling_params": sampling, **case.request})
    theirs = found if isinstance(found, list) else [found]
    params = pb.SamplingParams(**({"temperature": 0.0, **case.grpc} if case.grpc else sampling))
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=params, stream=True, **case.request
    )
    replies = list(served.stub.Generate(request, timeout=120))
    ours = {reply.complete.index: reply.complete for reply in replies if reply.HasField("complete")}
    assert sorted(ours) == list(range(len(theirs)))
    for index, other in enumerate(theirs):
        same_end(ours[index], other, case)
        same_logprobs(ours[index], other["meta_info"], ids, case.request)
    if len(theirs) == 1:
        assert ours[0].cached_tokens == theirs[0]["meta_info"]["cached_tokens"]
        chunks = [reply.chunk for reply in replies if reply.HasField("chunk")]
        assert [token for chunk in chunks for token in chunk.token_ids] == list(ours[0].output_ids)


def same_end(ours: pb.GenerateComplete, theirs: dict[str, Any], case: Case) -> None:
    meta = theirs["meta_info"]
    assert list(ours.output_ids) == theirs["output_ids"]
    assert ours.finish_reason == meta["finish_reason"]["type"]
    assert (ours.prompt_tokens, ours.completion_tokens) == (meta["prompt_tokens"], meta["completion_tokens"])
    matched = meta["finish_reason"].get("matched")
    if isinstance(matched, str):
        assert ours.matched_stop_str == matched
    elif matched in case.sampling.get("stop_token_ids", ()):
        assert ours.matched_token_id == matched
    else:
        assert ours.WhichOneof("matched_stop") is None, "an EOS is no stop that the request named"


def same_logprobs(ours: pb.GenerateComplete, meta: dict[str, Any], ids: list[int], asked: dict[str, Any]) -> None:
    output, top = ours.output_logprobs, asked.get("top_logprobs_num", 0)
    if not asked.get("return_logprob"):
        assert not ours.HasField("output_logprobs") and not ours.HasField("input_logprobs")
        return
    told = meta["output_token_logprobs"][: len(ours.output_ids)]
    assert list(output.token_ids) == [token for _, token, _ in told] == list(ours.output_ids)
    close(output.token_logprobs, [value for value, _, _ in told])
    same_rows(output.top_logprobs, meta["output_top_logprobs"] if top else [])
    chosen = asked.get("token_ids_logprob")
    same_rows(output.token_ids_logprobs, meta["output_token_ids_logprobs"] if chosen else [])
    start = asked["logprob_start_len"]
    if start < 0:
        assert not ours.HasField("input_logprobs")
        return
    prompt, told = ours.input_logprobs, meta["input_token_logprobs"]
    assert list(prompt.token_ids) == ids[start:] == [token for _, token, _ in told]
    assert not prompt.token_logprobs[0].HasField("value") and told[0][0] is None
    close([one.value for one in prompt.token_logprobs[1:]], [value for value, _, _ in told[1:]])
    same_rows(prompt.top_logprobs, meta["input_top_logprobs"] if top else [])


def same_rows(ours: Any, theirs: list[list[list[Any]] | None]) -> None:
    assert len(ours) == len(theirs)
    for row, expected in zip(ours, theirs, strict=True):
        expected = expected or []
        assert list(row.token_ids) == [token for _, token, _ in expected]
        close(row.values, [value for value, _, _ in expected])


def close(ours: Any, theirs: list[float]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert math.isclose(one, other, abs_tol=1e-4), (list(ours), theirs)
