"""2,000 requests to a real vLLM behind the bridge: it never wedges, never dies, and its tokens stay what they were."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.fuzz import answers
from tests.fuzz.cases import CLASSES, HOSTILE, VALID
from tests.fuzz.live import Live
from tests.running import Worker, unused_port

REQUESTS = 2000
FLAGS = ("--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "16", "--enforce-eager")
CACHE = ("--kv-cache-memory-bytes", "67108864")


@pytest.fixture(scope="module")
def tiny(vllm_python: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """`serve vllm` with a random two-layer model, whose context is short so that no answer is long."""
    port = unused_port()
    command = [vllm_python, "-m", "bridge", "serve", "vllm", tiny_llama, "--port", port, *FLAGS, *CACHE]
    with Worker(command, port, tmp_path_factory.mktemp("fuzzed") / "worker.log") as worker:
        yield worker.wait_until_serving()


def test_requests_with_different_logprobs_share_a_batch(tiny: Worker) -> None:
    """The rows of a step are as wide as the widest request's in it (vLLM 0.32); each request gets what it asked for."""
    wanted = [0, 1, 3, 20, 7]
    calls = []
    for count in wanted:
        params = pb.SamplingParams(temperature=0, max_tokens=10 + count, ignore_eos=True, logprobs=count)
        prompt = pb.TokenizedInput(input_ids=[5, 6, count])
        calls.append(tiny.stub.Generate(pb.GenerateRequest(tokenized=prompt, sampling_params=params), timeout=60))
    for count, call in zip(wanted, calls, strict=True):
        (reply,) = call
        logprobs = reply.complete.output_logprobs
        assert len(logprobs.token_logprobs) == 10 + count
        assert {len(row.values) for row in logprobs.top_logprobs} == ({count} if count else set())


def test_nothing_that_a_client_sends_wedges_or_kills_the_engine(tiny: Worker) -> None:
    lasting = [process for process in tiny.tree() if "bridge.plugins.vllm.companion" not in process.cmdline()]
    report = asyncio.run(Live("127.0.0.1", tiny.port).run(40, REQUESTS, CLASSES))
    print(report)
    assert not report.surprises
    assert sum(report.counts.values()) == REQUESTS
    assert report.of(VALID, answers.ACCEPTED) >= 0.9 * report.of(VALID)
    assert report.of(HOSTILE, answers.ACCEPTED) == 0
    assert all(process.is_running() for process in lasting), "a process of the engine or the front end is gone"
    ours = [line for line in tiny.output().splitlines() if not line.startswith("[vllm]")]
    assert not [line for line in ours if "Traceback" in line]
    assert tiny.stub.HealthCheck(pb.HealthCheckRequest(), timeout=5).healthy
