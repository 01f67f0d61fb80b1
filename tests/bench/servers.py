"""The servers that are measured: how each is started, with its own engine, and which processes are its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from tests.bench.client import Load, Result
from tests.bench.pulse import VOCABULARY, Pulse
from tests.running import Running, unused_port

ROOT = Path(__file__).resolve().parents[2]
SMG_PYTHON = ROOT / ".envs/smg/bin/python"
MODEL = ROOT / ".models/SmolLM2-135M-Instruct"
"""Its tokenizer is what stop strings are decoded with; its vocabulary is as large as the bench's."""
VLLM_RS = "BRIDGE_BENCH_VLLM_RS"
"""Names the `vllm-rs` binary of the vllm 0.33.0 wheel, when it is neither built here nor on the PATH."""
START_S = 60.0
CLIENT_S = 180.0
ENGINE = "tests.bench.engine"


class BenchError(Exception):
    """A server that cannot be measured; one line."""


@dataclass(frozen=True)
class Site:
    """Where one server lives: its port, the port its engine dials, a folder of its own."""

    port: int
    handshake_port: int
    folder: Path

    @property
    def handshake(self) -> str:
        return f"tcp://127.0.0.1:{self.handshake_port}"

    @property
    def pulse(self) -> Path:
        return self.folder / "pulse"


@dataclass(frozen=True)
class Kind:
    """One server. `speech` is the contract it speaks; `brings_engine` when it starts the engine itself."""

    name: str
    title: str
    speech: str
    command: Callable[[Site], list[str]]
    brings_engine: bool = False


def _bridge(site: Site) -> list[str]:
    state = site.folder / "state"
    return [
        *(sys.executable, "-m", "tests.bench.serve", "--port", str(site.port), "--log-level", "warning"),
        *("--handshake-port", str(site.handshake_port), "--state-dir", str(state)),
        *("--contract", "vllm.grpc.engine", "--contract", "vllm.Inference"),
    ]


def _rust(site: Site) -> list[str]:
    script = ROOT / "tests/bench/peers/rust.py"
    port, sockets = str(site.port), f"{site.folder}/r"
    return [str(SMG_PYTHON), str(script), port, site.handshake, sockets, str(VOCABULARY), str(MODEL)]


def _aio(site: Site) -> list[str]:
    return [sys.executable, "-m", "tests.bench.peers.aio", str(site.port), site.handshake, str(site.folder)]


def _vllm_rs(site: Site) -> list[str]:
    binary = vllm_rs()
    assert binary is not None
    return [
        *(binary, "serve", str(MODEL), "--grpc-port", str(site.port), "--port", str(unused_port())),
        *("--data-parallel-size-local", "0", "--data-parallel-address", "127.0.0.1"),
        *("--data-parallel-rpc-port", str(site.handshake_port)),
    ]


def vllm_rs() -> str | None:
    """The path of the vllm-rs binary, None where there is none."""
    built = str(ROOT / ".envs/vllm-rs/bin/vllm-rs")
    return os.environ.get(VLLM_RS) or shutil.which(built) or shutil.which("vllm-rs")


BRIDGE = Kind("bridge", "headless-bridge", "engine", _bridge, brings_engine=True)
KINDS = (
    BRIDGE,
    Kind("rust", "Rust servicer (smg 1.13.0)", "engine", _rust),
    Kind("aio", "grpc.aio, minimal", "engine", _aio),
    Kind("vllm_rs", "vllm-rs 0.33.0", "inference", _vllm_rs),
)


class Server:
    """A running server and its engine. Use as a context manager."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self.kind = kind
        self.site = Site(unused_port(), unused_port(), folder)
        self.pulse = Pulse(self.site.pulse, create=True)
        self._running: list[Running] = []
        environment = {"BENCH_PULSE": str(self.site.pulse), "PYTHONPATH": str(ROOT)}
        try:
            self._server = self._start(kind.command(self.site), "server", environment)
            if not kind.brings_engine:
                engine = [sys.executable, "-m", ENGINE, "--zmq-handshake-address", self.site.handshake]
                self._start([*engine, "--pulse", str(self.site.pulse)], "engine", environment)
            self._wait_until_serving()
        except BaseException:
            self.stop()
            raise

    def _start(self, command: list[str], name: str, environment: dict[str, str]) -> Running:
        running = Running(command, self.site.folder / f"{name}.log", environment)
        self._running.append(running)
        return running

    def _wait_until_serving(self) -> None:
        until = time.monotonic() + START_S
        while True:
            try:
                result = self.load(Load(port=0, concurrency=1, tokens=2))
                if not result.errors:
                    return
                problem = "; ".join(result.errors)
            except BenchError as error:
                problem = str(error)
            for running in self._running:
                if running.process.poll() is not None:
                    raise BenchError(f"{self.kind.name} ended while it started:\n{running.output()[-3000:]}")
            if time.monotonic() > until:
                raise BenchError(f"{self.kind.name} does not serve after {START_S:g} s: {problem}")
            time.sleep(0.2)

    def load(self, load: Load) -> Result:
        """Run the load client against this server; raises `BenchError` when it fails."""
        client = self.start_load(load)
        try:
            out, err = client.communicate(timeout=CLIENT_S)
        except subprocess.TimeoutExpired:
            client.kill()
            client.communicate()
            raise BenchError(f"{self.kind.name}: the load client did not end within {CLIENT_S:g} s") from None
        if client.returncode:
            raise BenchError(f"{self.kind.name}: the load client failed: {(err.strip().splitlines() or ['?'])[-1]}")
        return msgspec.json.decode(out.splitlines()[-1], type=Result)

    def start_load(self, load: Load) -> subprocess.Popen[str]:
        """Start the load client against this server and its engine's pulse."""
        speech = load.speech or self.kind.speech
        load = msgspec.structs.replace(load, port=self.site.port, speech=speech, pulse=str(self.site.pulse))
        command = [sys.executable, "-m", "tests.bench.client", json.dumps(msgspec.to_builtins(load))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)

    def processes(self) -> list[psutil.Process]:
        """The server's own processes: its whole tree without the engine."""
        tree = self._server.tree()
        engines = [one for one in tree if ENGINE in one.cmdline()]
        below = {child.pid for engine in engines for child in engine.children(recursive=True)}
        return [one for one in tree if one not in engines and one.pid not in below]

    def stop(self) -> None:
        for running in self._running:
            running.stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
