"""Real SGLang schedulers on the CPU, shared as widely as their tests allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateways import wait_until_ready
from tests.running import Running, unused_port
from tests.sglang.engines import ENVIRONMENT, FLAGS
from tests.sglang.peer import Peer
from tests.sglang.worker import SglangWorker


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def lane(sglang_python: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """The lane of one rank with a tiny Llama, three slots offered."""
    with Peer(tmp_path_factory.mktemp("lane"), slots=3) as peer:
        yield peer.up(sglang_python, tiny_llama, "--enable-return-hidden-states")


@pytest.fixture(scope="session")
def served(sglang_python: Path, smollm2: Path, logs: Path) -> Iterator[SglangWorker]:
    """`serve sglang` with SmolLM2 in float32."""
    port = unused_port()
    flags = ("--served-model-name", "smol", "--enable-return-hidden-states", "--enable-custom-logit-processor")
    with SglangWorker(sglang_python, smollm2, port, logs / "served.log", flags) as worker:
        yield worker.wait_until_serving()


@pytest.fixture(scope="session")
def smg(smg_binary: Path, served: SglangWorker, smollm2: Path, logs: Path) -> Iterator[str]:
    """The real smg gateway in front of `served`; its base URL."""
    port = unused_port()
    command = [smg_binary, "launch", "--worker-urls", f"grpc://{served.address}", "--model-path", smollm2]
    flags = ["--host", "127.0.0.1", "--port", port, "--prometheus-port", unused_port()]
    with Running([*command, *flags], logs / "smg.log") as gateway:
        base = f"http://127.0.0.1:{port}"
        wait_until_ready(gateway, base)
        yield base


@pytest.fixture(scope="session")
def contracts(sglang_python: Path, smollm2: Path, logs: Path) -> Iterator[SglangWorker]:
    """`serve sglang` with SmolLM2 in float32, by every contract that it can be served by."""
    port = unused_port()
    flags = ["--served-model-name", "smol", "--contract", "sglang.grpc.scheduler"]
    flags += ["--contract", "vllm.Inference", "--contract", "vllm.engine.v1"]
    with SglangWorker(sglang_python, smollm2, port, logs / "contracts.log", flags) as worker:
        yield worker.wait_until_serving()


@pytest.fixture(scope="session")
def own_server(sglang_python: Path, smollm2: Path, logs: Path) -> Iterator[str]:
    """SGLang's own HTTP server on the same model and flags; its base URL."""
    port = unused_port()
    command = [sglang_python, "-m", "sglang.launch_server", "--model-path", smollm2, "--port", port, *FLAGS]
    with Running([*command, "--host", "127.0.0.1"], logs / "own_server.log", ENVIRONMENT) as server:
        server.wait_for("fired up and ready to roll", 240)
        yield f"http://127.0.0.1:{port}"
