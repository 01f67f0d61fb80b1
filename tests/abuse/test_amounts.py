"""Requests with more of something than anybody needs are refused by name, before Python has made a list of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.abuse.target import Target, generate


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with TemporaryDirectory(prefix="abuse-") as path, Target(Path(path), "--max-model-len", 1000) as running:
        yield running.wait_until_serving()


def with_sampling(**values: object) -> pb.GenerateRequest:
    request = generate([5, 6, 7], 1)
    request.sampling_params.MergeFrom(pb.SamplingParams(**values))
    return request


CONSTRAINT = "x" * ((1 << 20) + 1)
TOO_MUCH = {
    "input_ids has 500000 tokens; it must be at most 999": generate([5] * 500_000, 1),
    "the number of ids in stop_token_ids is 16385": with_sampling(stop_token_ids=[5] * 16_385),
    "the number of strings in stop is 1025": with_sampling(stop=["x"] * 1025),
    "the number of entries in logit_bias is 65537": with_sampling(logit_bias=dict.fromkeys(range(65537), 0.5)),
    "the number of choices in choice is 16385": with_sampling(choice=pb.ChoiceConstraint(choices=["x"] * 16_385)),
    "the number of characters in regex is 1048577": with_sampling(regex=CONSTRAINT),
    "the number of characters in json_schema is 1048577": with_sampling(json_schema=CONSTRAINT),
    "the number of characters in text is 128001": pb.GenerateRequest(text="x" * 128_001),
    "the number of characters in request_id is 1025": generate([5], 1, request_id="x" * 1025),
    "the number of characters in kv_transfer_params_json is 65537": pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=[5]), kv_transfer_params_json="[" * 65_537
    ),
}


@pytest.mark.parametrize("says", TOO_MUCH)
def test_it_says_of_what_and_how_much(target: Target, says: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(target.stub.Generate(TOO_MUCH[says], timeout=5))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert says in str(caught.value.details())


def test_aborts(target: Target) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        target.stub.Abort(pb.AbortRequest(request_ids=["x"] * 65_537), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_prompt_that_is_truncated_may_be_longer_than_the_context(target: Target) -> None:
    request = generate([5] * 100_000 + [8, 9], 2)
    request.sampling_params.truncate_prompt_tokens = 2
    *_, last = target.stub.Generate(request, timeout=5)
    *_, short = target.stub.Generate(generate([8, 9], 2), timeout=5)
    assert last.complete.output_ids == short.complete.output_ids
    assert last.complete.prompt_tokens == 2
