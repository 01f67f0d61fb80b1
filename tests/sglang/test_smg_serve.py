"""`python -m bridge.smg serve`: smg's own serve starts our launcher, the engine and the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.smg import OURS, PEER, our_command
from bridge.supervisor.errors import UsageError
from tests.gateways import wait_until_ready
from tests.running import Running, gone_within, unused_port
from tests.sglang import gateway_cases as cases
from tests.sglang.engines import ENVIRONMENT, FLAGS, RANK


@pytest.fixture(scope="module")
def gateway(
    sglang_python: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, Running]]:
    """(base URL, model name, the one command that runs everything)."""
    folder = tmp_path_factory.mktemp("s")
    port = unused_port()
    command = [sglang_python, "-m", "bridge.smg", "serve", "--backend", "sglang", "--connection-mode", "zmq"]
    command += ["--host", "127.0.0.1", "--port", port, "--worker-base-port", unused_port()]
    command += ["--router-prometheus-port", unused_port(), "--model-path", smollm2, *FLAGS]
    environment = {**ENVIRONMENT, "SMG_ZMQ_SOCKET_DIR": str(folder)}
    with Running(command, folder / "serve.log", environment) as serve:
        base = f"http://127.0.0.1:{port}"
        yield base, wait_until_ready(serve, base, timeout=240), serve


def test_chat_logprobs_and_a_schema(gateway: tuple[str, str, Running]) -> None:
    base, model, serve = gateway
    assert "bridge.headless --engine sglang" in serve.output()
    cases.chat_says_paris(base, model)
    cases.logprobs_come_once(base, model)
    cases.a_schema_shapes_the_answer(base, model)


def test_one_stop_ends_everything(gateway: tuple[str, str, Running]) -> None:
    *_, serve = gateway
    tree = serve.tree()
    assert any(RANK in " ".join(one.cmdline()) for one in tree)
    serve.stop()
    assert not gone_within(tree, 10)


def test_only_the_peers_launcher_is_replaced() -> None:
    assert our_command(["py", "-m", PEER, "--port", "1"]) == ["py", "-m", *OURS, "--port", "1"]
    with pytest.raises(UsageError, match="no place for our launcher"):
        our_command(["py", "-m", "sglang.launch_server"])
