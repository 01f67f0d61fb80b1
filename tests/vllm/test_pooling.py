"""An embedding model: vLLM's own embeddings and the bridge's are the same vector."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.gateways import post_json
from tests.running import Running, Worker, unused_port

FLAGS = ("--runner", "pooling", "--convert", "embed", "--dtype", "float32", "--max-model-len", "128", "--enforce-eager")
MEMORY = ("--max-num-seqs", "4", "--kv-cache-memory-bytes", "16777216")
PROMPTS = ([5, 6, 7, 8], [200], list(range(10, 120)))


@pytest.fixture(scope="module")
def embedder(vllm_python: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    port = unused_port()
    command = [vllm_python, "-m", "bridge", "serve", "vllm", tiny_llama, "--port", port, *FLAGS, *MEMORY]
    with Worker(command, port, tmp_path_factory.mktemp("embed") / "log") as worker:
        worker.wait_until_serving()
        yield worker


@pytest.fixture(scope="module")
def expected(
    vllm_python: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[list[float], int]]:
    """(vector, prompt tokens) of each prompt, from vLLM's own server."""
    port = unused_port()
    command = [vllm_python, "-m", "vllm.entrypoints.cli.main", "serve", tiny_llama, "--port", port]
    log = tmp_path_factory.mktemp("http") / "log"
    with Running([*command, "--host", "127.0.0.1", *FLAGS, *MEMORY], log) as server:
        server.wait_for("Application startup complete", 300)
        found = []
        for prompt in PROMPTS:
            reply = post_json(f"http://127.0.0.1:{port}/v1/embeddings", {"input": prompt})
            found.append((reply["data"][0]["embedding"], reply["usage"]["prompt_tokens"]))
        return found


def embed(worker: Worker, prompt: list[int], request_id: str = "") -> pb.EmbedResponse:
    request = pb.EmbedRequest(request_id=request_id, tokenized=pb.TokenizedInput(input_ids=prompt))
    return worker.stub.Embed(request, timeout=60)


def test_vectors_equal_vllms_own(embedder: Worker, expected: list[tuple[list[float], int]]) -> None:
    for prompt, (vector, tokens) in zip(PROMPTS, expected, strict=True):
        reply = embed(embedder, prompt)
        assert reply.prompt_tokens == tokens == len(prompt)
        assert reply.embedding_dim == len(reply.embedding) == len(vector)
        assert all(math.isclose(one, other, abs_tol=1e-5) for one, other in zip(reply.embedding, vector, strict=True))


@pytest.mark.parametrize("prompt", [[], [259], [5] * 129], ids=["empty", "outside the vocabulary", "too long"])
def test_a_prompt_that_kills_vllm_is_refused(embedder: Worker, prompt: list[int]) -> None:
    with pytest.raises(grpc.RpcError) as error:
        embed(embedder, prompt)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert embed(embedder, [5]).embedding_dim > 0


def test_an_embedding_model_does_not_generate(embedder: Worker) -> None:
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1, 2]))
    with pytest.raises(grpc.RpcError) as error:
        list(embedder.stub.Generate(request, timeout=10))
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert not embedder.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5).is_generation
