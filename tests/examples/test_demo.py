"""`make demo`, as a person runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil

DEMO = Path(__file__).resolve().parent.parent.parent / "examples/demo/run.py"
LIMIT_S = 600


def test_the_demo_says_paris_twice_and_leaves_nothing_running(
    vllm_python: Path, smg_binary: Path, smollm2: Path
) -> None:
    done = subprocess.run([vllm_python, DEMO], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [line for line in done.stdout.splitlines() if line.startswith("The capital of France")]
    assert len(answers) == 2 and all("Paris" in answer for answer in answers)
    ports = [word.rpartition(":")[2] for word in done.stdout.split() if word.startswith("grpc://127.0.0.1:")]
    assert ports
    left = [p.info for p in psutil.process_iter(["pid", "cmdline"]) if ports[0] in (p.info["cmdline"] or [])]
    assert not left
