"""A fixed replay of steps through the request table, measured or not: `python -m tests.metrics.replay on|off STEPS`.

64 streams of a plain request each, admitted, stepped, and ended with their last step, as the engine's pump does it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bridge.contracts.vllm_render import PlainSink
from bridge.grpc.outflow import Outflow
from bridge.metrics import Meters
from bridge.requests import Request, RequestTable
from bridge.wire.codec import GenerateCall, Sampling
from bridge.wire.engines import codec_for
from tests.bench import plain_path as bench

STREAMS = 64
RANK = b"\0\0"


class Call(bench.Call):
    """With what the meters ask for, and an end."""

    method = "/package.Service/Generate"

    def finish(self) -> None:
        """And a trailer would go there."""


def replay(meters: Meters | None, steps: int) -> None:
    """Send `steps` messages of `STREAMS` deltas through a table."""
    codec = codec_for("vllm", {"vllm_version": "0.32.0"}, {}, 1)
    table = RequestTable(
        codec,
        lambda rank, frames: None,
        "1.1",
        max_in_flight=STREAMS,
        call_later=lambda delay, call: None,
        meters=meters,
    )
    outflow = Outflow(lambda: None)
    outflow.window = 1 << 60
    for number in range(STREAMS):
        call: Any = Call(outflow)
        request = Request(str(number), [1] * 128, call, PlainSink(call, 128), stream=True, arrived=0.0)
        sampling = Sampling(max_tokens=steps + 1)
        add = GenerateCall(wire_id="", prompt_token_ids=[1] * 128, sampling=sampling, arrival_time=0.0)
        table.admit(request, RANK, [add], None)
    for number in range(steps):
        finish = 1 if number == steps - 1 else None
        outputs = [
            [f"1.1.{stream + 1:x}", [number + 5], None, None, None, finish, *[None] * 12] for stream in range(STREAMS)
        ]
        frame = msgspec.msgpack.encode([0, outputs, None, 0.0, None, None, None, None, "default"])
        step = codec.step([frame])
        began = 0.0 if meters is None else meters.clock()
        table.deliver([step])
        outflow.take()
        if meters is not None:
            meters.rendered(began, 1)
    assert steps == 0 or len(table) == 0


def costs(steps: int) -> tuple[int, int]:
    """What one replay takes with and without meters, the program's start aside: machine instructions where valgrind is
    installed, else the interpreter's own. Neither depends on what else the machine does."""
    if shutil.which("valgrind") is None:
        return _bytecodes(True, steps), _bytecodes(False, steps)
    start = _instructions(False, 0)
    return _instructions(True, steps) - start, _instructions(False, steps) - start


def _instructions(measured: bool, steps: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={Path(folder) / 'callgrind'}"]
        done = subprocess.run(
            [*valgrind, sys.executable, "-m", "tests.metrics.replay", "on" if measured else "off", str(steps)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONMALLOC": "malloc"},
            check=True,
            timeout=300,
        )
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr
    return int(found.group(1))


def _bytecodes(measured: bool, steps: int) -> int:
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    replay(None, 2)  # imports and caches
    sys.settrace(trace)
    try:
        replay(Meters() if measured else None, steps)
    finally:
        sys.settrace(None)
    return count


if __name__ == "__main__":
    replay(Meters() if sys.argv[1] == "on" else None, int(sys.argv[2]))
