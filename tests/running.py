"""Programs under test: started in their own session with their output in a file, found alive, stopped by pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import grpc
import psutil
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}
"""Engines and gateways in tests ask no hub and report to nobody."""


def unused_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Running:
    """A started program. Use as a context manager: it is stopped on the way out, its whole tree with it."""

    def __init__(self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        self._file = log.open("wb")
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **OFFLINE, **(environment or {})},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def tree(self) -> list[psutil.Process]:
        """This process and all below it that run now."""
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait_for(self, text: str, timeout: float) -> str:
        """Until its output holds `text`; the line that does."""
        until = time.monotonic() + timeout
        while True:
            for line in self.output().splitlines():
                if text in line:
                    return line
            self.must_run(f"waiting for {text!r}")
            assert time.monotonic() < until, f"no {text!r} within {timeout} s:\n{self.output()[-4000:]}"
            time.sleep(0.05)

    def must_run(self, why: str) -> None:
        code = self.process.poll()
        assert code is None, f"exited with {code} while {why}:\n{self.output()[-6000:]}"

    def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM, then SIGKILL to what is left of the tree after `timeout` seconds; the exit code."""
        tree = self.tree()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait(10)
        for process in tree:
            if process.is_running() and process.pid != self.pid:
                process.kill()
        self._file.close()
        return code

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Worker(Running):
    """A gRPC worker on a port; `stub` speaks vllm.grpc.engine to it."""

    def __init__(
        self, command: Sequence[str | Path], port: int, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(command, log, environment)
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.channel = grpc.insecure_channel(self.address)
        self.stub = pb_grpc.VllmEngineStub(self.channel)

    def wait_until_serving(self, timeout: float = 300.0) -> Worker:
        until = time.monotonic() + timeout
        problem = "no answer"
        while time.monotonic() < until:
            self.must_run("starting")
            try:
                health = self.stub.HealthCheck(pb.HealthCheckRequest(), timeout=5)
                if health.healthy:
                    return self
                problem = health.message
            except grpc.RpcError as error:
                problem = str(error)
            time.sleep(0.1)
        raise AssertionError(f"not serving within {timeout} s: {problem}\n{self.output()[-6000:]}")

    def running(self) -> int:
        """The engine's own count of running requests."""
        return sum(load.num_running_reqs for load in self.stub.GetLoads(pb.GetLoadsRequest(), timeout=5).loads)

    def wait_idle(self, timeout: float) -> float:
        """Seconds until the engine runs nothing."""
        started = time.monotonic()
        while self.running():
            assert time.monotonic() - started < timeout, f"{self.running()} requests still run after {timeout} s"
            time.sleep(0.02)
        return time.monotonic() - started

    def stop(self, timeout: float = 30.0) -> int:
        self.channel.close()
        return super().stop(timeout)


def gone_within(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """The processes that still run (zombies aside) after at most `seconds`."""
    until = time.monotonic() + seconds
    while True:
        left = [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        if not left or time.monotonic() >= until:
            return left
        time.sleep(0.05)
