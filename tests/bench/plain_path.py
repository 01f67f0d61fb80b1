"""What unused features cost a plain stream, in instructions: `python -m tests.bench.plain_path` (needs valgrind).

A fixed replay of steps goes through the request table twice under callgrind: once through `RequestTable`, once through a
table whose delivery knows nothing but tokens and ends. Instructions do not depend on what else the machine does. Prints
both figures a token and their ratio; exits 1 when the features cost more than 2 %.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bridge.contracts.vllm_render import PlainSink
from bridge.grpc.outflow import Outflow
from bridge.requests import Request, RequestTable
from bridge.wire.codec import GenerateCall, Sampling
from bridge.wire.engines import codec_for

STREAMS, STEPS = 64, 150
ALLOWED = 1.02
RANK = b"\0\0"


class Call:
    """Takes rendered messages and drops them."""

    method = ""
    stream_id = 1
    blocked = False
    framed = True
    unsent = b""
    credit = 1 << 60

    def __init__(self, outflow: Outflow) -> None:
        self.outflow = outflow

    def send(self, message: bytes) -> None:
        """A socket would be here."""


class BareTable(RequestTable):
    """Delivers tokens and nothing else: what the plain path would be if no other feature existed."""

    def _deliver_one(self, step: Any) -> None:
        live = self._live.get
        for delta in step.outputs:
            sequence = live(delta.request_id)
            if sequence is None:
                self._stranger(delta)
                continue
            tokens = delta.new_token_ids
            if delta.finish_reason is None:
                ids = sequence.output_ids
                ids.extend(tokens)
                if sequence.held or sequence.out.blocked:
                    sequence.held += len(tokens)
                elif tokens:
                    sequence.sink.chunk(sequence, tokens)
                continue
            sequence.output_ids.extend(tokens)
            sequence.held += len(tokens)
            self._last(sequence, delta)


def replay(kind: type[RequestTable], steps: int) -> None:
    """Send `steps` messages of `STREAMS` deltas through a table."""
    codec = codec_for("vllm", {"vllm_version": "0.32.0"}, {}, 1)
    table = kind(codec, lambda rank, frames: None, "1.1", max_in_flight=STREAMS, call_later=lambda delay, call: None)
    outflow = Outflow(lambda: None)
    outflow.window = 1 << 60
    for number in range(STREAMS):
        call: Any = Call(outflow)
        request = Request(str(number), [1] * 128, call, PlainSink(call, 128), stream=True, arrived=0.0)
        sampling = Sampling(max_tokens=steps + 1)
        add = GenerateCall(wire_id="", prompt_token_ids=[1] * 128, sampling=sampling, arrival_time=0.0)
        table.admit(request, RANK, [add], None)
    for number in range(steps):
        outputs = [[f"1.1.{stream + 1:x}", [number + 5], *[None] * 16] for stream in range(STREAMS)]
        frame = msgspec.msgpack.encode([0, outputs, None, 0.0, None, None, None, None, "default"])
        table.deliver([codec.step([frame])])
        outflow.take()


def instructions(kind: str, steps: int) -> int:
    """Instructions that one replay takes, the interpreter's start included."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind"
        valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
        done = subprocess.run(
            [*valgrind, sys.executable, "-m", "tests.bench.plain_path", kind, str(steps)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONMALLOC": "malloc"},
            check=True,
        )
    found = re.search(r"Collected : (\d+)", done.stderr)
    if found is None:
        raise SystemExit(f"callgrind counted nothing:\n{done.stderr}")
    return int(found.group(1))


def main() -> int:
    kinds = {"table": RequestTable, "bare": BareTable}
    if len(sys.argv) == 3:
        replay(kinds[sys.argv[1]], int(sys.argv[2]))
        return 0
    tokens = STREAMS * STEPS
    cost = {kind: (instructions(kind, STEPS) - instructions(kind, 0)) / tokens for kind in kinds}
    ratio = cost["table"] / cost["bare"]
    print(f"instructions a token: {cost['table']:.0f} with every feature, {cost['bare']:.0f} bare, ratio {ratio:.4f}")
    return 0 if ratio <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
