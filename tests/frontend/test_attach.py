"""`attach`: the front end alone, for an engine that somebody else starts. The simulated engine dials it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from bridge.plugins.sim.model import facts_of, vocabulary_of
from bridge.plugins.sim.options import parse
from bridge.plugins.sim.tokens import expected_tokens
from tests.running import Running, Worker, unused_port

PROMPT = [5, 6, 7]


class Pair:
    """An attached front end and the engine that dials it."""

    def __init__(self, worker: Worker, engine: Running) -> None:
        self.worker = worker
        self.engine = engine


@pytest.fixture
def pair(tiny_llama: Path, tmp_path: Path) -> Iterator[Pair]:
    port, handshake = unused_port(), f"tcp://127.0.0.1:{unused_port()}"
    attach = [sys.executable, "-m", "bridge", "attach", "sim", tiny_llama, "--listen-handshake", handshake]
    engine = [sys.executable, "-m", "bridge.plugins.sim", "--zmq-handshake-address", handshake]
    with (
        Worker([*attach, "--port", port], port, tmp_path / "attach.log") as worker,
        Running([*engine, "--model-path", tiny_llama], tmp_path / "engine.log") as running,
    ):
        worker.wait_until_serving(30)
        yield Pair(worker, running)


def ask(worker: Worker, count: int) -> list[pb.GenerateResponse]:
    params = pb.SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=PROMPT), sampling_params=params, stream=True, request_id="one"
    )
    return list(worker.stub.Generate(request, timeout=60))


def test_it_serves_the_engine_with_facts_from_the_folder(pair: Pair, tiny_llama: Path) -> None:
    *_, last = ask(pair.worker, 9)
    vocabulary = vocabulary_of(facts_of(parse(["--model-path", str(tiny_llama)])))
    assert list(last.complete.output_ids) == expected_tokens(PROMPT, 9, vocab=vocabulary)
    info = pair.worker.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5)
    assert (info.vocab_size, info.served_model_name) == (259, str(tiny_llama))
    loads = pair.worker.stub.GetLoads(pb.GetLoadsRequest(), timeout=5)
    assert loads.dp_rank_count == 1


def test_a_signal_ends_it_with_code_zero_and_leaves_the_engine_alone(pair: Pair) -> None:
    assert pair.worker.stop() == 0, pair.worker.output()
    assert pair.engine.process.poll() is None


def test_an_engine_that_is_killed_ends_streams_and_the_run(pair: Pair) -> None:
    params = pb.SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT), sampling_params=params, stream=True)
    stream = pair.worker.stub.Generate(request, timeout=30)
    next(stream)
    os.kill(pair.engine.pid, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as error:
        list(stream)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert pair.worker.process.wait(10) == 1
    assert "headless-bridge: " in pair.worker.output().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sim", "./no-such-folder", "--port", "0"], "no-such-folder"),
        (["nothing", "x"], "'nothing' is no engine"),
        (["sim"], "one model folder"),
        (["sim", "a", "--max-model-len", "5"], "the engine's own flags go where the engine is started"),
        (["sim", "FOLDER", "--listen-handshake", "tcp://203.0.113.1:1", "--port", "0"], "tcp://203.0.113.1:1"),
    ],
)
def test_what_cannot_work_is_one_line(arguments: list[str], words: str, tiny_llama: Path, tmp_path: Path) -> None:
    arguments = [str(tiny_llama) if argument == "FOLDER" else argument for argument in arguments]
    with Running([sys.executable, "-m", "bridge", "attach", *arguments], tmp_path / "log") as running:
        assert running.process.wait(20) == 2
        lines = running.output().splitlines()
        assert len(lines) == 1 and words in lines[0], lines
