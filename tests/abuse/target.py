"""`serve sim` as real processes, and what can be seen of it from outside: memory, descriptors, requests, its log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from bridge.plugins.sim.control import SimControl
from tests.running import Worker, unused_port

MIB = 1 << 20
PATIENCE_S = 10.0
"""For what takes milliseconds: a new connection once took more than two seconds, on two cores with a load of nine."""
SERVE = (sys.executable, "-m", "bridge", "serve", "sim")


def generate(prompt: Sequence[int], tokens: int, *, stream: bool = True, request_id: str = "") -> pb.GenerateRequest:
    """A greedy request for exactly `tokens` tokens."""
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        stream=stream,
    )


class Target(Worker):
    """A served simulated engine. `folder` must be short: ipc addresses have 107 bytes.

    `tls` are channel credentials that fit the TLS flags among `arguments`. With `uds` it listens on that socket.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        host: str = "127.0.0.1",
        uds: Path | None = None,
        tls: grpc.ChannelCredentials | None = None,
    ) -> None:
        port = unused_port()
        control = f"ipc://{folder}/c"
        listen = ["--host", host, "--port", port] if uds is None else ["--uds", uds]
        flags = [*listen, "--state-dir", folder / "state", "--control-address", control, *arguments]
        super().__init__([*SERVE, *map(str, flags)], port, folder / "log")
        self.channel.close()
        name = "localhost" if tls is not None else f"[{host}]" if ":" in host else host
        self.address = f"{name}:{port}" if uds is None else f"unix:{uds}"
        self._tls = tls
        self.channel = self.connect()
        self.stub = pb_grpc.VllmEngineStub(self.channel)
        self.sim = SimControl(control)

    def connect(self, *options: tuple[str, object]) -> grpc.Channel:
        """A channel with a connection of its own."""
        own = [("grpc.use_local_subchannel_pool", 1), *options]
        if self._tls is not None:
            return grpc.secure_channel(self.address, self._tls, own)
        return grpc.insecure_channel(self.address, own)

    def __enter__(self) -> Target:
        return self

    def wait_until_serving(self, timeout: float = 60.0) -> Target:
        super().wait_until_serving(timeout)
        (self.front_end,) = [one for one in self.tree() if "bridge.frontend" in one.cmdline()]
        return self

    def stop(self, timeout: float = 30.0) -> int:
        self.sim.close()
        return super().stop(timeout)

    def memory_mib(self) -> float:
        """Resident memory of the front end."""
        return float(self.front_end.memory_info().rss) / MIB

    def answers(self, within_s: float = 2.0) -> bool:
        """Whether a new connection gets a healthy HealthCheck."""
        with self.connect() as channel:
            try:
                health = pb_grpc.VllmEngineStub(channel).HealthCheck(pb.HealthCheckRequest(), timeout=within_s)
            except grpc.RpcError:
                return False
            return bool(health.healthy)

    def must_answer(self) -> None:
        """A new connection is served, and no part of the tree has raised."""
        assert self.answers(PATIENCE_S)
        output = self.output()
        assert "Traceback" not in output, output[-6000:]

    def requests(self) -> dict[str, Any]:
        """Requests in the engine (running and waiting, as it counts them itself) and in the front end's table."""
        engine = self.sim.state()
        table = self.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=5).active_requests
        return {"running": engine["running"], "waiting": engine["waiting"], "table": table}

    def must_forget(self, within_s: float = PATIENCE_S) -> float:
        """No request is left in the engine or the front end within `within_s`; the seconds it took."""
        started = time.monotonic()
        while any((left := self.requests()).values()):
            assert time.monotonic() < started + within_s, f"left after {within_s} s: {left}"
            time.sleep(0.02)
        return time.monotonic() - started

    def must_close(self, descriptors: int, within_s: float = PATIENCE_S) -> None:
        """The front end has no more than `descriptors` open within `within_s`: it lingers 1 s on what it ended itself."""
        until = time.monotonic() + within_s
        while (left := self.front_end.num_fds()) > descriptors:
            assert time.monotonic() < until, f"{left} descriptors are open, not {descriptors}: {self._connections()}"
            time.sleep(0.05)

    def _connections(self) -> list[str]:
        return [f"{one.status} {one.raddr}" for one in self.front_end.net_connections("all")]

    @contextmanager
    def watched(self) -> Iterator[Peak]:
        """Samples the front end's memory every 20 ms."""
        peak = Peak(self.memory_mib())
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(0.02):
                peak.mib = max(peak.mib, self.memory_mib())

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield peak
        finally:
            ended.set()
            thread.join()


class Peak:
    """The most memory seen, MiB."""

    def __init__(self, mib: float) -> None:
        self.mib = mib
