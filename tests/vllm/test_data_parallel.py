"""Two dense data-parallel ranks of a real vLLM engine behind one front end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.running import Worker, unused_port

FLAGS = ("--dtype", "float32", "--max-model-len", "2000", "--max-num-seqs", "4", "--enforce-eager")
MEMORY = ("--kv-cache-memory-bytes", "33554432", "--data-parallel-size", "2")


@pytest.fixture(scope="module")
def pair(vllm_python: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    port = unused_port()
    command = [vllm_python, "-m", "bridge", "serve", "vllm", tiny_llama, "--port", port, *FLAGS, *MEMORY]
    with Worker(command, port, tmp_path_factory.mktemp("dp") / "log") as worker:
        worker.wait_until_serving()
        yield worker


def start(worker: Worker, tokens: int, rank: int | None = None) -> Any:
    params = pb.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=[9, 8, 7]), sampling_params=params, stream=True, data_parallel_rank=rank
    )
    return worker.stub.Generate(request, timeout=120)


def running(worker: Worker) -> list[int]:
    loads = worker.stub.GetLoads(pb.GetLoadsRequest(), timeout=5)
    assert loads.dp_rank_count == 2
    return [load.num_running_reqs for load in loads.loads]


def test_requests_spread_over_the_ranks_and_both_answer_alike(pair: Worker) -> None:
    calls = [start(pair, 1500) for _ in range(4)]
    heads = [
        [token for _, reply in zip(range(5), call, strict=False) for token in reply.chunk.token_ids] for call in calls
    ]
    firsts = [head[:5] for head in heads]  # a chunk may hold many tokens
    assert firsts[0] == firsts[1] == firsts[2] == firsts[3]
    until = time.monotonic() + 2
    while running(pair) != [2, 2] and time.monotonic() < until:
        time.sleep(0.05)
    assert running(pair) == [2, 2]
    for call in calls:
        call.cancel()
    pair.wait_idle(2.0)


def test_a_pin_decides_the_rank(pair: Worker) -> None:
    calls = [start(pair, 1500, rank=1) for _ in range(2)]
    for call in calls:
        next(call)
    until = time.monotonic() + 2
    while running(pair) != [0, 2] and time.monotonic() < until:
        time.sleep(0.05)
    assert running(pair) == [0, 2]
    for call in calls:
        call.cancel()
    pair.wait_idle(2.0)
    with pytest.raises(grpc.RpcError) as error:
        list(start(pair, 5, rank=2))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "data_parallel_rank" in error.value.details()


def test_the_group_is_reported_as_one_worker(pair: Worker) -> None:
    info = pair.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=5)
    assert info.data_parallel_size == 2
    (only,) = pair.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1), timeout=5).loads
    assert only.dp_rank == 1
