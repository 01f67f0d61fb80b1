"""What is measured on a server, and how a figure comes out of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from tests.bench.client import Load
from tests.bench.process import rss_mb, total_cpu_s
from tests.bench.servers import BenchError, Server
from tests.running import OFFLINE, unused_port

STEP_US = 20_000
TOKENS = 200
OPEN_STREAMS = 10_000
OPEN_LIMIT_S = 60.0
LISTEN_LIMIT_S = 10.0

Figures = dict[str, float]


def at_20_ms(streams: int) -> Callable[[Server], Figures]:
    """CPU microseconds a token with `streams` streams of 200 tokens at a step of 20 ms; at 256 the p99 latency too."""

    def measure(server: Server) -> Figures:
        figures, latency = _cost(server, Load(port=0, concurrency=streams, tokens=TOKENS), STEP_US)
        found = {f"cpu_token_{streams}": figures}
        if streams == 256:
            found["p99_256"] = latency
        return found

    return measure


def with_logprobs(server: Server) -> Figures:
    """CPU microseconds a token of 256 streams that ask for logprobs=5."""
    cost, _ = _cost(server, Load(port=0, concurrency=256, tokens=TOKENS, logprobs=5), STEP_US)
    return {"cpu_token_logprobs": cost}


def with_stop(server: Server) -> Figures:
    """CPU microseconds a token of 256 streams with one stop string, which does not occur."""
    cost, _ = _cost(server, Load(port=0, concurrency=256, tokens=TOKENS, stop="no such words"), STEP_US)
    return {"cpu_token_stop": cost}


def inference(stop: str, figure: str) -> Callable[[Server], Figures]:
    """CPU microseconds a token of 256 streams over vllm.Inference, as vllm-router asks, with a stop string or without."""

    def measure(server: Server) -> Figures:
        load = Load(port=0, speech="inference", concurrency=256, tokens=TOKENS, stop=stop)
        return {figure: _cost(server, load, STEP_US)[0]}

    return measure


def one_stream(server: Server) -> Figures:
    """CPU microseconds a token of a single stream, steps of 2 ms."""
    cost, _ = _cost(server, Load(port=0, concurrency=1, tokens=3000), 2000)
    return {"one_stream": cost}


def saturation(server: Server) -> Figures:
    """Tokens a second through 256 streams while the engine steps as fast as it can."""
    server.pulse.step_us = 0
    result = server.load(Load(port=0, concurrency=256, requests=1024, tokens=TOKENS))
    _must_be_right(server, result.errors)
    return {"saturation": result.tokens / result.wall_s}


def long_requests(server: Server) -> Figures:
    """CPU milliseconds of a request of 4,096 tokens in and 16 out, eight at a time."""
    server.pulse.step_us = 2000
    before = total_cpu_s(server.processes())
    result = server.load(Load(port=0, concurrency=8, requests=400, prompt=4096, tokens=16))
    used = total_cpu_s(server.processes()) - before
    _must_be_right(server, result.errors)
    return {"request_4096_16": used / result.requests * 1e3}


def while_long_prompts(server: Server) -> Figures:
    """p99 latency in ms of 256 streams while a prompt of 100,000 tokens arrives every 200 ms."""
    server.pulse.step_us = STEP_US
    result = server.load(Load(port=0, concurrency=256, tokens=TOKENS, long_every_ms=200))
    _must_be_right(server, result.errors)
    return {"p99_ms_256_while_100k_prompts": result.latency_ms["p99"]}


def memory(server: Server) -> Figures:
    """Resident MiB of the server's processes with no stream, then with 10,000 open ones."""
    idle = rss_mb(server.processes())
    server.pulse.step_us = STEP_US * 10
    client = server.start_load(Load(port=0, concurrency=OPEN_STREAMS, tokens=100_000, hold_s=OPEN_LIMIT_S / 2))
    most, until = idle, time.monotonic() + OPEN_LIMIT_S
    while client.poll() is None and time.monotonic() < until:
        most = max(most, rss_mb(server.processes()))
        time.sleep(0.2)
    if client.poll() is None:
        client.kill()
    _, err = client.communicate()
    if client.returncode:
        raise BenchError(f"{server.kind.name}: {OPEN_STREAMS} streams could not be opened: {err.strip()[-300:]}")
    return {"rss_mb_idle": idle, "rss_mb_10k_streams": most}


def listen_ms(folder: Path) -> float:
    """Milliseconds from exec of `serve sim` to the first answered HealthCheck."""
    port = unused_port()
    command = [sys.executable, "-m", "bridge", "serve", "sim", "--port", str(port), "--log-level", "warning"]
    with (folder / "listen.log").open("wb") as log:
        begun = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **OFFLINE})
        try:
            return (_first_answer(port, begun) - begun) * 1e3
        finally:
            process.terminate()
            process.wait(20)


def _first_answer(port: int, begun: float) -> float:
    options = [("grpc.initial_reconnect_backoff_ms", 10), ("grpc.min_reconnect_backoff_ms", 10)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", [*options, ("grpc.max_reconnect_backoff_ms", 10)]) as channel:
        pb_grpc.VllmEngineStub(channel).HealthCheck(
            pb.HealthCheckRequest(), timeout=LISTEN_LIMIT_S, wait_for_ready=True
        )
        return time.monotonic()


def _cost(server: Server, load: Load, step_us: int) -> tuple[float, float]:
    """(CPU microseconds a token, p99 latency in ms) of one run."""
    server.pulse.step_us = step_us
    before = total_cpu_s(server.processes())
    result = server.load(load)
    used = total_cpu_s(server.processes()) - before
    _must_be_right(server, result.errors)
    return used / result.tokens * 1e6, result.latency_ms["p99"]


def _must_be_right(server: Server, errors: list[str]) -> None:
    if errors:
        raise BenchError(f"{server.kind.name} answered wrongly: {errors[0]}")


PER_SERVER: dict[str, Callable[[Server], Figures]] = {
    "cpu_token_64": at_20_ms(64),
    "cpu_token_256": at_20_ms(256),
    "cpu_token_1024": at_20_ms(1024),
    "saturation": saturation,
    "one_stream": one_stream,
    "request_4096_16": long_requests,
}
"""Cells that every server runs; the cell of 256 streams gives p99_256 too."""

ENGINE_CONTRACT: dict[str, Callable[[Server], Figures]] = {
    "cpu_token_logprobs": with_logprobs,
    "cpu_token_stop": with_stop,
}
"""Cells of the servers that speak vllm.grpc.engine in full: the bridge and the Rust servicer."""

INFERENCE: dict[str, Callable[[Server], Figures]] = {
    "cpu_token_inference": inference("", "cpu_token_inference"),
    "cpu_token_inference_stop": inference("no such words", "cpu_token_inference_stop"),
}
"""Cells of the servers that speak vllm.Inference: the bridge and vllm-rs."""

OURS: dict[str, Callable[[Server], Figures]] = {"long_prompts": while_long_prompts, "memory": memory}
"""Cells that only the bridge runs."""
