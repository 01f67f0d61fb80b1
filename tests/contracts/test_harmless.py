"""Whatever the protos can hold, the engine serves the next good request with the right tokens.

The simulated engine's decoder is as strict as vLLM's: a value it refuses would silence it for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contracts.asking import engine_v1, inference
from tests.contracts.conftest import Served

LIMIT_S = 20
EXPECTED = {
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "UNIMPLEMENTED",
    "FAILED_PRECONDITION",
    "ALREADY_EXISTS",
}
"""Never INTERNAL, never a deadline that passes."""

number = st.sampled_from([0, 1, 2, 5, 127, 49151, 49152, 2**31 - 1, 2**31, 2**32 - 1])
signed = st.sampled_from([0, 1, -1, 5, -(2**31), 2**31 - 1])
real = st.sampled_from([0.0, 0.5, 1.0, -1.0, 1.5, 2.5, 1e-30, 1e30, float("nan"), float("inf"), float("-inf")])
ids = st.lists(number, max_size=4)
words = st.lists(st.sampled_from(["", "a", "the", "\0", "é", "🙂" * 3]), max_size=3)
flag = st.booleans()


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of the fields, none or all."""
    return st.fixed_dictionaries({}, optional=fields)


candidates = st.sampled_from([{}, {"top_n": 0}, {"top_n": 3}, {"top_n": 2**32 - 1}, {"all": True}, {"all": False}])
asked_of_inference = some(
    request_id=st.sampled_from(["", "same", "\0"]),
    model=st.sampled_from(["", "smol", "nope"]),
    temperature=real,
    sampling=some(
        num_sequences=st.sampled_from([0, 1, 2, 2**32 - 1]),
        top_k=number,
        top_p=real,
        min_p=real,
        seed=st.sampled_from([0, -1, 2**63 - 1, -(2**63)]),
    ),
    decoding=some(
        presence_penalty=real,
        frequency_penalty=real,
        repetition_penalty=real,
        logit_bias=st.dictionaries(number, real, max_size=3),
        allowed_token_ids=ids,
        json=st.just("{}"),
    ),
    stopping=some(
        max_new_tokens=st.sampled_from([0, 1, 5, 2**32 - 1]),
        min_new_tokens=st.sampled_from([0, 1, 7, 2**32 - 1]),
        stop_token_ids=ids,
        stop_strings=words,
        include_stop_strings=flag,
        ignore_eos=flag,
    ),
    response=some(
        prompt_token_ids=flag,
        output_text=flag,
        output_token_ids=flag,
        output_candidates=candidates,
        skip_special_tokens=flag,
    ),
    kv=some(bypass_prefix_cache=flag, cache_salt=st.sampled_from(["", "x"]), kv_transfer_params=st.just({"a": 1})),
    truncate_prompt_tokens=st.sampled_from([0, 1, 3, 2**32 - 1]),
    priority=signed,
    session_id=st.sampled_from(["", "s"]),
    lora_name=st.sampled_from(["", "x"]),
)
prompts = st.one_of(
    st.builds(lambda text: {"text": text}, st.sampled_from(["", "a", "\0\0", "The capital of France is"])),
    st.builds(lambda some_ids: {"token_ids": {"ids": some_ids}}, ids),
    st.just({}),
)
asked_of_v1 = some(
    prompt_token_ids=ids,
    prompt_text=st.sampled_from(["", "a"]),
    dp_rank=number,
    execution_mode=st.sampled_from([0, 1, 2, 9]),
    sampling_params=some(
        temperature=real,
        top_p=real,
        max_tokens=st.sampled_from([0, 1, 5, -1, 2**31 - 1]),
        stop_sequences=words,
        stop_token_ids=ids,
        frequency_penalty=real,
        presence_penalty=real,
        ignore_eos=flag,
        seed=st.sampled_from([0, 2**63, 2**64 - 1]),
        top_k=signed,
    ),
)


@pytest.fixture(scope="module")
def quick(smollm2: Path, logs: Path) -> Iterator[Served]:
    """Steps as fast as they go: requests without a limit fill the context."""
    with Served(smollm2, logs / "quick.log", "--step-ms", "0") as worker:
        worker.wait_until_serving(30)
        yield worker


def status(call: Any) -> str:
    try:
        reply = call()
        if hasattr(reply, "__iter__"):
            list(reply)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def serves(served: Served) -> None:
    good = inference(token_ids={"ids": [9, 8]}, stopping={"max_new_tokens": 3}, response={"output_token_ids": True})
    assert list(served.inference.Generate(good, timeout=LIMIT_S).outputs.token_ids) == served.tokens([9, 8], 3)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(prompt=prompts, fields=asked_of_inference, stream=flag)
def test_any_inference_request(quick: Served, prompt: dict[str, Any], fields: dict[str, Any], stream: bool) -> None:
    method = quick.inference.GenerateStream if stream else quick.inference.Generate
    assert status(lambda: method(inference(**{**fields, **prompt}), timeout=LIMIT_S)) in EXPECTED
    serves(quick)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=asked_of_v1, stream=flag)
def test_any_v1_request(quick: Served, fields: dict[str, Any], stream: bool) -> None:
    method = quick.engine_v1.GenerateStream if stream else quick.engine_v1.Generate
    assert status(lambda: method(engine_v1(**fields), timeout=LIMIT_S)) in EXPECTED
    serves(quick)
