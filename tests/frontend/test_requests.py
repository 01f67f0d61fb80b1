"""The request table on vLLM's real wire: steps as the engine encodes them in, frames and rendered results out."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from bridge.contracts.vllm_render import PlainSink
from bridge.grpc.outflow import Outflow
from bridge.grpc.status import Code
from bridge.refusal import Refusal
from bridge.requests import ABORT_HOLD_S, STRANGER_ABORTS_PER_SECOND, Request, RequestTable, Rich, Sequence
from bridge.stops import StopMatcher, StopRules
from bridge.wire.codec import Finish, GenerateCall, Sampling
from bridge.wire.engines import codec_for

RANK = b"\0\0"
ABORT = b"\x01"
STOP, LENGTH, ERROR = 0, 1, 3


class Out:
    """The call a request answers on."""

    blocked = False
    outlet = None


class Recorder:
    """A sink that keeps what it is given."""

    template = None

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []
        self.ends: list[tuple[int, Finish | None, list[int]]] = []
        self.closed = 0
        self.failure: tuple[Code, str] | None = None

    def chunk(self, sequence: Sequence, tokens: list[int]) -> None:
        self.chunks.append(tokens)

    def complete(self, sequence: Sequence) -> None:
        self.ends.append((sequence.index, sequence.finish, list(sequence.output_ids)))

    def close(self) -> None:
        self.closed += 1

    def fail(self, code: Code, message: str) -> None:
        self.failure = (code, message)


class Bench:
    """A table whose engine is this test."""

    def __init__(self, max_in_flight: int = 100) -> None:
        self.codec = codec_for("vllm", {"vllm_version": "0.32.0"}, {}, 1)
        self.sent: list[list[bytes]] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.now = 0.0
        self.sequences: dict[Request, list[Sequence]] = {}
        self.table = RequestTable(
            self.codec,
            lambda rank, frames: self.sent.append(frames),
            "1.1",
            max_in_flight=max_in_flight,
            call_later=lambda delay, call: self.timers.append((delay, call)),
            clock=lambda: self.now,
        )

    def admit(
        self, client_id: str = "", *, samples: int = 1, rich: Callable[[], Rich] | None = None, **given: Any
    ) -> tuple[Request, Recorder, Out]:
        sink, out = Recorder(), Out()
        request = Request(client_id, [1, 2, 3], out, sink, stream=True, arrived=0.0, **given)
        sampling = Sampling(max_tokens=100)
        calls = [
            GenerateCall(wire_id="", prompt_token_ids=[1, 2, 3], sampling=sampling, arrival_time=0.0)
            for _ in range(samples)
        ]
        self.table.admit(request, RANK, list(calls), rich)
        self.sequences[request] = list(request.sequences)
        return request, sink, out

    def wire_id(self, request: Request, index: int = 0) -> str:
        return self.sequences[request][index].wire_id

    def step(self, *outputs: tuple[str, list[int], int | None]) -> Any:
        """One engine message, decoded from real bytes."""
        encoded = [[wire_id, tokens, None, None, None, finish, *[None] * 12] for wire_id, tokens, finish in outputs]
        return self.codec.step([msgspec.msgpack.encode([0, encoded, None, 0.0, None, None, None, None, "default"])])

    def deliver(self, *outputs: tuple[str, list[int], int | None]) -> None:
        self.table.deliver([self.step(*outputs)])

    def aborted(self) -> list[str]:
        return [one for frames in self.sent if frames[0] == ABORT for one in msgspec.msgpack.decode(frames[1])]


def test_steps_that_waited_together_become_one_chunk() -> None:
    bench = Bench()
    request, sink, _ = bench.admit()
    one = bench.wire_id(request)
    bench.deliver((one, [10], None))
    bench.table.deliver(
        [bench.step((one, [11], None)), bench.step((one, [12, 13], None)), bench.step((one, [14], LENGTH))]
    )
    assert sink.chunks == [[10], [11, 12, 13, 14]]
    assert sink.ends == [(0, Finish.LENGTH, [10, 11, 12, 13, 14])] and sink.closed == 1
    assert len(bench.table) == 0


def test_a_blocked_stream_keeps_tokens_and_sends_them_as_one_chunk() -> None:
    bench = Bench()
    request, sink, out = bench.admit()
    out.blocked = True
    for token in range(5):
        bench.deliver((bench.wire_id(request), [token], None))
    assert sink.chunks == []
    out.blocked = False
    bench.table.resume(request)
    bench.deliver((bench.wire_id(request), [5], None))
    assert sink.chunks == [[0, 1, 2, 3, 4], [5]]


@given(st.lists(st.tuples(st.lists(st.integers(0, 1000), max_size=3), st.booleans(), st.booleans()), max_size=30))
def test_tokens_are_never_lost_repeated_or_reordered(script: list[tuple[list[int], bool, bool]]) -> None:
    bench = Bench()
    request, sink, out = bench.admit()
    waiting, expected = [], []
    for tokens, blocked, more in script:
        expected += tokens
        waiting.append(bench.step((bench.wire_id(request), tokens, None)))
        out.blocked = blocked
        if not blocked:
            bench.table.resume(request)
        if not more:
            bench.table.deliver(waiting)
            waiting = []
    bench.table.deliver([*waiting, bench.step((bench.wire_id(request), [7], STOP))])
    assert [token for chunk in sink.chunks for token in chunk] == [*expected, 7] == sink.ends[0][2]
    assert all(sink.chunks) and sink.closed == 1 and len(sink.ends) == 1


def test_an_output_after_the_terminal_changes_nothing() -> None:
    bench = Bench()
    request, sink, _ = bench.admit()
    one = bench.wire_id(request)
    bench.deliver((one, [1], LENGTH))
    bench.deliver((one, [2], LENGTH), (one, [3], None))
    assert sink.ends == [(0, Finish.LENGTH, [1])] and sink.closed == 1
    assert bench.table.strangers == 0 and bench.aborted() == []


def test_an_abort_gives_the_terminal_and_late_tokens_are_dropped() -> None:
    bench = Bench()
    request, sink, _ = bench.admit("mine")
    bench.deliver((bench.wire_id(request), [1], None))
    assert bench.table.abort("mine") and not bench.table.abort("mine")
    bench.deliver((bench.wire_id(request), [2], None))
    assert sink.ends == [(0, Finish.ABORT, [1])]
    assert bench.aborted() == [bench.wire_id(request)]


def test_a_live_id_is_refused_and_free_again_after_its_abort() -> None:
    bench = Bench()
    bench.admit("mine")
    with pytest.raises(Refusal) as refused:
        bench.admit("mine")
    assert refused.value.code is Code.ALREADY_EXISTS
    bench.table.abort("mine")
    bench.admit("mine")
    bench.admit("")
    bench.admit("")


def test_the_limit_counts_samples() -> None:
    bench = Bench(max_in_flight=3)
    bench.admit(samples=2)
    with pytest.raises(Refusal) as refused:
        bench.admit(samples=2)
    assert refused.value.code is Code.RESOURCE_EXHAUSTED and "--max-in-flight" in refused.value.message


def test_each_sample_ends_once_and_the_call_after_the_last() -> None:
    bench = Bench()
    request, sink, _ = bench.admit(samples=3)
    bench.deliver(*((bench.wire_id(request, index), [index], None) for index in range(3)))
    bench.deliver((bench.wire_id(request, 1), [9], STOP))
    assert sink.closed == 0
    bench.table.cancel(request)
    assert bench.aborted() == [bench.wire_id(request, 0), bench.wire_id(request, 2)]
    assert sink.closed == 0 and sink.failure is None


def test_an_error_of_one_sample_ends_the_request_and_aborts_the_others() -> None:
    bench = Bench()
    request, sink, _ = bench.admit(samples=2)
    bench.deliver((bench.wire_id(request, 0), [], ERROR))
    assert sink.failure is not None and sink.failure[0] is Code.INTERNAL
    assert bench.aborted() == [bench.wire_id(request, 1)]


def test_an_orphans_output_is_aborted_but_not_without_limit() -> None:
    bench = Bench()
    bench.admit()
    for number in range(100):
        bench.deliver((f"9.9.{number}", [1], None))
    assert bench.table.strangers == 100
    assert len(bench.aborted()) == STRANGER_ABORTS_PER_SECOND
    bench.now = 1.5
    bench.deliver(("9.9.1", [1], None))
    assert len(bench.aborted()) == STRANGER_ABORTS_PER_SECOND + 1


def test_an_abort_while_the_cache_is_transferred_waits_for_the_first_token() -> None:
    bench = Bench()
    request, _, _ = bench.admit(receiving=True)
    bench.table.cancel(request)
    assert bench.aborted() == []
    bench.deliver((bench.wire_id(request), [5], None))
    assert bench.aborted() == [bench.wire_id(request)]
    bench.timers[0][1]()
    assert len(bench.aborted()) == 1


def test_an_abort_while_the_cache_is_transferred_waits_no_longer_than_its_cap() -> None:
    bench = Bench()
    request, _, _ = bench.admit(receiving=True)
    bench.table.cancel(request)
    ((delay, release),) = bench.timers
    assert delay == ABORT_HOLD_S
    release()
    assert bench.aborted() == [bench.wire_id(request)]


def test_a_transfer_that_ends_by_itself_needs_no_abort() -> None:
    bench = Bench()
    request, _, _ = bench.admit(receiving=True)
    bench.table.cancel(request)
    bench.deliver((bench.wire_id(request), [], ERROR))
    bench.timers[0][1]()
    assert bench.aborted() == []


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


def stops(tokenizer: Tokenizer, *strings: str, min_tokens: int = 0) -> Callable[[], Rich]:
    rules = StopRules(
        tokenizer,
        strings,
        [1],
        min_tokens=min_tokens,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
    )

    def make() -> Rich:
        rich = Rich()
        rich.stops = StopMatcher(rules)
        return rich

    return make


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_a_stop_string_cuts_at_its_completing_token_however_tokens_arrive(tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog, and runs away.").ids
    expected = next(n for n in range(len(ids) + 1) if "lazy d" in tokenizer.decode(ids[:n]))
    bench = Bench()
    request, sink, _ = bench.admit(rich=stops(tokenizer, "never", "lazy d"))
    for start in range(0, len(ids), size):
        bench.deliver((bench.wire_id(request), ids[start : start + size], None))
    assert sink.ends == [(0, Finish.STOP, ids[:expected])]
    assert bench.sequences[request][0].stop_string == "lazy d"
    assert bench.aborted() == [bench.wire_id(request)]


class Line:
    """A call and its connection: every message in the order in which it was sent, by either way."""

    method = "/x/Generate"
    stream_id = 1
    blocked = False
    framed = True
    unsent = b""

    def __init__(self) -> None:
        self.messages: list[pb.GenerateResponse] = []
        self.direct = 0
        self.finished = 0
        self.credit = 1 << 30
        self.outflow = Outflow(self._sent)

    def _sent(self) -> None:
        data = b"".join(self.outflow.take())
        while data:
            size = int.from_bytes(data[:3], "big")
            assert data[3:9] == bytes((0, 0, 0, 0, 0, self.stream_id))
            self.direct += 1
            self.send(data[14 : 9 + size])
            data = data[9 + size :]

    def send(self, message: bytes) -> None:
        self.messages.append(pb.GenerateResponse.FromString(message))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("blocked_at", [None, 0, 1, 4])
@pytest.mark.parametrize("streams", [1, 40])
def test_a_searched_stream_goes_the_short_way_and_ends_at_its_stop_string(
    tokenizer: Tokenizer, streams: int, blocked_at: int | None
) -> None:
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog, and runs away.").ids
    expected = next(n for n in range(len(ids) + 1) if "lazy d" in tokenizer.decode(ids[:n]))
    bench = Bench()
    lines = [Line() for _ in range(streams)]
    requests = []
    for line in lines:
        request = Request("", [1, 2, 3], line, PlainSink(line, 3), stream=True, arrived=0.0)  # type: ignore[arg-type]
        sampling = Sampling(max_tokens=100)
        call = GenerateCall(wire_id="", prompt_token_ids=[1, 2, 3], sampling=sampling, arrival_time=0.0)
        bench.table.admit(request, RANK, [call], stops(tokenizer, "lazy d"))
        requests.append((request, request.sequences[0]))
    for number, token in enumerate(ids):
        if number == blocked_at:
            for line, (request, _) in zip(lines, requests, strict=True):
                line.blocked = True
                bench.table.hold(request)
        bench.deliver(*[(sequence.wire_id, [token], None) for _, sequence in requests])
        if number == blocked_at:
            for line, (request, _) in zip(lines, requests, strict=True):
                line.blocked = False
                bench.table.resume(request)
    for line, (_, sequence) in zip(lines, requests, strict=True):
        *chunks, end = line.messages
        assert [token for one in chunks for token in one.chunk.token_ids] == ids[:expected]
        assert [one.chunk.completion_tokens for one in chunks] == list(range(1, expected + 1))
        assert (end.complete.matched_stop_str, list(end.complete.output_ids)) == ("lazy d", ids[:expected])
        assert line.finished == 1 and sequence.finish is Finish.STOP
        assert line.direct >= expected - 4
    assert sorted(bench.aborted()) == sorted(sequence.wire_id for _, sequence in requests)
    assert len(bench.table) == 0


def test_a_stop_string_in_the_last_delta_needs_no_abort(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three").ids
    bench = Bench()
    request, sink, _ = bench.admit(rich=stops(tokenizer, "three"))
    bench.deliver((bench.wire_id(request), ids, LENGTH))
    assert sink.ends == [(0, Finish.STOP, ids)] and bench.aborted() == []


@given(st.data())
def test_a_matcher_finds_what_a_search_of_the_whole_text_finds(tokenizer: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(alphabet="abé🙂 .\n", max_size=40))
    strings = data.draw(st.lists(st.text(alphabet="abé🙂 .\n", min_size=1, max_size=4), min_size=1, max_size=3))
    ids = tokenizer.encode(text).ids
    matcher = stops(tokenizer, *strings)().stops
    assert matcher is not None
    found = matcher.feed(ids)
    kept = next((n for n in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in strings)), None)
    assert (found[0] if found else None) == kept


def test_what_ended_is_not_left_to_the_garbage_collector() -> None:
    """A request's prompt and output go when the last that knows it does."""
    bench = Bench()
    gc.collect()
    gc.disable()
    try:
        cancelled, aborted, finished = (bench.admit(f"client-{number}", samples=2)[0] for number in range(3))
        bench.table.cancel(cancelled)
        bench.table.abort(aborted.client_id)
        bench.deliver(*((bench.wire_id(finished, index), [1], LENGTH) for index in range(2)))
        bench.sequences.clear()
        for ended in (cancelled, aborted, finished):
            assert sys.getrefcount(ended) <= 5  # the names here and the loop's, and no sequence
    finally:
        gc.enable()
