"""Starts that fail and ends that must be whole, on a real vLLM engine."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from tests.running import OFFLINE, Worker, gone_within, unused_port

TINY = ("--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "4", "--enforce-eager")
CACHE = ("--kv-cache-memory-bytes", "16777216")


def serve(python: Path, *arguments: object, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run `serve` to its end."""
    command = [str(part) for part in (python, "-m", "bridge", "serve", *arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **OFFLINE}, check=False
    )


def test_kill_minus_nine_of_the_supervisor_leaves_no_process(
    vllm_python: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    port = unused_port()
    command = [vllm_python, "-m", "bridge", "serve", "vllm", tiny_llama, "--port", port, *TINY, *CACHE]
    with Worker(command, port, tmp_path / "log") as worker:
        worker.wait_until_serving()
        tree = worker.tree()
        titles = [" ".join(one.cmdline()) for one in tree]
        assert any("EngineCore" in title for title in titles), titles
        assert any("bridge.frontend" in title for title in titles), titles
        os.kill(worker.pid, signal.SIGKILL)
        left = gone_within(tree, 5.0)
        assert not left, [one.cmdline() for one in left]


def test_a_signal_stops_everything_with_exit_code_zero(vllm_python: Path, tiny_llama: Path, tmp_path: Path) -> None:
    port = unused_port()
    command = [vllm_python, "-m", "bridge", "serve", "vllm", tiny_llama, "--port", port, *TINY, *CACHE]
    with Worker(command, port, tmp_path / "log") as worker:
        worker.wait_until_serving()
        tree = worker.tree()
        assert worker.stop() == 0, worker.output()[-3000:]
        assert not gone_within(tree, 1.0)


def test_an_engine_that_dies_while_loading_is_explained(vllm_python: Path, tiny_llama: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_llama.iterdir():
        if file.name != "model.safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"\0" * 64)
    done = serve(vllm_python, "vllm", broken, "--port", unused_port(), *TINY, *CACHE)
    assert done.returncode == 1
    assert "safetensors" in done.stderr.lower(), done.stderr[-3000:]
    assert "headless-bridge: " in done.stderr.splitlines()[-1], done.stderr[-3000:]


def test_a_model_that_does_not_exist_is_one_line(vllm_python: Path) -> None:
    done = serve(vllm_python, "vllm", "./no-such-model", "--port", unused_port(), timeout=20)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "./no-such-model" in done.stderr
