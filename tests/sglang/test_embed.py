"""Embeddings by SGLang's real scheduler, asked over `sglang.grpc.scheduler`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from tests.running import unused_port
from tests.sglang.worker import SglangWorker

PROMPT = [1, 70, 101, 108, 40, 55]
HIDDEN_SIZE = 128


@pytest.fixture(scope="module")
def embedder(sglang_python: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangWorker]:
    log = tmp_path_factory.mktemp("embedder") / "log"
    with SglangWorker(sglang_python, tiny_llama, unused_port(), log, ("--is-embedding",)) as worker:
        yield worker.wait_until_serving()


def embed(embedder: SglangWorker, ids: list[int]) -> pb.EmbedResponse:
    return embedder.stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=ids)), timeout=30)


def test_one_normalized_vector_a_prompt(embedder: SglangWorker) -> None:
    one, again, other = embed(embedder, PROMPT), embed(embedder, PROMPT), embed(embedder, [*PROMPT, 99])
    assert one.embedding_dim == len(one.embedding) == HIDDEN_SIZE and one.prompt_tokens == len(PROMPT)
    assert math.isclose(math.hypot(*one.embedding), 1.0, abs_tol=1e-4)
    assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(one.embedding, again.embedding, strict=True))
    assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding, strict=True)) > 1e-3
    assert not embedder.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5).is_generation


def test_what_does_not_fit_is_refused_and_the_next_one_is_served(embedder: SglangWorker) -> None:
    for ids, words in (([], "input_ids"), ([259], "input_ids[0] is 259"), ([1] * 2049, "2049")):
        with pytest.raises(grpc.RpcError) as caught:
            embed(embedder, ids)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and words in caught.value.details()
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT))
    with pytest.raises(grpc.RpcError) as caught:
        list(embedder.stub.Generate(request, timeout=30))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert embed(embedder, PROMPT).embedding_dim == HIDDEN_SIZE
