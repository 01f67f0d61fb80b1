"""The client example, against the simulated engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.running import Worker, unused_port

ASK = Path(__file__).resolve().parent.parent.parent / "examples/grpc_client/ask.py"


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ASK, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_it_prints_tokens_and_how_it_ended(tiny_llama: Path, tmp_path: Path) -> None:
    port = unused_port()
    command = [sys.executable, "-m", "bridge", "serve", "sim", tiny_llama, "--port", port]
    with Worker(command, port, tmp_path / "serve.log") as worker:
        worker.wait_until_serving(60)
        done = ask(worker.address, "Once upon a time")
    assert done.returncode == 0, done.stderr
    *chunks, end = done.stdout.splitlines()
    assert sum(len(line.split()) - 1 for line in chunks) == 8
    assert end == "length: 16 tokens in, 8 out"


def test_no_worker_is_one_line() -> None:
    done = ask(f"127.0.0.1:{unused_port()}", "x")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: UNAVAILABLE: ") and len(done.stderr.splitlines()) == 1
