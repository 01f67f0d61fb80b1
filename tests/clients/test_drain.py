"""The server is told to stop while streams run, and started while clients wait."""

from __future__ import annotations

import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bridge.plugins.sim.tokens import expected_tokens
from tests.abuse.target import Target
from tests.clients.asking import CallError, Connect, How
from tests.clients.conftest import CLIENTS, FAST, Opener
from tests.clients.talk import GENERATE, healthy, prompt_of, request, tokens_of

STREAMS = 10
TOKENS = 4800
"""A second and a half of them."""


def test_streams_of_every_client_finish(connected: Opener) -> None:
    """SIGTERM: the first GOAWAY, the last one, every token of every open stream, and a server that ends with 0."""
    with TemporaryDirectory(prefix="drain-") as path, Target(Path(path), *FAST, "--drain-secs", 10) as server:
        server.wait_until_serving()
        clients = {name: connected(name, Connect(server.address)) for name in CLIENTS}
        prompts = [prompt_of(20, seed) for seed in range(STREAMS)]
        streams = {
            name: [client.stream(GENERATE, request(prompt, TOKENS)) for prompt in prompts]
            for name, client in clients.items()
        }
        firsts = {name: [next(iter(stream)) for stream in made] for name, made in streams.items()}
        server.process.send_signal(signal.SIGTERM)
        for name, made in streams.items():
            for prompt, first, stream in zip(prompts, firsts[name], made, strict=True):
                assert tokens_of([first, *stream]) == expected_tokens(prompt, TOKENS), name
        assert server.process.wait(10) == 0
        assert "Traceback" not in server.output()


def test_what_the_drain_does_not_wait_for_gets_its_terminal(name: str, connected: Opener) -> None:
    """At the drain's end each stream that still runs is aborted with a terminal, and calls after it are UNAVAILABLE."""
    with TemporaryDirectory(prefix="drain-") as path, Target(Path(path), *FAST, "--drain-secs", 0.5) as server:
        server.wait_until_serving()
        client = connected(name, Connect(server.address))
        stream = client.stream(GENERATE, request(prompt_of(20), 100_000))
        messages = [next(iter(stream))]
        server.process.send_signal(signal.SIGTERM)
        messages += stream
        assert b"abort" in messages[-1]
        assert server.process.wait(10) == 0
        with pytest.raises((CallError, OSError, AssertionError)) as caught:
            healthy(client, How(timeout_s=5.0))
        assert not isinstance(caught.value, CallError) or caught.value.code == "UNAVAILABLE"


@pytest.mark.parametrize("name", ["grpcio", "grpcio-aio", "grpc-js"])
def test_a_client_that_waits_for_the_server(name: str, connected: Opener) -> None:
    with TemporaryDirectory(prefix="wait-") as path, Target(Path(path), *FAST) as server:
        client = connected(name, Connect(server.address))
        while not healthy(client, How(wait_for_ready=True)):
            server.must_run("waiting")
        assert healthy(client)
