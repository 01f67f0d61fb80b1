"""Several ranks, the ends they come to, and what is left of them: nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.running import gone_within
from tests.sglang.engines import RANK, TWO_RANKS
from tests.sglang.peer import Peer

PROMPT = [1, 70, 101, 108, 40, 55]
LONG = {"max_new_tokens": 1500, "ignore_eos": True}
TOLD_S = 5.0
"""For a last word to come: a rank that decodes says it within one step."""
GONE_S = 10.0


@pytest.fixture(scope="module")
def parallel(sglang_python: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """Two data-parallel ranks."""
    with Peer(tmp_path_factory.mktemp("dp"), ranks=2) as peer:
        yield peer.up(sglang_python, tiny_llama, "--dp-size", "2", environment=TWO_RANKS)


def ranks(peer: Peer) -> list[psutil.Process]:
    assert peer.engine is not None
    found = []
    for process in peer.engine.tree():
        if any(part.startswith(RANK) for part in process.cmdline()[:1]):
            found.append(process)
    return sorted(found, key=lambda process: " ".join(process.cmdline()))


def test_each_data_parallel_rank_dials_and_answers_for_itself(parallel: Peer) -> None:
    assert sorted(parallel.ready) == [0, 1]
    assert {ready["data_parallel_size"] for ready in parallel.ready.values()} == {2}
    assert [parallel.ready[index]["data_parallel_rank"] for index in (0, 1)] == [0, 1]
    for index in (0, 1):
        parallel.generate(f"rank-{index}", PROMPT, {"max_new_tokens": 12, "ignore_eos": True}, rank=index)
    answers = parallel.answers("rank-0", "rank-1")
    assert answers["rank-0"].tokens == answers["rank-1"].tokens and len(answers["rank-0"].tokens) == 12
    assert [answers[f"rank-{index}"].last["engine_index"] for index in (0, 1)] == [0, 1]


def test_a_killed_rank_ends_the_whole_engine(parallel: Peer) -> None:
    """The peer sees nothing of a SIGKILL; the launcher does, the other rank says its last word, and none is left."""
    assert parallel.engine is not None
    tree = parallel.engine.tree()
    first, _ = ranks(parallel)
    parallel.generate("lost", PROMPT, LONG, rank=0)
    parallel.generate("told", PROMPT, LONG, rank=1)
    next(message for message in parallel.messages() if message["rids"])
    first.send_signal(signal.SIGKILL)
    assert parallel.engine.process.wait(GONE_S) == 1
    assert any(message.kind == "death" for message in parallel.messages(timeout=TOLD_S))
    assert not gone_within(tree, GONE_S)
    assert f"lost process {first.pid}" in parallel.engine.output()


def test_tensor_parallel_ranks_are_one_rank_to_the_front_end(
    sglang_python: Path, tiny_llama: Path, tmp_path: Path, lane: Peer
) -> None:
    alone = lane.ask("alone", PROMPT, {"max_new_tokens": 12, "ignore_eos": True})
    with Peer(tmp_path) as peer:
        peer.up(sglang_python, tiny_llama, "--tp-size", "2", environment=TWO_RANKS)
        assert len(ranks(peer)) == 2
        assert peer.ready[0]["tensor_parallel_size"] == peer.ready[0]["world_size"] == 2
        answer = peer.ask("together", PROMPT, {"max_new_tokens": 12, "ignore_eos": True})
        assert answer.tokens == alone.tokens
        reply = peer.control(7, "flush_cache", 5.0)
        assert (reply["call_id"], reply["success"]) == (7, True)
        peer.generate("cut", PROMPT, LONG)
        next(message for message in peer.messages() if message["rids"])
        tree = peer.engine.tree() if peer.engine else []
        ranks(peer)[0].send_signal(signal.SIGTERM)
        assert any(message.kind == "death" for message in peer.messages(timeout=TOLD_S)), "SIGTERM is told"
        assert peer.engine is not None and peer.engine.process.wait(GONE_S) == 1
        assert not gone_within(tree, GONE_S)


def test_a_launcher_that_is_stopped_lets_the_ranks_say_their_last_word(
    sglang_python: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    with Peer(tmp_path) as peer:
        peer.up(sglang_python, tiny_llama)
        assert peer.engine is not None
        tree = peer.engine.tree()
        peer.generate("cut", PROMPT, LONG)
        next(message for message in peer.messages() if message["rids"])
        peer.engine.process.send_signal(signal.SIGTERM)
        assert any(message.kind == "death" for message in peer.messages(timeout=TOLD_S))
        assert peer.engine.process.wait(GONE_S) == 0
        assert not gone_within(tree, GONE_S)
