"""Nothing that a client may send hurts the engine: after each of these, the next good request gets the right tokens."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from tests.sglang.worker import SglangWorker

PROMPT = [1, 504, 260, 655, 28]
VOCABULARY = 49152
HUGE = 3.4e38


def custom(**given: Any) -> dict[str, Any]:
    found = struct_pb2.Struct()
    found.update(given)
    return {"custom_params": found}


NUMBERS: dict[str, dict[str, Any]] = {
    "the least repetition penalty": {"repetition_penalty": 1e-3, "temperature": 1.1e-6},
    "a repetition penalty under it": {"repetition_penalty": 1e-38, "temperature": 1.0},
    "the largest bias": {"logit_bias": {"5": HUGE}, "temperature": 1.1e-6},
    "the smallest biases": {"logit_bias": {str(one): -HUGE for one in range(300)}, "temperature": 1.0},
    "every penalty": {
        "frequency_penalty": 2.0,
        "presence_penalty": -2.0,
        "repetition_penalty": 2.0,
        "logit_bias": {"5": HUGE, "6": -HUGE},
        "temperature": 1.1e-6,
    },
    "the largest temperature": {"temperature": HUGE},
    "the smallest temperature": {"temperature": 1e-38},
    "the smallest top_p": {"temperature": 1.0, "top_p": 1e-38},
    "the largest min_p": {"temperature": 1.0, "min_p": 1.0},
    "the largest top_k": {"temperature": 1.0, "top_k": 2**31 - 1},
    "every id stops": {"stop_token_ids": list(range(16000)), "min_new_tokens": 3},
    "more tokens than fit": {"max_new_tokens": 2**32 - 1, "stop_token_ids": list(range(0, VOCABULARY, 4))},
    "more tokens at least than fit": {"min_new_tokens": 2**32 - 1},
    "many samples": {"temperature": 1.0, "n": 24, "max_new_tokens": 2},
}
TEXTS: dict[str, dict[str, Any]] = {
    "a long stop string": {"stop": ["a" * 100_000]},
    "stop strings of odd characters": {"stop": ["\u0000", "\ufffd", "\U0001f600" * 50]},
    "a regex with a product of repetitions": {"regex": "(a{1,50}){1,50}"},
    "a long regex": {"regex": "ab" * 2000},
    "a regex that matches nothing": {"regex": "[^\\s\\S]"},
    "a lone backslash": {"regex": "\\"},
    "a look-ahead": {"regex": "(?=a)b"},
    "a schema of itself": {"json_schema": json.dumps({"$ref": "#"})},
    "a schema of a slow pattern": {"json_schema": json.dumps({"type": "string", "pattern": "(a+)+$"})},
    "a schema of many words": {"json_schema": json.dumps({"enum": list(range(2000))})},
    "a schema that nothing fits": {"json_schema": json.dumps({"allOf": [{"type": "string"}, {"type": "integer"}]})},
    "a schema that is a list": {"json_schema": "[" * 900 + "]" * 900},
    "a grammar of itself": {"ebnf_grammar": "root ::= root"},
    "a grammar that may stay empty": {"ebnf_grammar": 'root ::= "a" root | ""'},
    "a grammar of nested repetitions": {"ebnf_grammar": 'root ::= ("a"+)+'},
    "a structural tag that is a number": {"structural_tag": "5"},
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "SGLang's own key": custom(__sglang_reasoning_end_token_ids=[1]),
    "SGLang's own key with another type": custom(__sglang_reasoning_end_token_ids="x"),
    "SGLang's own flag": custom(__sglang_reasoning_in_grammar=True),
}
ASKED: dict[str, dict[str, Any]] = {
    "many log-probabilities": {"return_logprob": True, "top_logprobs_num": 2000, "logprob_start_len": 0},
    "many chosen ids": {"return_logprob": True, "token_ids_logprob": [*range(8000), *range(8000)]},
    "log-probabilities of the last position": {"return_logprob": True, "logprob_start_len": len(PROMPT) - 1},
    "log-probabilities behind the prompt": {"return_logprob": True, "logprob_start_len": len(PROMPT)},
    "reasoning": {"require_reasoning": True},
    "everything at once": {
        "return_logprob": True,
        "top_logprobs_num": 3,
        "token_ids_logprob": [5],
        "return_hidden_states": True,
        "require_reasoning": True,
    },
    "an adapter nobody loaded": {"lora_id": "nobody"},
    "a processor that is no pickle": {"custom_logit_processor": '{"callable": "00"}'},
}


def ask(served: SglangWorker, sampling: dict[str, Any], **given: Any) -> list[int] | grpc.StatusCode:
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=PROMPT),
        sampling_params=pb.SamplingParams(**{"max_new_tokens": 3, **sampling}),
        stream=True,
        **given,
    )
    try:
        *_, last = served.stub.Generate(request, timeout=60)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return list(last.complete.output_ids)


@pytest.fixture(scope="module")
def good(served: SglangWorker) -> list[int]:
    found = ask(served, {})
    assert isinstance(found, list) and len(found) == 3
    return found


NAMED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INTERNAL,
)
"""Statuses that a request may get for itself; UNAVAILABLE would be the engine's end."""


@pytest.mark.parametrize("name", [*NUMBERS, *TEXTS, *PARAMETERS])
def test_sampling_values_do_no_harm(served: SglangWorker, good: list[int], name: str) -> None:
    found = ask(served, {**NUMBERS, **TEXTS, **PARAMETERS}[name])
    assert isinstance(found, list) or found in NAMED, found
    assert ask(served, {}) == good


@pytest.mark.parametrize("tokens", [3, 0])
@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_of_the_output_does_no_harm(
    served: SglangWorker, good: list[int], name: str, tokens: int
) -> None:
    found = ask(served, {"max_new_tokens": tokens}, **ASKED[name])
    assert isinstance(found, list) or found in NAMED, found
    assert ask(served, {}) == good
