"""SMG's zmq mode: the gateway binds, and `python -m bridge.headless --engine vllm` makes the engine dial it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.gateways import post_events, post_json, wait_until_ready
from tests.running import Running, gone_within, unused_port

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def smg_handshake_port(url: str) -> int:
    """Where smg listens for the engine of a worker URL: 20000 + FNV-1a-64(path) mod 10000 (smg 1.13.0)."""
    value = 0xCBF29CE484222325
    for byte in url.removeprefix("ipc://").encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return 20000 + value % 10000


@pytest.fixture(scope="module")
def gateway(
    smg_binary: Path, vllm_python: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, Running]]:
    """(base URL, model name, the launcher) of smg with an ipc worker, and the engine behind it."""
    folder = tmp_path_factory.mktemp("z")
    worker = f"ipc://{folder}/engine-0"
    port = unused_port()
    smg = [smg_binary, "launch", "--backend", "vllm", "--worker-urls", worker, "--model-path", smollm2]
    address = f"tcp://127.0.0.1:{smg_handshake_port(worker)}"
    engine = [vllm_python, "-m", "bridge.headless", "--engine", "vllm", "--zmq-handshake-address", address]
    flags = ["--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager"]
    cache = ["--kv-cache-memory-bytes", "134217728"]
    with (
        Running(
            [*smg, "--host", "127.0.0.1", "--port", port, "--prometheus-port", unused_port()], folder / "smg.log"
        ) as router,
        Running([*engine, smollm2, *flags, *cache], folder / "engine.log") as launcher,
    ):
        base = f"http://127.0.0.1:{port}"
        yield base, wait_until_ready(router, base, timeout=180), launcher


def test_chat_through_the_gateway_says_paris(gateway: tuple[str, str, Running]) -> None:
    base, model, _ = gateway
    body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = post_json(f"{base}/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert "Paris" in whole
    events = list(post_events(f"{base}/v1/chat/completions", body))
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]) == whole


def test_stopping_the_launcher_leaves_no_process(gateway: tuple[str, str, Running]) -> None:
    *_, launcher = gateway
    tree = launcher.tree()
    assert any("EngineCore" in " ".join(one.cmdline()) for one in tree), [one.cmdline() for one in tree]
    code = launcher.stop()
    assert code == 0
    left = gone_within([one for one in tree if one.pid != psutil.Process().pid], 5)
    assert not left, left
