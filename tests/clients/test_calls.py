"""Calls of every kind, from clients that we did not write."""

from __future__ import annotations

import time

import pytest

from bridge.plugins.sim.tokens import expected_tokens
from tests.abuse.target import Target
from tests.clients.asking import CallError, Client, Connect, How
from tests.clients.conftest import Opener
from tests.clients.talk import GENERATE, SERVICE, flush_cache, healthy, must_generate, prompt_of, request, tokens_of

LONG = 1_000_000
"""Tokens of a request that no test waits for; the context cuts them to some 200,000, a minute's worth."""


def test_unary(client: Client) -> None:
    assert healthy(client)


def test_streamed_tokens(client: Client) -> None:
    assert must_generate(client, tokens=1000) == 1000


def test_one_message_with_all_tokens(client: Client) -> None:
    assert must_generate(client, tokens=1000, stream=False) == 1000


def test_fifty_streams_on_one_connection(client: Client, target: Target) -> None:
    prompts = [prompt_of(30, seed) for seed in range(50)]
    streams = [client.stream(GENERATE, request(prompt, 400)) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        assert tokens_of(stream) == expected_tokens(prompt, 400)
    target.must_forget()


def test_cancellation_reaches_the_engine(client: Client, target: Target) -> None:
    streams = [client.stream(GENERATE, request(prompt_of(20), LONG)) for _ in range(5)]
    for stream in streams:
        next(iter(stream))
    assert target.requests() == {"running": 5, "waiting": 0, "table": 5}
    for stream in streams:
        stream.cancel()
    target.must_forget()
    assert healthy(client)


def test_a_deadline_ends_the_call_and_the_engines_work(client: Client, target: Target) -> None:
    started = time.monotonic()
    with pytest.raises(CallError) as caught:
        tokens_of(client.stream(GENERATE, request(prompt_of(20), LONG), How(timeout_s=0.4)))
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert 0.3 < time.monotonic() - started < 2.0
    target.must_forget()


def test_a_deadline_of_a_unary_call(client: Client, target: Target) -> None:
    busy = client.stream(GENERATE, request(prompt_of(20), LONG))
    next(iter(busy))
    with pytest.raises(CallError) as caught:
        flush_cache(client, 30.0, How(timeout_s=0.3))
    assert caught.value.code == "DEADLINE_EXCEEDED"
    busy.cancel()
    target.must_forget()


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_of_100_000_tokens(client: Client, stream: bool) -> None:
    assert must_generate(client, size=100_000, tokens=2000, stream=stream) == 2000


def test_an_answer_of_a_quarter_of_a_megabyte(name: str, connected: Opener, wide: Target) -> None:
    """100,000 tokens in one message."""
    assert must_generate(connected(name, Connect(wide.address)), tokens=100_000, stream=False) == 100_000


def test_metadata_of_text_and_bytes(client: Client) -> None:
    every_byte = bytes(range(256))
    metadata = (("x-text", "plain ~ text"), ("x-many", "1"), ("x-many", "2"), ("x-raw-bin", every_byte))
    assert must_generate(client, How(metadata=(*metadata, ("x-long-bin", every_byte * 20)))) == 300


def test_too_much_metadata_is_refused_by_name(client: Client) -> None:
    with pytest.raises(CallError) as caught:
        healthy(client, How(metadata=[(f"x-{number}", "y" * 300) for number in range(60)]))
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert healthy(client)


def test_a_refusal_has_its_code_and_its_words(client: Client) -> None:
    with pytest.raises(CallError) as caught:
        tokens_of(client.stream(GENERATE, request([31_999, 32_000], 5)))
    assert caught.value.code == "INVALID_ARGUMENT"
    assert caught.value.message == "input_ids[1] is 32000; it must be a token id below 32000"


def test_an_unknown_method(client: Client) -> None:
    with pytest.raises(CallError) as caught:
        client.unary(SERVICE + "Nope", b"")
    assert caught.value.code == "UNIMPLEMENTED"


def test_gzip(name: str, connected: Opener, target: Target) -> None:
    client = connected(name, Connect(target.address, gzip=True))
    assert healthy(client)
    must_generate(client, size=100_000, tokens=50)


def test_an_idle_unary_call_with_keepalive_pings(name: str, connected: Opener, target: Target) -> None:
    """A client that pings ten times a second while it waits three seconds is not told ENHANCE_YOUR_CALM."""
    other = connected("grpcio", Connect(target.address))
    busy = other.stream(GENERATE, request(prompt_of(20), LONG))
    next(iter(busy))
    client = connected(name, Connect(target.address, ping_every_s=0.1))
    started = time.monotonic()
    assert "1 requests are running" in flush_cache(client, 3.0).message
    assert time.monotonic() - started > 2.9
    must_generate(client, stream=False, tokens=3200)
    busy.cancel()
    target.must_forget()
    assert "too_many_pings" not in target.output() and "ping_flood" not in target.output()
