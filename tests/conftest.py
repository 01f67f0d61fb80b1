"""What tests share: the environments and models they run against (made on first use, never skipped)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.running import OFFLINE

ROOT = Path(__file__).resolve().parent.parent

ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Several engines run at once here. vLLM 0.32 would pin the threads of each to the same core: start-up took 85 s with
two others running, 36 s without the pinning."""

NO_RESTARTS = {"BRIDGE_RESTART": "never"}
"""An engine that dies where no test expects it must not be back before anybody looks."""

os.environ.update(OFFLINE | ONE_THREAD | NO_RESTARTS)


settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


def _built(target: str, path: str) -> Path:
    """`path` in the checkout, after build.py has brought `target` up to date."""
    command = [sys.executable, str(ROOT / "tests/environments/build.py"), target]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{target} could not be built:\n{done.stdout}{done.stderr}", pytrace=False)
    return ROOT / path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, a real model: bfloat16, vocabulary 49152, EOS 2."""
    return _built("model", ".models/SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """A random two-layer Llama: bfloat16, byte-level vocabulary 259, EOS 2, context 2048."""
    return _built("tiny", ".models/tiny-llama")


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter that has vLLM 0.32 (CPU) and the bridge."""
    return _built("vllm", ".envs/vllm/bin/python")


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The interpreter that has SGLang 0.5.23 (CPU, kernels stood in for) and the bridge."""
    return _built("sglang", ".envs/sglang/bin/python")


@pytest.fixture(scope="session")
def smg_binary() -> Path:
    """The `smg` command of SMG 1.13."""
    return _built("smg", ".envs/smg/bin/smg")


@pytest.fixture(scope="session")
def router_binary() -> Path:
    """The `vllm-router` command of vLLM Router 0.1.17."""
    return _built("router", ".envs/router/bin/vllm-router")


@pytest.fixture(scope="session")
def vllm_rs_binary() -> Path:
    """vLLM's Rust front end 0.33.0, `vllm-rs`."""
    return _built("vllm-rs", ".envs/vllm-rs/bin/vllm-rs")
