"""How a real SGLang scheduler is started on the CPU."""

from __future__ import annotations

from pathlib import Path

ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}

TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""SGLang wants to know the cores of each rank where it finds fewer memory nodes than ranks."""

FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph", "--disable-overlap-schedule"),
    *("--dtype", "float32", "--max-total-tokens", "8192", "--grammar-backend", "xgrammar", "--sleep-on-idle"),
)

RANK = "sglang::scheduler"
"""How SGLang titles a rank."""


def headless(python: Path, address: str, model: Path, *more: str) -> list[str | Path]:
    """The command line of an engine behind somebody else's handshake."""
    command = [python, "-m", "bridge.headless", "--engine", "sglang", "--zmq-handshake-address", address]
    return [*command, "--model-path", model, *FLAGS, *more]
