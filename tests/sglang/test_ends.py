"""`serve sglang` and the ends of what it started: noticed, every stream ended, nothing left over."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import grpc
import psutil
import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from tests.running import gone_within, unused_port
from tests.sglang.engines import RANK
from tests.sglang.worker import SglangWorker

STREAMS = 6
NOTICED_S = 3.0
GONE_S = 15.0

LAUNCHER = "bridge.plugins.sglang.launcher"


class Stream(threading.Thread):
    """One long stream; how it ended, and when."""

    def __init__(self, worker: SglangWorker, number: int) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.code: grpc.StatusCode | None = None
        self.last: pb.GenerateResponse | None = None
        self.ended_at = 0.0
        params = pb.SamplingParams(temperature=0.0, max_new_tokens=1000, ignore_eos=True)
        self._call = worker.stub.Generate(
            pb.GenerateRequest(
                request_id=f"stream-{number}",
                tokenized=pb.TokenizedInput(input_ids=[1, 70, 101, 3 + number]),
                sampling_params=params,
                stream=True,
            ),
            timeout=60,
        )

    def run(self) -> None:
        try:
            for reply in self._call:
                self.last = reply
                self.begun.set()
        except grpc.RpcError as error:
            self.code = error.code()
        self.ended_at = time.monotonic()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("whom", [RANK, LAUNCHER], ids=["rank", "launcher"])
def test_a_lost_process_is_noticed_and_ends_everything(
    sglang_python: Path, smollm2: Path, tmp_path: Path, whom: str, number: signal.Signals
) -> None:
    port = unused_port()
    flags = ("--restart", "never")
    with SglangWorker(sglang_python, smollm2, port, tmp_path / "worker.log", flags) as worker:
        worker.wait_until_serving()
        tree = worker.tree()
        (victim,) = [
            one for one in tree if whom in " ".join(one.cmdline()) and "parent_death" not in str(one.cmdline())
        ]
        streams = [Stream(worker, index) for index in range(STREAMS)]
        for stream in streams:
            stream.start()
        for stream in streams:
            assert stream.begun.wait(30)
        struck = time.monotonic()
        victim.send_signal(number)
        for stream in streams:
            stream.join(NOTICED_S)
            assert not stream.is_alive(), f"a stream goes on after {number.name}\n{worker.output()[-3000:]}"
            assert stream.code is grpc.StatusCode.UNAVAILABLE, stream.last
            assert stream.ended_at - struck < NOTICED_S
        assert worker.process.wait(GONE_S) == 1
        left = gone_within([one for one in tree if one.pid != psutil.Process().pid], GONE_S)
        assert not left, [one.cmdline() for one in left]
