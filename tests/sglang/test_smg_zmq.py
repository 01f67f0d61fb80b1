"""SMG's zmq mode: the gateway binds, and our launcher makes the engine dial it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateways import wait_until_ready
from tests.running import Running, gone_within, unused_port
from tests.sglang import gateway_cases as cases
from tests.sglang.engines import ENVIRONMENT, RANK, headless


def smg_handshake_port(url: str) -> int:
    """Where smg listens for the engine of a worker URL: 20000 + FNV-1a-64(path) mod 10000 (smg 1.13.0)."""
    value = 0xCBF29CE484222325
    for byte in url.removeprefix("ipc://").encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return 20000 + value % 10000


@pytest.fixture(scope="module")
def gateway(
    smg_binary: Path, sglang_python: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, Running]]:
    """(base URL, model name, the launcher) of smg with an ipc worker, and the engine behind it."""
    folder = tmp_path_factory.mktemp("z")
    worker = f"ipc://{folder}/engine-0"
    port = unused_port()
    smg = [smg_binary, "launch", "--backend", "sglang", "--worker-urls", worker, "--model-path", smollm2]
    smg += ["--host", "127.0.0.1", "--port", port, "--prometheus-port", unused_port()]
    address = f"tcp://127.0.0.1:{smg_handshake_port(worker)}"
    engine = headless(sglang_python, address, smollm2, "--decode-log-interval", "1")
    with (
        Running(smg, folder / "smg.log") as router,
        Running(engine, folder / "engine.log", ENVIRONMENT) as launcher,
    ):
        base = f"http://127.0.0.1:{port}"
        yield base, wait_until_ready(router, base, timeout=180), launcher


def test_chat_answers_paris_whole_and_streamed(gateway: tuple[str, str, Running]) -> None:
    assert "Paris" in cases.chat_says_paris(*gateway[:2])


def test_logprobs_of_each_token(gateway: tuple[str, str, Running]) -> None:
    assert cases.logprobs_come_once(*gateway[:2]) > 3


def test_a_json_schema_shapes_the_answer(gateway: tuple[str, str, Running]) -> None:
    assert set(cases.a_schema_shapes_the_answer(*gateway[:2])) == {"city", "population"}


def test_a_client_that_disconnects_frees_the_engine(gateway: tuple[str, str, Running]) -> None:
    """The scheduler logs every step here, and logs none any more within a second."""
    base, model, launcher = gateway

    def steps() -> int:
        return launcher.output().count("Decode batch")

    with cases.streaming(base, model):
        begun = steps()
        time.sleep(0.5)
        assert steps() > begun
    time.sleep(1.0)
    ended = steps()
    time.sleep(1.0)
    assert steps() == ended


def test_stopping_the_launcher_leaves_no_process(gateway: tuple[str, str, Running]) -> None:
    *_, launcher = gateway
    tree = launcher.tree()
    assert any(RANK in " ".join(one.cmdline()) for one in tree), [one.cmdline() for one in tree]
    assert launcher.stop() == 0
    assert not gone_within(tree, 5)
