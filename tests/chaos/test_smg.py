"""The real smg at its defaults in front, 64 HTTP streams through it, and front ends that are replaced behind it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.served import QUICK, Served
from tests.gateways import wait_until_ready
from tests.running import Running, unused_port

UPGRADES = 50
STREAMS = 64
TOKENS = 8


@pytest.fixture
def served(tmp_path: Path, smollm2: Path) -> Iterator[Served]:
    with Served(tmp_path, *QUICK, "--model", smollm2, "--served-model-name", "smol", step_ms=50) as worker:
        worker.wait_until_serving(30)
        yield worker


@pytest.fixture
def smg(smg_binary: Path, served: Served, smollm2: Path, tmp_path: Path) -> Iterator[str]:
    port = unused_port()
    command = [smg_binary, "launch", "--worker-urls", f"grpc://{served.address}", "--model-path", smollm2]
    command += ["--host", "127.0.0.1", "--port", port, "--prometheus-port", unused_port()]
    with Running(command, tmp_path / "smg.log") as gateway:
        base = f"http://127.0.0.1:{port}"
        wait_until_ready(gateway, base)
        yield base


class Crowd:
    """`STREAMS` threads that chat until told to stop, each at its own pace.

    Not in step: smg 1.13 takes a worker out of service after ten failures, and its client (hyper 1) fails every call that
    is handed to a connection in the very instant in which it finds the GOAWAY there.
    """

    def __init__(self, base: str) -> None:
        self.ends: Counter[str] = Counter()
        self._base = base
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._chat, args=(number,), daemon=True) for number in range(STREAMS)]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"

    async def flows(self, calls: int = STREAMS) -> None:
        start = self.ends["whole"]
        async with asyncio.timeout(60):
            while self.ends["whole"] < start + calls:
                await asyncio.sleep(0.05)

    def _chat(self, number: int) -> None:
        count = 0
        while not self._stopping.is_set():
            count += 1
            time.sleep((number * 13 + count * 29) % 97 / 1000)
            try:
                self.ends[self._one(f"{number} {count}")] += 1
            except (OSError, ValueError) as error:
                self.ends[f"{type(error).__name__}: {error}"] += 1

    def _one(self, question: str) -> str:
        body = {
            "model": "smol",
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"{self._base}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        finish, tokens, done = None, 0, False
        with urllib.request.urlopen(request, timeout=60) as reply:
            for line in reply:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    done = True
                elif data:
                    event = json.loads(data)
                    for choice in event.get("choices", ()):
                        finish = choice.get("finish_reason") or finish
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        whole = (finish, tokens, done) == ("length", TOKENS, True)
        return "whole" if whole else f"cut: {finish}, {tokens} tokens, {'' if done else 'not '}done"


async def test_fifty_upgrades_behind_smg_fail_nothing(served: Served, smg: str) -> None:
    engine = served.engine.pid
    with Crowd(smg) as crowd:
        await crowd.flows()
        for number in range(UPGRADES):
            done = await asyncio.to_thread(served.order, "reload")
            assert done.returncode == 0, (number, done.stderr)
        await crowd.flows()
    assert set(crowd.ends) == {"whole"}, crowd.ends
    assert served.engine.pid == engine
    await served.engine_runs(set(), 2.0)
