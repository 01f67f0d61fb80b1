"""The same requests through the real vllm-rs 0.33.0 and through the bridge, on the same engine in float32.

They are to be equal in every field of both methods' answers, but for the closed list in `INTENDED`.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.contracts.asking import Stub, inference, joined
from tests.running import Running, Worker, unused_port
from tests.vllm.conftest import ENGINE_FLAGS
from tests.vllm.inference_cases import EQUAL, PROMPT, REFUSED

LIMIT_S = 120
CLOSE = 2e-4
"""Log-probabilities of two runs: requests of other tests in the batch change the order in which sums are taken."""

INTENDED: dict[str, tuple[dict[str, Any], str, str]] = {
    "several sequences": (
        {**PROMPT, "temperature": 1.0, "sampling": {"num_sequences": 2}},
        "OK",
        "INVALID_ARGUMENT",
    ),
    "a choice": ({**PROMPT, "decoding": {"choice": {"choices": ["yes", "no"]}}}, "OK", "INTERNAL"),
    "transfer parameters that nothing reads": (
        {**PROMPT, "kv": {"kv_transfer_params": {"do_remote_prefill": True}}},
        "FAILED_PRECONDITION",
        "OK",
    ),
    "encoder-cache parameters": ({**PROMPT, "kv": {"ec_transfer_params": {"a": 1}}}, "UNIMPLEMENTED", "OK"),
    "media": (
        {**PROMPT, "media": [{"modality": "IMAGE", "url": "http://127.0.0.1/x.png"}]},
        "UNIMPLEMENTED",
        "INVALID_ARGUMENT",
    ),
}
"""What differs on purpose: request, our status, theirs. In order: the engine can run several, and the reply has an index;
vllm-rs sends choices in a form that its engine cannot use; parameters that no connector would read are an error of
configuration that somebody wants to know of (two cases); what is not supported is UNIMPLEMENTED everywhere here."""


@pytest.fixture(scope="module")
def ours(served: Worker) -> Stub:
    return Stub(served.channel, "vllm.Inference")


@pytest.fixture(scope="module")
def theirs(vllm_rs_binary: Path, vllm_python: Path, smollm2: Path, logs: Path) -> Iterator[Stub]:
    """vllm-rs in front of a headless engine of the same version and flags."""
    port, http, handshake = unused_port(), unused_port(), unused_port()
    where = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", handshake]
    front = [vllm_rs_binary, "serve", smollm2, "--grpc-port", port, "--host", "127.0.0.1", "--port", http]
    engine = [vllm_python, "-m", "vllm.entrypoints.cli.main", "serve", smollm2, "--headless", "--data-parallel-size", 1]
    with (
        Running([*front, "--data-parallel-size-local", "0", *where], logs / "vllm_rs.log") as server,
        Running([*engine, "--data-parallel-size-local", 1, *where, *ENGINE_FLAGS], logs / "vllm_rs_engine.log"),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = Stub(channel, "vllm.Inference")
        request = inference(token_ids={"ids": [5]}, stopping={"max_new_tokens": 1})
        stub.Generate(request, timeout=300, wait_for_ready=True)
        server.must_run("answering")
        yield stub


def answers(stub: Stub, fields: dict[str, Any], salt: str) -> list[Any]:
    """Generate's reply and GenerateStream's as one, both with an empty cache before the first."""
    kv = {"cache_salt": salt, **fields.get("kv", {})}
    request = inference(**{**fields, "kv": kv})
    whole = stub.Generate(request, timeout=LIMIT_S)
    return [whole, joined(list(stub.GenerateStream(request, timeout=LIMIT_S)))]


def without_values(reply: Any) -> tuple[Any, list[float]]:
    """(the reply without its log-probabilities, those)."""
    values = [*reply.prompt_info.logprobs, *reply.outputs.logprobs]
    del reply.prompt_info.logprobs[:], reply.outputs.logprobs[:]
    for row in (*reply.prompt_info.candidate_tokens, *reply.outputs.candidate_tokens):
        for token in row.tokens:
            values.append(token.logprob)
            token.logprob = 0.0
    return reply, values


@pytest.mark.parametrize(("name", "fields"), EQUAL, ids=[name for name, _ in EQUAL])
def test_answers_are_equal_field_by_field(ours: Stub, theirs: Stub, name: str, fields: dict[str, Any]) -> None:
    salt = uuid.uuid4().hex
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda stub: answers(stub, fields, salt), (ours, theirs)))
    for mine, peer in zip(*both, strict=True):
        (mine, values), (peer, expected) = without_values(mine), without_values(peer)
        assert mine == peer
        assert len(values) == len(expected)
        assert all(math.isclose(one, other, abs_tol=CLOSE) for one, other in zip(values, expected, strict=True))


def status(stub: Stub, fields: dict[str, Any], *, stream: bool) -> str:
    try:
        if stream:
            list(stub.GenerateStream(inference(**fields), timeout=LIMIT_S))
        else:
            stub.Generate(inference(**fields), timeout=LIMIT_S)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.mark.parametrize(("name", "fields"), REFUSED, ids=[name for name, _ in REFUSED])
def test_refusals_have_the_same_status(ours: Stub, theirs: Stub, name: str, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        mine, peer = status(ours, fields, stream=stream), status(theirs, fields, stream=stream)
        assert mine == peer != "OK"


@pytest.mark.parametrize("name", INTENDED)
def test_intended_differences(ours: Stub, theirs: Stub, name: str) -> None:
    fields, mine, peer = INTENDED[name]
    assert (status(ours, fields, stream=True), status(theirs, fields, stream=True)) == (mine, peer)


def test_there_are_enough_cases_and_few_differences() -> None:
    names = [name for name, _ in (*EQUAL, *REFUSED)]
    assert len(set(names)) == len(names) >= 60 and len(EQUAL) >= 60 and len(INTENDED) <= 5
