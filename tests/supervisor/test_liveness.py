"""Silence is judged only with work, allows for prompts in hand, and never piles calls up."""

from __future__ import annotations

from bridge.supervisor.control import RankWork
from bridge.supervisor.liveness import STALL_FACTOR, TICK_S, Liveness, LivenessLimits
from bridge.wire.link import LinkError

IDLE: list[RankWork] = []


def busy(*in_flight: int, prompt_tokens: int = 0) -> list[RankWork]:
    return [RankWork(rank, count, prompt_tokens) for rank, count in enumerate(in_flight)]


class Judged:
    """A `Liveness` on a clock of its own, and what it did."""

    def __init__(self, ranks: int = 1, **limits: float) -> None:
        self.now = 100.0
        self.calls: list[tuple[int, int]] = []
        self.deaths: list[str] = []
        self.lost: set[int] = set()
        given = LivenessLimits(**{"interval_s": 1.0, "silence_s": 10.0, "prefill_tps": 100.0, **limits})
        pairs = [(rank, bytes([rank, 0])) for rank in range(ranks)]
        self.judge = Liveness(pairs, given, self._call, self.deaths.append, lambda: self.now)

    def _call(self, identity: bytes, call_id: int) -> None:
        if identity[0] in self.lost:
            raise LinkError("not connected")
        self.calls.append((identity[0], call_id))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end and not self.deaths:
            self.now += TICK_S
            self.judge.tick()

    def answer(self) -> None:
        self.judge.answered(self.calls[-1][1])


def test_one_call_is_out_at_a_time() -> None:
    judged = Judged()
    judged.run(60)
    assert len(judged.calls) == 1
    judged.answer()
    judged.run(1.5)
    assert len(judged.calls) == 2


def test_silence_without_work_is_no_death() -> None:
    judged = Judged()
    judged.run(1000)
    assert not judged.deaths


def test_silence_counts_from_when_the_work_began() -> None:
    judged = Judged()
    judged.run(60)
    judged.judge.work("a", busy(3))
    judged.run(9.5)
    assert not judged.deaths
    judged.run(1.0)
    assert judged.deaths == [
        "rank 0 does not answer: 10.0 s of silence with 3 requests in flight are the limit (--silence-secs 10)"
    ]


def test_an_answer_starts_the_count_again_and_work_that_ends_stops_it() -> None:
    judged = Judged()
    judged.judge.work("a", busy(1))
    for _ in range(5):
        judged.run(8)
        judged.answer()
    judged.judge.work("a", busy(0))
    judged.run(100)
    assert not judged.deaths


def test_prompts_in_hand_extend_the_limit() -> None:
    judged = Judged()
    judged.judge.work("a", busy(1, prompt_tokens=1000))
    judged.run(19.5)
    assert not judged.deaths
    judged.run(2)
    assert judged.deaths and "20.0 s of silence" in judged.deaths[0] and "10.0 s of it for prompts" in judged.deaths[0]


def test_a_rate_of_zero_is_no_extension() -> None:
    judged = Judged(prefill_tps=0)
    judged.judge.work("a", busy(1, prompt_tokens=10_000_000))
    judged.run(11)
    assert judged.deaths


def test_work_of_all_front_ends_counts_and_that_of_a_gone_one_does_not() -> None:
    judged = Judged()
    judged.judge.work("a", busy(1))
    judged.judge.work("b", busy(2))
    judged.judge.work("a", IDLE)
    judged.run(9)
    judged.judge.work("b", IDLE)
    judged.run(100)
    assert not judged.deaths


def test_each_rank_is_judged_by_itself() -> None:
    judged = Judged(ranks=2)
    judged.judge.work("a", busy(1, 1))
    for _ in range(30):
        judged.run(0.5)
        for rank, call_id in judged.calls:
            if rank == 0:
                judged.judge.answered(call_id)
    assert len(judged.deaths) == 1 and judged.deaths[0].startswith("rank 1 ")


def test_a_rank_that_is_not_connected_is_lost() -> None:
    judged = Judged(ranks=2)
    judged.lost.add(1)
    judged.run(5)
    assert judged.deaths == ["lost rank 1: it is not connected any more"]


def test_a_supervisor_that_was_stopped_judges_nothing_by_it() -> None:
    judged = Judged()
    judged.judge.work("a", busy(1))
    judged.run(2)
    judged.now += 100 + STALL_FACTOR * TICK_S
    judged.judge.tick()
    judged.run(5)
    judged.answer()
    judged.run(5)
    assert not judged.deaths


def test_without_an_interval_nothing_is_called() -> None:
    judged = Judged(interval_s=0)
    assert judged.judge.silence() == {0: 0.0}
