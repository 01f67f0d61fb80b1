"""What a connection sends of its messages, without a connection: windows to the byte, and who flies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.grpc import outflow as outflows
from bridge.grpc.call import Call
from bridge.grpc.outflow import FRAME_BYTES, NOTHING, Flight, Outflow

SIZE = 20
ENDED = b"<trailers>"


class Stub:
    """What the outflow knows of a call."""

    def __init__(self, stream_id: int = 1, credit: int = 65535, *, framed: bool = True) -> None:
        self.stream_id = stream_id
        self.credit = credit
        self.framed = framed
        self.blocked = credit <= 0
        self.unsent = NOTHING
        self.blocks = 0
        self.emptied_times = 0
        self.ends = False

    def block(self) -> None:
        self.blocks += not self.blocked
        self.blocked = True

    def emptied(self) -> bool:
        self.emptied_times += 1
        return self.ends


class Bench:
    """An outflow and what it was told to write."""

    def __init__(self) -> None:
        self.dirty = 0
        self.outflow = Outflow(self._mark)
        self.full: list[Flight] = []
        self.frames: list[tuple[int, bytes]] = []

    def _mark(self) -> None:
        self.dirty += 1

    def call(self, stream_id: int = 1, credit: int = 65535, *, framed: bool = True) -> Any:
        return Stub(stream_id, credit, framed=framed)

    def flight(self, call: Any, chunks: list[int]) -> tuple[Flight, bytes | None]:
        flight = Flight(str(call.stream_id), cast(Call, call), SIZE, chunks, self.full.append)
        return flight, self.outflow.board(flight)

    def step(self, *flying: tuple[Flight, bytes | None, list[int]]) -> None:
        """One chunk of each."""
        chunks = []
        for _, header, tokens in flying:
            assert header is not None
            tokens.append(0)
            chunks.append(header + bytes(SIZE))
        self.outflow.express(b"".join(chunks), len(chunks))

    def taken(self) -> list[tuple[int, bytes]]:
        """The DATA frames written since the last time: stream and payload."""
        data, found = b"".join(self.outflow.take()), []
        while data:
            size, stream_id = int.from_bytes(data[:3], "big"), int.from_bytes(data[5:9], "big")
            assert data[3:5] == b"\0\0", "not a DATA frame, or one that ends its stream"
            found.append((stream_id, data[9 : 9 + size]))
            data = data[9 + size :]
        return found


def test_a_message_that_fits_goes_at_once_and_is_counted() -> None:
    bench = Bench()
    call = bench.call(credit=100)
    bench.outflow.send(call, b"x" * 60)
    assert bench.taken() == [(1, b"x" * 60)]
    assert (call.credit, bench.outflow.window) == (40, 65535 - 60)
    assert not call.blocked and bench.dirty == 1
    bench.outflow.send(call, b"y" * 40)
    assert call.blocked and call.credit == 0


def test_a_message_waits_for_the_headers_and_those_behind_it_too() -> None:
    bench = Bench()
    call = bench.call(framed=False)
    bench.outflow.send(call, b"one")
    bench.outflow.send(call, b"two")
    assert not bench.outflow.pump() and bench.taken() == []
    call.framed = True
    bench.outflow.send(call, b"three")
    assert bench.taken() == []
    bench.outflow.pump()
    assert bench.taken() == [(1, b"onetwothree")]
    assert not bench.outflow.waiting and call.emptied_times == 1


def test_a_long_message_is_cut_into_frames_and_its_trailers_are_told_once() -> None:
    bench = Bench()
    call = bench.call(credit=1 << 20)
    call.ends = True
    message = bytes(range(256)) * 200
    bench.outflow.send(call, message)
    assert bench.outflow.pump()
    frames = bench.taken()
    assert b"".join(payload for _, payload in frames) == message
    assert [len(payload) for _, payload in frames] == [FRAME_BYTES, FRAME_BYTES, FRAME_BYTES, 51200 - 3 * FRAME_BYTES]
    assert call.emptied_times == 1


def test_a_stream_whose_window_the_client_took_back_sends_nothing() -> None:
    bench = Bench()
    call = bench.call(credit=50)
    bench.outflow.send(call, b"x" * 80)
    bench.outflow.pump()
    assert len(bench.taken()) == 1 and call.credit == 0
    call.credit = -10
    bench.outflow.pump()
    assert bench.taken() == [] and call.blocked
    call.credit = 40
    bench.outflow.pump()
    assert bench.taken() == [(1, b"x" * 30)] and call.credit == 10


def test_calls_take_turns_at_a_window_that_grows_slowly() -> None:
    bench = Bench()
    calls = [bench.call(stream_id) for stream_id in (1, 3, 5)]
    for call in calls:
        bench.outflow.send(call, bytes(30_000))
    bench.outflow.window = 0
    order = []
    for _ in range(6):
        bench.outflow.window += 10_000
        bench.outflow.pump()
        order += [stream_id for stream_id, _ in bench.taken()]
    assert order == [1, 3, 5, 1, 3, 5]


def test_a_long_reply_does_not_look_at_blocked_calls_for_each_of_its_frames() -> None:
    bench = Bench()
    reads = 0

    class Watched(Stub):
        @property
        def framed(self) -> bool:
            nonlocal reads
            reads += 1
            return True

        @framed.setter
        def framed(self, value: bool) -> None:
            """It always is."""

    for stream_id in range(3, 203, 2):
        bench.outflow.send(cast(Any, Watched(stream_id, 1)), b"ab")
    bench.outflow.pump()
    long = bench.call(1, 1 << 30)
    bench.outflow.send(long, bytes(1 << 22))
    bench.outflow.window = 1 << 30
    for call in bench.outflow.waiting:
        call.credit = max(call.credit, 0)
    reads = 0
    bench.outflow.pump()
    assert sum(len(payload) for _, payload in bench.taken()) >= 1 << 22
    assert reads <= 100
    assert long not in bench.outflow.waiting


def test_a_dropped_call_sends_nothing_more() -> None:
    bench = Bench()
    call = bench.call(credit=0)
    bench.outflow.send(call, b"waits")
    bench.outflow.drop(call)
    call.credit = 100
    assert not bench.outflow.pump()
    assert bench.taken() == [] and not call.unsent and not bench.outflow.waiting
    assert NOTHING == b""


@pytest.mark.parametrize("why", ["blocked", "unframed", "unsent", "no window", "in flight", "too many chunks"])
def test_a_call_that_cannot_fly_goes_on_foot(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outflows, "LONGEST_FLIGHT", 10)
    bench = Bench()
    call = bench.call(credit=SIZE - 1 if why == "no window" else 1000, framed=why != "unframed")
    call.blocked = why == "blocked"
    if why == "unsent":
        call.unsent = bytearray(b"x")
    if why == "in flight":
        assert bench.flight(call, [])[1] is not None
    _, header = bench.flight(call, [0] * 10 if why == "too many chunks" else [])
    assert header is None


def test_a_flight_is_over_with_its_window_and_not_a_chunk_later() -> None:
    bench = Bench()
    short, long = bench.call(1, SIZE * 5 + 7), bench.call(3)
    first, second = [0], [0]
    a, b = bench.flight(short, first), bench.flight(long, second)
    for _ in range(5):
        assert bench.full == []
        bench.step((*a, first), (*b, second))
    assert bench.full == [a[0]]
    assert short.credit == 7
    assert long.credit == 65535 - 5 * SIZE
    assert bench.outflow.window == 65535 - 10 * SIZE
    bench.step((*b, second))
    bench.outflow.land(b[0])
    assert long.credit == 65535 - 6 * SIZE


def test_no_flight_has_more_chunks_than_fit_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outflows, "LONGEST_FLIGHT", 100)
    bench = Bench()
    chunks = [0] * 60
    flying = bench.flight(bench.call(), chunks)
    while not bench.full:
        bench.step((*flying, chunks))
    assert len(chunks) == 100


def test_a_grant_to_a_flight_counts_what_it_has_sent() -> None:
    """A window of 2**31 - 1 that is given back as it is spent never overflows."""
    bench = Bench()
    call, chunks = bench.call(credit=2**31 - 1), [0]
    flying = bench.flight(call, chunks)
    bench.step((*flying, chunks))
    call.credit += SIZE
    assert bench.outflow.credit(call) == 2**31 - 1
    assert bench.outflow.credit(call) == 2**31 - 1
    call.credit += 1
    assert bench.outflow.credit(call) == 2**31


def test_room_is_for_one_chunk_of_every_flight() -> None:
    bench = Bench()
    bench.outflow.window = 3 * SIZE
    flights = [bench.flight(bench.call(stream_id), [0]) for stream_id in (1, 3, 5)]
    assert bench.outflow.has_room
    late, _ = bench.flight(bench.call(7), [0])
    assert not bench.outflow.has_room
    bench.outflow.land(late)
    bench.outflow.land(late)
    assert bench.outflow.has_room
    assert all(header is not None for _, header in flights)


SCRIPT = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(0, 7)),
        st.tuples(st.just("grant"), st.integers(0, 2), st.integers(1, 90)),
        st.tuples(st.just("connection"), st.integers(1, 200)),
        st.tuples(st.just("resize"), st.integers(-80, 80)),
        st.tuples(st.just("board"), st.integers(0, 2)),
        st.tuples(st.just("land"), st.integers(0, 2)),
        st.tuples(st.just("send"), st.integers(0, 2), st.integers(1, 60)),
    ),
    max_size=60,
)


@given(SCRIPT)
def test_windows_are_never_exceeded_whatever_happens(script: Sequence[tuple[Any, ...]]) -> None:
    """The client's side of the books, kept from the frames: no window of it is ever overdrawn."""
    bench = Bench()
    bench.outflow.window = connection = 150
    calls = [bench.call(stream_id, 70) for stream_id in (1, 3, 5)]
    granted = {call.stream_id: 70 for call in calls}
    tokens: list[list[int]] = [[0], [0], [0]]
    flying: dict[int, tuple[Flight, bytes | None]] = {}
    queued = {call.stream_id: 0 for call in calls}
    sent = dict(queued)
    for what, *given_ in script:
        if what == "step":
            # In a step each flight sends one chunk or none, as engines have it.
            chosen = [index for index in flying if given_[0] >> index & 1]
            if chosen and bench.outflow.has_room:
                for index in chosen:
                    queued[calls[index].stream_id] += SIZE
                bench.step(*((*flying[index], tokens[index]) for index in chosen))
        elif what == "grant":
            index, increment = given_
            calls[index].credit += increment
            granted[calls[index].stream_id] += increment
            calls[index].blocked = bench.outflow.credit(calls[index]) <= len(calls[index].unsent)
        elif what == "connection":
            bench.outflow.window += given_[0]
            connection += given_[0]
        elif what == "resize":
            bench.outflow.settle()
            for index, call in enumerate(calls):
                call.credit += given_[0]
                granted[call.stream_id] += given_[0]
                call.blocked = call.credit <= len(call.unsent)
                if call.blocked and index in flying:
                    bench.outflow.land(flying.pop(index)[0])
            bench.outflow.settle()
        elif what == "board" and given_[0] not in flying:
            flight, header = bench.flight(calls[given_[0]], tokens[given_[0]])
            if header is not None:
                flying[given_[0]] = flight, header
        elif what == "land" and given_[0] in flying:
            bench.outflow.land(flying.pop(given_[0])[0])
        elif what == "send" and given_[0] not in flying:
            queued[calls[given_[0]].stream_id] += given_[1]
            bench.outflow.send(calls[given_[0]], bytes(given_[1]))
        for flight in bench.full:
            flying = {index: pair for index, pair in flying.items() if pair[0] is not flight}
        bench.full.clear()
        bench.outflow.pump()
        fresh = bench.taken()
        for stream_id, payload in fresh:
            connection -= len(payload)
            granted[stream_id] -= len(payload)
            sent[stream_id] += len(payload)
            assert granted[stream_id] >= 0, "a stream's window is overdrawn"
        assert connection >= 0, "the connection's window is overdrawn"
        assert connection == bench.outflow.window
    for call in calls:
        assert bench.outflow.credit(call) == granted[call.stream_id]
        assert sent[call.stream_id] + len(call.unsent) == queued[call.stream_id]
        assert not call.unsent or call in bench.outflow.waiting
