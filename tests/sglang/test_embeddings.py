"""An SGLang engine that serves embeddings, asked through the lane."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.peer import Message, Peer

PROMPT = [1, 70, 101, 108, 40, 55]


@pytest.fixture(scope="module")
def embedder(sglang_python: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    with Peer(tmp_path_factory.mktemp("embed")) as peer:
        yield peer.up(sglang_python, tiny_llama, "--is-embedding")


def vectors(peer: Peer, *rids: str) -> dict[str, Message]:
    """The message in which each request ended."""
    found: dict[str, Message] = {}
    for message in peer.messages():
        found.update((rid, message) for rid in message["rids"] or ())
        if set(rids) <= set(found):
            return found
    raise AssertionError(f"only {list(found)} ended")


def test_one_normalized_vector_a_prompt(embedder: Peer) -> None:
    embedder.embed("one", PROMPT)
    embedder.embed("two", [*PROMPT, 99])
    ended = vectors(embedder, "one", "two")
    for rid, length in (("one", len(PROMPT)), ("two", len(PROMPT) + 1)):
        message = ended[rid]
        row = message["rids"].index(rid)
        assert message.kind == "BatchEmbeddingSlimOutput" and message["finished_reasons"][row] == "length"
        assert math.isclose(math.hypot(*message["embeddings"][row]), 1.0, abs_tol=1e-4)
        assert message["prompt_tokens"][row] == length and message["finished_status"][row] is None


def test_what_cannot_be_embedded_ends_with_400(embedder: Peer) -> None:
    embedder.embed("outside", [1, 400])
    assert "input_ids has 400" in embedder.answers("outside")["outside"].last["finished_messages"]
    embedder.embed("cut", PROMPT, dimensions=8)
    assert "dimensions is 8" in embedder.answers("cut")["cut"].last["finished_messages"]
    embedder.generate("words", PROMPT)
    assert "not generation" in embedder.answers("words")["words"].last["finished_messages"]
