"""tonic, inside the real smg gateway: HTTP requests in token ids that it passes on over gRPC."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from bridge.plugins.sim.model import facts_of, vocabulary_of
from bridge.plugins.sim.options import parse
from bridge.plugins.sim.tokens import Vocabulary, expected_tokens
from tests.abuse.target import Target
from tests.clients.conftest import FAST
from tests.gateways import post_events, post_json, wait_until_ready
from tests.running import Running, unused_port

ALPHABET = 256
"""Token ids of the tiny model's tokenizer, its special ones aside, start at 3."""


class Gateway:
    """An smg in front of a served engine."""

    def __init__(self, base: str, model: str, target: Target, vocabulary: Vocabulary) -> None:
        self.base = base
        self.model = model
        self.target = target
        self._vocabulary = vocabulary

    def body(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return {"model": self.model, "input_ids": prompt, "sampling_params": sampling}

    def must_generate(self, prompt: list[int], tokens: int) -> int:
        """The right answer, whole; how many tokens it has."""
        (answer,) = post_json(f"{self.base}/generate", self.body(prompt, tokens))
        assert answer["output_ids"] == expected_tokens(prompt, tokens, vocab=self._vocabulary)
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": tokens}
        return len(answer["output_ids"])

    def must_stream(self, prompt: list[int], tokens: int) -> int:
        """The right answer, streamed; how many tokens it has.

        The last event repeats the tokens of the one before it, with the reason of the end.
        """
        got: list[int] = []
        finish = None
        for event in post_events(f"{self.base}/generate", self.body(prompt, tokens)):
            finish = event["meta_info"]["finish_reason"]
            if event["meta_info"]["completion_tokens"] > len(got):
                got += event["output_ids"]
        assert got == expected_tokens(prompt, tokens, vocab=self._vocabulary)
        assert finish == "length"
        return len(got)


@contextmanager
def gateway_before(smg: Path, model: Path, folder: Path, host: str = "127.0.0.1", *flags: object) -> Iterator[Gateway]:
    vocabulary = vocabulary_of(facts_of(parse(["--model-path", str(model)])))
    with Target(folder, *FAST, "--model-path", model, *flags, host=host) as target:
        target.wait_until_serving()
        port = unused_port()
        command: list[str | Path] = [smg, "launch", "--worker-urls", f"grpc://{target.address}", "--model-path", model]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(unused_port())]
        with Running(command, folder / "smg.log") as running:
            base = f"http://127.0.0.1:{port}"
            yield Gateway(base, wait_until_ready(running, base), target, vocabulary)


@pytest.fixture(scope="module")
def gateway(smg_binary: Path, tiny_llama: Path, place: Path) -> Iterator[Gateway]:
    folder = place / "smg"
    folder.mkdir()
    with gateway_before(smg_binary, tiny_llama, folder) as made:
        yield made


def prompt_of(size: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 31 + place * 7) % ALPHABET for place in range(size)]


def test_a_whole_answer(gateway: Gateway) -> None:
    assert gateway.must_generate(prompt_of(20), 1000) == 1000


def test_streamed_tokens(gateway: Gateway) -> None:
    assert gateway.must_stream(prompt_of(20), 1000) == 1000


def test_fifty_streams(gateway: Gateway) -> None:
    with ThreadPoolExecutor(50) as pool:
        counts = list(pool.map(lambda seed: gateway.must_stream(prompt_of(30, seed), 400), range(50)))
    assert counts == [400] * 50
    gateway.target.must_forget()


def test_a_prompt_of_100_000_tokens(gateway: Gateway) -> None:
    assert gateway.must_generate(prompt_of(100_000), 500) == 500


def test_a_client_that_leaves_ends_the_engines_work(gateway: Gateway) -> None:
    port = int(gateway.base.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    body = {**gateway.body(prompt_of(20), 1_000_000), "stream": True}
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data: ")
    assert gateway.target.requests() == {"running": 1, "waiting": 0, "table": 1}
    connection.close()
    gateway.target.must_forget()


def test_streams_finish_when_the_server_is_told_to_stop(smg_binary: Path, tiny_llama: Path) -> None:
    with (
        TemporaryDirectory(prefix="smg-") as path,
        gateway_before(smg_binary, tiny_llama, Path(path), "127.0.0.1", "--drain-secs", 10) as gateway,
        ThreadPoolExecutor(8) as pool,
    ):
        streams = [pool.submit(gateway.must_stream, prompt_of(20, seed), 4800) for seed in range(8)]
        while gateway.target.requests()["running"] < 8:
            gateway.target.must_run("streaming")
        gateway.target.process.send_signal(signal.SIGTERM)
        for stream in streams:
            stream.result(20)
        assert gateway.target.process.wait(10) == 0


def test_a_worker_on_ipv6(smg_binary: Path, tiny_llama: Path) -> None:
    with (
        TemporaryDirectory(prefix="smg-") as path,
        gateway_before(smg_binary, tiny_llama, Path(path), "::1") as gateway,
    ):
        assert gateway.must_stream(prompt_of(20), 300) == 300
