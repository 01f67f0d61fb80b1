"""One real vLLM engine behind the bridge for the whole session, vLLM's own HTTP server, and the real smg in front."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.gateways import vllm_router, wait_until_ready
from tests.running import Running, Worker, unused_port

ENGINE_FLAGS = (
    "--dtype",
    "float32",
    "--max-model-len",
    "1024",
    "--max-num-seqs",
    "8",
    "--enforce-eager",
    "--kv-cache-memory-bytes",
    "268435456",
)

CONTRACTS = ("--contract", "vllm.grpc.engine", "--contract", "vllm.Inference", "--contract", "vllm.engine.v1")


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def served(vllm_python: Path, smollm2: Path, logs: Path) -> Iterator[Worker]:
    """`serve vllm` with SmolLM2 in float32, for SMG and for vLLM Router."""
    port = unused_port()
    command = [vllm_python, "-m", "bridge", "serve", "vllm", smollm2, "--port", port, *CONTRACTS]
    with Worker([*command, "--served-model-name", "smol", *ENGINE_FLAGS], port, logs / "served.log") as worker:
        worker.wait_until_serving()
        yield worker


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="session")
def vllm_http(vllm_python: Path, smollm2: Path, logs: Path) -> Iterator[str]:
    """vLLM's own HTTP server on the same model and flags; its base URL."""
    port = unused_port()
    command = [vllm_python, "-m", "vllm.entrypoints.cli.main", "serve", smollm2, "--port", port]
    with Running([*command, "--host", "127.0.0.1", *ENGINE_FLAGS], logs / "vllm_http.log") as server:
        server.wait_for("Application startup complete", 300)
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def smg(smg_binary: Path, served: Worker, smollm2: Path, logs: Path) -> Iterator[str]:
    """The real smg gateway in front of `served`; its base URL."""
    port = unused_port()
    command = [smg_binary, "launch", "--worker-urls", f"grpc://{served.address}", "--model-path", smollm2]
    flags = ["--host", "127.0.0.1", "--port", port, "--prometheus-port", unused_port()]
    with Running([*command, *flags], logs / "smg.log") as gateway:
        base = f"http://127.0.0.1:{port}"
        wait_until_ready(gateway, base)
        yield base


@pytest.fixture(scope="session")
def router(router_binary: Path, served: Worker, smollm2: Path, logs: Path) -> Iterator[str]:
    """The real vllm-router in front of `served`; its base URL."""
    with vllm_router(router_binary, smollm2, logs / "router.log", served) as gateway:
        yield gateway.base
