"""What the sieve takes out of received bytes: nothing is lost, and nothing changes places, wherever reads are cut."""

from __future__ import annotations

import struct
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bridge.grpc.sieve import Sieve
from tests.grpc.raw import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    settings,
    window_update,
)

LARGEST = 2**31 - 1
RESERVED = 1 << 31
# A SETTINGS frame of 32 settings is the longest that the sieve keeps.
KEPT = 9 + 32 * 6
RENAMED = 0xFFFF

STREAMS = st.sampled_from((0, 1, 2, 3, 5, 8, LARGEST))
BYTES = st.binary(max_size=40) | st.just(window_update(1, 5) + settings(window=7))
SETTING = st.tuples(
    st.sampled_from((1, 3, INITIAL_WINDOW_SIZE, INITIAL_WINDOW_SIZE, 9, RENAMED)),
    st.integers(0, LARGEST) | st.integers(0, 2**32 - 1),
)
FRAMES = st.one_of(
    st.builds(window_update, STREAMS, st.integers(1, LARGEST)),
    st.builds(window_update, STREAMS.map(lambda stream: stream | RESERVED), st.integers(0, 2**32 - 1)),
    st.builds(window_update, STREAMS, st.just(0)),
    st.builds(frame, st.just(WINDOW_UPDATE), st.integers(0, 255), STREAMS, st.binary(max_size=9)),
    st.builds(frame, st.sampled_from((HEADERS, CONTINUATION, 5)), st.sampled_from((0, 4, 5)), STREAMS, BYTES),
    st.builds(frame, st.sampled_from((DATA, PING, 7, 200)), st.integers(0, 255), STREAMS, BYTES),
    st.builds(
        frame,
        st.just(SETTINGS),
        st.sampled_from((0, 0, 0, ACK)),
        st.sampled_from((0, 0, 0, RESERVED, 1)),
        st.lists(SETTING, max_size=34).map(lambda pairs: b"".join(struct.pack(">HI", *pair) for pair in pairs))
        | st.binary(max_size=20),
    ),
)


class Model:
    """The same, frame by frame."""

    def __init__(self) -> None:
        self.in_block = False
        self.window = 65535
        self.last_stream = 0

    def pass_on(self, whole: bytes) -> tuple[bytes, list[tuple[int, int]]]:
        """What becomes of one frame: what passes, and the update."""
        kind, flags, payload = whole[3], whole[4], whole[9:]
        stream = int.from_bytes(whole[5:9], "big") & LARGEST
        if kind in (HEADERS, CONTINUATION, 5):
            self.in_block = not flags & END_HEADERS
            if kind == HEADERS:
                self.last_stream = max(self.last_stream, stream)
        elif self.in_block:
            return whole, []
        elif kind == WINDOW_UPDATE and len(payload) == 4:
            increment = int.from_bytes(payload, "big") & LARGEST
            return (b"", [(stream, increment)]) if increment else (whole, [])
        elif kind == SETTINGS and not stream and len(payload) <= KEPT - 9 and len(payload) % 6 == 0:
            pairs = list(struct.iter_unpack(">HI", payload))
            windows = [value for name, value in pairs if name == INITIAL_WINDOW_SIZE]
            if windows and max(windows) <= LARGEST:
                self.window = windows[-1]
                names = [(RENAMED if name == INITIAL_WINDOW_SIZE else name, value) for name, value in pairs]
                return whole[:9] + b"".join(struct.pack(">HI", *pair) for pair in names), []
        return whole, []


@given(st.lists(FRAMES, max_size=12), st.binary(max_size=8), st.lists(st.integers(0, 700), max_size=12), st.booleans())
def test_what_passes_and_the_updates_are_the_input_in_order(
    frames: list[bytes], tail: bytes, cuts: list[int], view: bool
) -> None:
    data = PREFACE + b"".join(frames) + tail
    model, sieve = Model(), Sieve()
    ends, expected, updates_by_end = [len(PREFACE)], PREFACE, [0]
    expected_updates: list[tuple[int, int]] = []
    for one in frames:
        passes, update = model.pass_on(one)
        expected += passes
        expected_updates += update
        ends.append(ends[-1] + len(one))
        updates_by_end.append(len(expected_updates))
    passed, updates = b"", []
    for start, stop in pairwise(sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})):
        parts, more = sieve.take(memoryview(data)[start:stop] if view else data[start:stop])
        passed += b"".join(parts)
        updates += more
        whole = sum(end <= stop for end in ends)
        assert len(updates) == updates_by_end[max(whole - 1, 0)], "an update came before its last byte, or after"
        held = stop - len(passed) - 13 * len(updates)
        assert 0 <= held < KEPT
    # What follows the last whole frame may be kept: it is the start of one.
    assert passed == expected + tail[: len(passed) - len(expected)]
    assert updates == expected_updates
    assert sieve.initial_window == model.window
    assert sieve.last_stream == model.last_stream


@given(st.lists(FRAMES, max_size=8))
def test_bytes_that_come_one_at_a_time_make_no_difference(frames: list[bytes]) -> None:
    data = PREFACE + b"".join(frames)
    whole, slow = Sieve(), Sieve()
    parts, updates = whole.take(data)
    slow_passed, slow_updates = b"", []
    for at in range(len(data)):
        passed, more = slow.take(data[at : at + 1])
        slow_passed += b"".join(passed)
        slow_updates += more
    assert slow_passed == b"".join(parts)
    assert slow_updates == updates
    assert slow.initial_window == whole.initial_window


def test_an_update_in_a_header_block_passes() -> None:
    data = PREFACE + frame(HEADERS, 0, 1, b"half") + window_update(1, 5) + frame(CONTINUATION, END_HEADERS, 1, b"rest")
    sieve = Sieve()
    passed, updates = sieve.take(data + window_update(1, 6))
    assert b"".join(passed) == data
    assert updates == [(1, 6)]


def test_long_settings_are_not_kept() -> None:
    """nghttp2 refuses more than 32 settings: their start passes at once."""
    sieve = Sieve()
    sieve.take(PREFACE)
    many = frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 1) * 33)
    passed, updates = sieve.take(many[:-1])
    assert b"".join(passed) == many[:-1]
    assert updates == []
    assert sieve.initial_window == 65535


def test_a_large_payload_is_skipped_without_a_look() -> None:
    sieve = Sieve()
    sieve.take(PREFACE)
    inner = window_update(1, 9) * 1000
    data = frame(DATA, 0, 1, inner) + window_update(3, 4)
    passed, updates = b"", []
    for at in range(0, len(data), 512):
        parts, more = sieve.take(data[at : at + 512])
        passed += b"".join(parts)
        updates += more
    assert passed == frame(DATA, 0, 1, inner)
    assert updates == [(3, 4)]
