"""A worker that speaks sglang.grpc.scheduler."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as pb_grpc

from tests.running import Running
from tests.sglang.engines import ENVIRONMENT, FLAGS


class SglangWorker(Running):
    """`serve sglang` on a port; `stub` speaks to it."""

    def __init__(
        self,
        python: Path,
        model: Path,
        port: int,
        log: Path,
        flags: Sequence[str | Path] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [python, "-m", "bridge", "serve", "sglang", "--model-path", model, "--port", port, *FLAGS, *flags]
        super().__init__([str(part) for part in command], log, {**ENVIRONMENT, **(environment or {})})
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.channel = grpc.insecure_channel(self.address)
        self.stub = pb_grpc.SglangSchedulerStub(self.channel)

    def wait_until_serving(self, timeout: float = 180.0) -> SglangWorker:
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

    def wait_running(self, count: int, timeout: float) -> None:
        """SGLang counts a request from its second step on."""
        until = time.monotonic() + timeout
        while self.running() != count:
            assert time.monotonic() < until, f"{self.running()} requests run, {count} should"
            time.sleep(0.02)

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
