"""HTTP clients for gateways and engines' own servers, and what they are asked."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tests.running import Running, unused_port


def chat_text(question: str) -> str:
    """One user turn in SmolLM2's chat template, without its default system message."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def wait_until_ready(gateway: Running, base: str, timeout: float = 60.0) -> str:
    """Until the gateway answers a chat; the name of its model."""
    until = time.monotonic() + timeout
    while True:
        gateway.must_run("starting")
        try:
            model: str = get_json(f"{base}/v1/models")["data"][0]["id"]
            hello = [{"role": "user", "content": "Hi"}]
            post_json(f"{base}/v1/chat/completions", {"model": model, "messages": hello, "max_tokens": 1})
            return model
        except urllib.error.HTTPError as error:
            problem = str(error)
            error.close()
        except (OSError, IndexError) as error:
            problem = str(error)
        assert time.monotonic() < until, f"not ready within {timeout} s: {problem}\n{gateway.output()[-4000:]}"
        time.sleep(0.2)


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


def post_json(url: str, body: dict[str, Any], timeout: float = 120.0) -> Any:
    with urllib.request.urlopen(_request(url, body), timeout=timeout) as reply:
        return json.load(reply)


def post_events(url: str, body: dict[str, Any], timeout: float = 120.0) -> Iterator[dict[str, Any]]:
    """The JSON events of a streamed answer."""
    with urllib.request.urlopen(_request(url, {**body, "stream": True}), timeout=timeout) as reply:
        for line in reply:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                yield json.loads(data)


def _request(url: str, body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})


class Addressed(Protocol):
    """A worker, as far as a gateway is concerned."""

    address: str


class Gateway(Running):
    """A gateway; `base` is its URL."""

    base: str


@contextmanager
def vllm_router(binary: Path, tokenizer: Path, log: Path, *workers: Addressed) -> Iterator[Gateway]:
    """The real vllm-router in front of workers that serve vllm.Inference; `tokenizer` is a model folder."""
    port = unused_port()
    urls = [f"grpc://{worker.address}" for worker in workers]
    flags = ["--host", "127.0.0.1", "--port", port, "--prometheus-port", unused_port(), "--policy", "round_robin"]
    checks = ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    command = [binary, "--worker-urls", *urls, *flags, *checks]
    with Gateway(command, log, {"VLLM_ROUTER_TOKENIZER": str(tokenizer)}) as gateway:
        gateway.base = f"http://127.0.0.1:{port}"
        wait_until_ready(gateway, gateway.base)
        yield gateway
