"""The program as people run it, at the simulated engine, which is as strict about its wire as vLLM is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.running import Worker, unused_port

LACKS = "SamplingParams.logprobs,SamplingParams.prompt_logprobs"
"""The simulated engine has no logits."""


@pytest.fixture(scope="module")
def sim(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    port = unused_port()
    command = [sys.executable, "-m", "bridge", "serve", "sim", "--port", port, "--model-path", tiny_llama]
    flags = ["--max-model-len", "256", "--step-ms", "1"]
    with Worker([*command, *flags], port, tmp_path_factory.mktemp("fuzzed") / "worker.log") as worker:
        yield worker.wait_until_serving()


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", *arguments]
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)


def test_it_prints_a_table_and_ends_with_zero(sim: Worker) -> None:
    done = fuzz("--target", sim.address, "--requests", "600", "--seed", "3", "--without", LACKS)
    assert done.returncode == 0, done.stdout + done.stderr
    head, *rows, note = done.stdout.splitlines()
    assert head.split() == ["valid", "near", "hostile"]
    assert rows[-1].split() == ["total", "300", "150", "150"]
    assert note.startswith("600 requests in ")


def test_one_batch_can_be_sent_again(sim: Worker) -> None:
    done = fuzz(
        "--target", sim.address, "--seed", "3", "--classes", "valid,hostile", "--only", "120", "--without", LACKS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "50 requests in " in done.stdout


def test_a_worker_whose_engine_died_is_a_surprise(sim: Worker) -> None:
    (engine,) = [process for process in sim.tree() if "bridge.plugins.sim" in process.cmdline()]
    engine.kill()
    done = fuzz("--target", sim.address, "--requests", "50", "--classes", "valid")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("! "), done.stdout + done.stderr
