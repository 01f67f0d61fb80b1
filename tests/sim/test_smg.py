"""The real SMG gateway in its zmq mode, with the simulated engine dialling it."""

from __future__ import annotations

import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from bridge.plugins.sim.control import SimControl
from bridge.plugins.sim.model import facts_of, vocabulary_of
from bridge.plugins.sim.options import parse
from bridge.plugins.sim.tokens import expected_tokens
from tests.gateways import get_json, post_events, post_json, wait_until_ready
from tests.running import Running, unused_port
from tests.sim.front_end import ROOT

BODY = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 12}


def handshake_port(path: Path) -> int:
    """Where smg 1.13 waits for the engine of `ipc://path`: 20000 + FNV-1a-64(path) mod 10000."""
    value = 0xCBF29CE484222325
    for byte in str(path).encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return 20000 + value % 10000


@pytest.fixture
def gateway(smg_binary: Path, smollm2: Path, folder: Path) -> Iterator[str]:
    """Base URL of an smg whose only worker is the simulated engine."""
    worker = folder / "engine-0"
    port = unused_port()
    router = [smg_binary, "launch", "--backend", "vllm", "--worker-urls", f"ipc://{worker}", "--model-path", smollm2]
    router += ["--host", "127.0.0.1", "--port", port, "--prometheus-port", unused_port()]
    engine = [sys.executable, "-m", "bridge.plugins.sim", "--model-path", smollm2, "--step-ms", "5"]
    engine += ["--zmq-handshake-address", f"tcp://127.0.0.1:{handshake_port(worker)}"]
    engine += ["--control-address", f"ipc://{folder}/control"]
    with (
        Running(router, folder / "smg.log") as smg,
        Running(engine, folder / "sim.log", {"PYTHONPATH": str(ROOT)}) as sim,
    ):
        base = f"http://127.0.0.1:{port}"
        sim.wait_for("ready", 60)
        wait_until_ready(smg, base)
        yield base


def answered(base: str, body: dict[str, Any]) -> dict[str, Any]:
    """The first chat answer; smg refuses with 503 until its own health probe has passed."""
    end = time.monotonic() + 60
    while True:
        try:
            answer = post_json(f"{base}/v1/chat/completions", body)
            assert isinstance(answer, dict)
            return answer
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            assert error.code == 503 and time.monotonic() < end, text
            time.sleep(0.2)


def test_chat_through_smgs_zmq_mode(gateway: str, smollm2: Path, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    body = {"model": get_json(f"{gateway}/v1/models")["data"][0]["id"], **BODY}
    answer = answered(gateway, body)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 12)
    text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    text += "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    vocab = vocabulary_of(facts_of(parse(["--model-path", str(smollm2)])))
    tokens = expected_tokens(tokenizer.encode(text, add_special_tokens=False).ids, 12, vocab=vocab)
    assert choice["message"]["content"] == tokenizer.decode(tokens)
    events = list(post_events(f"{gateway}/v1/chat/completions", body))
    streamed = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    assert streamed == choice["message"]["content"]
    with SimControl(f"ipc://{folder}/control") as control:
        state = control.state()
    assert (state["running"], state["aborted"]) == (0, 0)
